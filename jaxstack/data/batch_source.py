"""Any source of batches as one interface: ours, or a user's iterable or function."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.parallel.rules import SEQUENCES, AxisRules
from pallas_kernels import sequence_order

HostBatch = Mapping[str, np.ndarray]


@runtime_checkable
class BatchSource(Protocol):
    """A source that can start anywhere; `jaxstack.data.loader.Data` is one."""

    def batches(self, *, global_batch_size: int, rows: Sequence[int] | np.ndarray, start: int) -> Iterator[HostBatch]:
        """Rows `rows` of the global batches start, start + 1, ..."""
        ...


class UserBatches:
    """A user's batches: a function of the step (0 is the first), or an iterable, of which a resumed run skips the
    batches that were used. Each is the whole global batch: a dict of arrays with equal first dims.
    """

    def __init__(self, source: Iterable[HostBatch] | Callable[[int], HostBatch]):
        self._source = source

    def batches(self, *, global_batch_size: int, rows: Sequence[int] | np.ndarray, start: int) -> Iterator[HostBatch]:
        if callable(self._source):
            found: Iterator[HostBatch] = (self._source(step) for step in itertools.count(start))
        else:
            found = itertools.islice(iter(self._source), start, None)
        for batch in found:
            yield {name: np.asarray(value)[rows] for name, value in check_batch(batch, global_batch_size).items()}


def check_batch(batch: Any, rows: int | None = None) -> HostBatch:
    """The batch itself, if it is a dict of arrays with one first dim (of `rows`).

    Raises:
      JaxstackError: it is not.
    """
    if not isinstance(batch, Mapping) or not batch:
        raise JaxstackError(f"a batch must be a dict of arrays; found {type(batch).__name__}.")
    sizes = {name: np.shape(value)[0] if np.ndim(value) else None for name, value in batch.items()}
    if len(set(sizes.values())) != 1 or None in sizes.values() or (rows and set(sizes.values()) != {rows}):
        wanted = f" of train.global_batch_size ({rows}) rows" if rows else ""
        raise JaxstackError(f"the arrays of a batch must have one first dim{wanted}; found {sizes}.")
    return batch


def as_source(data: Any) -> BatchSource:
    """`data` as a BatchSource.

    Raises:
      TypeError: it is neither a source, nor a function, nor an iterable.
    """
    if isinstance(data, BatchSource):
        return data
    if callable(data) or isinstance(data, Iterable):
        return UserBatches(cast(Any, data))
    raise TypeError(
        "data must have a `batches` method, be a function of the step, or an iterable of batches; "
        f"found {type(data).__name__}."
    )


def batch_sharding(rules: AxisRules, shape: Sequence[int]) -> NamedSharding:
    """Where an array of the global batch lies."""
    return rules.sharding(rules.batch_spec(shape))


class BatchShardings(dict[str, NamedSharding]):
    """Name of a batch's array -> its layout."""

    def __init__(self, rules: AxisRules, rows: int):
        super().__init__()
        self._rules, self._rows = rules, rows

    def __missing__(self, name: str) -> NamedSharding:
        return self._rules.sharding(self._rules.batch_spec((self._rows,), name))


def arrange(batch: HostBatch, rules: AxisRules) -> HostBatch:
    """The batch as the devices of the `context` axis hold it: sequences in their order, with explicit positions.

    Raises:
      ConfigError: the chunks do not divide the length.
    """
    parts = rules.degree(rules.table["length"])
    if parts == 1 or "tokens" not in batch:
        return batch
    shape = np.shape(batch["tokens"])
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    try:
        order = sequence_order(shape[1], parts)
    except ValueError as error:
        raise ConfigError(f"parallel.context={parts}: {error}.") from None
    whole = {"positions": positions, **batch}
    return {name: np.asarray(x)[:, order] if name in SEQUENCES else x for name, x in whole.items()}


def abstract_batch(batch: HostBatch, rules: AxisRules, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and layouts of the global batch of `rows` rows that this host batch is a part of.

    Raises:
      ConfigError: the devices of the batch axes do not divide the rows.
    """
    check_rows(rows, rules, "train.global_batch_size")
    layouts = BatchShardings(rules, rows)

    def describe(name: str, x: np.ndarray) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)
        return jax.ShapeDtypeStruct((rows, *np.shape(x)[1:]), dtype, sharding=layouts[name])

    return {name: describe(name, x) for name, x in arrange(batch, rules).items()}


def check_rows(rows: int, rules: AxisRules, what: str) -> None:
    """Raises ConfigError where the batch axes of the mesh do not divide `rows`."""
    shards = rules.degree(rules.table["batch"])
    if rows % shards:
        below = rows // shards * shards
        raise ConfigError(
            f"{what} ({rows}) must be divisible by the {shards} devices of data x fsdp x expert; nearest: "
            f"{f'{below} or ' if below else ''}{below + shards}."
        )


def items_in_batch(batch: Mapping[str, Any]) -> int:
    """What throughput counts: tokens where the batch has `labels` or `tokens`, otherwise rows."""
    for name in ("labels", "tokens"):
        if name in batch:
            return int(np.prod(batch[name].shape))
    return int(next(iter(batch.values())).shape[0])
