"""A common interface for all sources of batches: jaxstack's own data, or a user's iterable or function."""

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, cast, runtime_checkable

import jax
import numpy as np

from jaxstack.errors import JaxstackError

_NOT_NUMBERS = "OSUMm"
"""NumPy's kinds of dtypes that devices do not have: objects, texts and times."""
HostBatch = Mapping[str, np.ndarray]
"""The arrays of a batch in host memory, whose first dims are equal."""


@runtime_checkable
class BatchSource(Protocol):
    """Interface of data sources that can yield batches from any step on, such as `jaxstack.data.loader.Data`."""

    def batches(self, *, global_batch_size: int, rows: Sequence[int] | np.ndarray, start: int) -> Iterator[HostBatch]:
        """Yield the rows at indices `rows` of each global batch, from batch number `start` on."""
        ...


@runtime_checkable
class IndexedSource(Protocol):
    """Interface of batch sources that can also read one batch, without starting reader threads or processes."""

    def batch(self, number: int, *, global_batch_size: int, rows: Sequence[int] | np.ndarray) -> HostBatch:
        """Return the rows at indices `rows` of global batch number `number`."""
        ...


class UserBatches:
    """Adapts a user's function or iterable of global batches (dicts of arrays) to the `BatchSource` interface.

    The arrays of a batch have equal first dims.

    Args:
      source: a function of the step (0 is the first); or an iterable, of which a resumed run skips the batches that
        were used. An iterator, such as a generator, cannot be read twice: reading continues at its next batch.
    """

    def __init__(self, source: Iterable[HostBatch] | Callable[[int], HostBatch]):
        self._source = source
        self._read = 0
        self._peeked: list[HostBatch] = []

    @property
    def is_iterator(self) -> bool:
        """True if the user's data is an iterator, which can be read only once."""
        return isinstance(self._source, Iterator)

    def batches(self, *, global_batch_size: int, rows: Sequence[int] | np.ndarray, start: int) -> Iterator[HostBatch]:
        """Yield the rows at indices `rows` of the user's global batches from number `start` on, and check each batch.

        Raises:
          JaxstackError: a batch is no dict of arrays with `global_batch_size` rows, or differs in shape from the first.
        """
        first: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, np.dtype] = {}
        for number, batch in enumerate(self._from(start), start):
            checked = check_batch(batch, global_batch_size)
            whole = {name: np.asarray(value) for name, value in checked.items()}
            shapes = {name: value.shape for name, value in whole.items()}
            if (first := first or shapes) != shapes:
                raise JaxstackError(
                    f"batch {number} has the shapes {_shown(shapes, first)}, batch {start} had "
                    f"{_shown(first, shapes)}: all batches must have the same keys and shapes, for which the step is "
                    "compiled; pad them."
                )
            found = {name: _device_dtype(name, value) for name, value in whole.items()}
            if (dtypes := dtypes or found) != found:
                name = next(name for name, dtype in found.items() if dtype != dtypes[name])
                raise JaxstackError(
                    f"the array {name!r} of batch {number} has dtype {found[name]}, in batch {start} it had "
                    f"{dtypes[name]}: all batches must have the same dtypes, for which the step is compiled; "
                    f"convert it: .astype({str(dtypes[name])!r})."
                )
            yield {name: value[rows] for name, value in whole.items()}

    def peek(self, start: int) -> HostBatch | None:
        """Return batch number `start` without consuming it (`batches` still yields it); None if there is none."""
        first = next(self._from(start), None)
        if first is not None and isinstance(self._source, Iterator):
            self._peeked.append(first)
            self._read -= 1
        return first

    def _from(self, start: int) -> Iterator[HostBatch]:
        if callable(self._source):
            return map(self._source, itertools.count(start))
        if isinstance(self._source, Iterator):
            return self._continue_from(self._source, start)
        return itertools.islice(iter(self._source), start, None)

    def _continue_from(self, source: Iterator[HostBatch], start: int) -> Iterator[HostBatch]:
        """Yield the batches of an iterator from `start` on, or from its current position if that is later."""
        while (batch := self._peeked.pop() if self._peeked else next(source, None)) is not None:
            self._read += 1
            if self._read > start:
                yield batch


def peek(source: BatchSource, *, global_batch_size: int, rows: Sequence[int] | np.ndarray, start: int) -> HostBatch:
    """Return batch number `start` of a source without consuming it: a later call of `batches` yields it again.

    Args:
      source: the batches.
      global_batch_size: rows of a global batch.
      rows: the rows of this process; a user's batch comes with all rows.
      start: number of the batch.

    Raises:
      JaxstackError: there is no batch, or it is no dict of arrays.
    """
    if isinstance(source, UserBatches):
        return check_batch(source.peek(start), global_batch_size)
    if isinstance(source, IndexedSource):
        return check_batch(source.batch(start, global_batch_size=global_batch_size, rows=rows))
    stream = source.batches(global_batch_size=global_batch_size, rows=rows, start=start)
    try:
        return check_batch(next(iter(stream), None))
    finally:
        getattr(stream, "close", lambda: None)()


def check_batch(batch: object, rows: int | None = None) -> HostBatch:
    """Check that a batch is a dict of arrays with equal first dims, and return it.

    Args:
      batch: what a source gave.
      rows: the first dim that is required; None: any.

    Raises:
      JaxstackError: it is not.
    """
    if batch is None:
        raise JaxstackError("the data has no batch: give an iterable that is not empty, or a function of the step.")
    if not isinstance(batch, Mapping) or not batch:
        raise JaxstackError(f"a batch must be a dict of arrays; found {type(batch).__name__}.")
    for name, value in batch.items():
        if value is None or isinstance(value, str | bytes | Mapping):
            raise JaxstackError(
                f"a batch must be a flat dict of arrays; its value {name!r} is of type {type(value).__name__}."
            )
        if (dtype := _dtype_of_list(name, value) if isinstance(value, list) else getattr(value, "dtype", None)) is None:
            continue
        if getattr(dtype, "kind", "") in _NOT_NUMBERS:
            raise JaxstackError(f"the array {name!r} of a batch has dtype {dtype}, which no device has: leave it out.")
    sizes = {name: np.shape(value)[0] if np.ndim(value) else "a scalar" for name, value in batch.items()}
    found = set(sizes.values())
    if len(found) != 1 or "a scalar" in found or (rows and found != {rows}):
        wanted = f" of train.global_batch_size ({rows}) rows" if rows else ""
        size = next(iter(found))
        way = (
            f"; drop a smaller last batch, or set TrainConfig(global_batch_size={size})"
            if len(found) == 1 and size
            else ""
        )
        raise JaxstackError(f"the arrays of a batch must have one first dim{wanted}; found {sizes}{way}.")
    return batch


def _dtype_of_list(name: str, value: list) -> np.dtype:
    try:
        return np.asarray(value).dtype
    except ValueError:
        raise JaxstackError(
            f"the lists {name!r} of a batch differ in length, but must form an array; pad them."
        ) from None


def _device_dtype(name: str, value: np.ndarray) -> np.dtype:
    """Return the dtype that JAX gives an array of a batch on the devices, e.g. int32 for int64 without x64.

    Raises:
      JaxstackError: it holds integers that are too large for that dtype, and would become others.
    """
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    if dtype != value.dtype and dtype.kind in "iu" and value.size:
        least = int(value.min())
        most = int(value.max())
        limits = np.iinfo(dtype)
        if least < limits.min or most > limits.max:
            raise JaxstackError(
                f"the array {name!r} of a batch holds {most if most > limits.max else least}, but integers on the "
                f"devices are {dtype}: at most {limits.max}; leave it out, or split it into two arrays."
            )
    return dtype


def _shown(shapes: Mapping[str, tuple[int, ...]], other: Mapping[str, tuple[int, ...]]) -> str:
    """Return, as text for an error message, the arrays of a batch whose shapes differ from those in `other`."""
    return str({name: shape for name, shape in shapes.items() if other.get(name) != shape})


def check_not_one_batch(data: object, what: str = "data") -> None:
    """Raise TypeError if `data` is a single batch (a dict) instead of an iterable or function of batches."""
    if isinstance(data, Mapping):
        keys = ", ".join(map(repr, data))
        way = "[batch]" if what == "eval_data" else "lambda step: batch"
        raise TypeError(
            f"{what} must be batches, not one dict with the keys {keys}; to use the same batch every time give {way}."
        )


def as_source(data: object) -> BatchSource:
    """Wrap a user's iterable or function of batches as a `BatchSource`; return a `BatchSource` as it is.

    Raises:
      TypeError: it is neither a source, nor a function, nor an iterable.
    """
    if isinstance(data, BatchSource):
        return data
    check_not_one_batch(data)
    if callable(data) and not isinstance(data, Iterable):
        with contextlib.suppress(ValueError):  # a function without a signature that Python can read
            signature = inspect.signature(data)
            try:
                signature.bind(0)
            except TypeError:
                raise TypeError(
                    f"data is called with the number of the step; this function takes {signature}. Wrap it: "
                    "lambda step: ..., or call it and give the iterable that it returns."
                ) from None
    if callable(data) or (isinstance(data, Iterable) and not isinstance(data, str)):
        return UserBatches(cast(Iterable[HostBatch], data))
    raise TypeError(
        "data must have a `batches` method, be a function of the step, or an iterable of batches; "
        f"found {type(data).__name__}."
    )


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def items_in_batch(batch: Mapping[str, _Shaped]) -> int:
    """Return the number of items that throughput counts: tokens of `labels` or `tokens` if present, otherwise rows."""
    for name in ("labels", "tokens"):
        if name in batch:
            return int(np.prod(batch[name].shape))
    return int(next(iter(batch.values())).shape[0])


def numpy_batches(rows: HostBatch, batch_size: int, seed: int = 0) -> Callable[[int], HostBatch]:
    """Return a function from the step to a batch of random rows of in-memory arrays, as data for `Trainer`.

    Batch `step` depends on (seed, step) alone, so that a resumed run sees the same batches.

    Args:
      rows: arrays whose first dims are equal.
      batch_size: rows of a batch, drawn with replacement.
      seed: of the draws.
    """
    count = len(next(iter(check_batch(rows).values())))

    def at(step: int) -> HostBatch:
        pick = np.random.default_rng((seed, step)).integers(0, count, batch_size)
        return {name: value[pick] for name, value in rows.items()}

    return at
