"""Evaluation of a model on held-out data: exact mean loss over all items (such as tokens), and bits per byte.

The bits per byte to which gzip and xz compress the same text are a baseline for the loss of a language model.
"""

import collections
import contextlib
import gzip
import lzma
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.data.batch_source import HostBatch, check_batch, check_not_one_batch
from jaxstack.data.device_batches import BatchPlacement, check_rows
from jaxstack.errors import JaxstackError
from jaxstack.loss import Batch, LossSum
from jaxstack.module_arrays.module import Dict
from jaxstack.step import StepFunctions

_QUEUED = 4
"""Maximum number of batches that wait for the devices. With hundreds, simulated CPU devices run out of threads and
hang."""


@runtime_checkable
class HeldOutData(Protocol):
    """Held-out data that can be read in batches of any size, such as `jaxstack.data.loader.Data`."""

    def held_out_batches(
        self, *, batch_size: int, rows: Sequence[int] | np.ndarray, max_tokens: int | None
    ) -> Iterator[HostBatch]:
        """Yield the rows at indices `rows` of each held-out batch; `max_tokens` limits predicted tokens in total."""
        ...


def check_held_out(data: object) -> None:
    """Raise TypeError if evaluation data is neither `HeldOutData`, nor an iterable of batches, nor None."""
    check_not_one_batch(data, "eval_data")
    if data is not None and not isinstance(data, HeldOutData | Iterable):
        raise TypeError(f"eval_data must be an iterable of batches, such as a list; found {type(data).__name__}.")


class Evaluator:
    """Computes the loss of model parameters on held-out data.

    Args:
      steps: the step functions, with the loss and the layout.
      data: `HeldOutData`, or an iterable of batches (dicts of arrays); None: there is nothing to evaluate on.
      batch_size: rows of a global batch, if the data can choose it.
      compiler_options: options of XLA, as for the train step.
    """

    def __init__(
        self,
        steps: StepFunctions,
        data: HeldOutData | Iterable[HostBatch] | None,
        batch_size: int,
        compiler_options: dict[str, bool | int | float | str] | None = None,
    ):
        if isinstance(data, Iterator):  # every evaluation reads it from the start
            data = list(data)
        self._steps = steps
        self._data = data
        self._placement = BatchPlacement(steps.rules)
        self._batch_size = max(batch_size, steps.rules.degree(steps.rules.table["batch"]))
        whole = steps.rules.sharding(jax.P())

        # The sums make each batch depend on the one before. Concurrent CPU programs would start their collectives in
        # different orders on different processes, and hang.
        def add_batch(
            params: Dict, non_params: Dict, batch: Batch, sums: LossSum
        ) -> tuple[LossSum, Mapping[str, LossSum]]:
            loss = steps.eval_step(params, non_params, batch)
            return jax.tree.map(jnp.add, sums, loss.without_further()), cast(Mapping[str, LossSum], loss.further)

        self._step = jax.jit(add_batch, out_shardings=whole, compiler_options=compiler_options)
        self._zero = jax.jit(lambda: LossSum(jnp.zeros(()), jnp.zeros(())), out_shardings=whole)

    @property
    def has_data(self) -> bool:
        """True if there is held-out data."""
        return self._data is not None

    def run(
        self, params: Dict, non_params: Dict, max_tokens: int | None = None, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Compute the mean loss on the held-out data; return it as `eval_loss`, with item count and duration.

        Args:
          params: parameters on the devices.
          non_params: the module's other variables.
          max_tokens: maximum number of tokens, if the data can limit them; None: all of them.
          stop: called after each batch, on all processes; True ends the evaluation, which then returns None.

        Returns:
          `eval_loss` (nats per item), `eval_items`, `eval_seconds`, and `eval_NAME` for each further value of the loss
          function; None if there is no held-out data.
        """
        host, size = self._host_batches(max_tokens)
        began = time.perf_counter()
        sums = self._zero()
        batches = self._placement.stream(host, self._batch_size, size)
        queued: collections.deque[LossSum] = collections.deque()
        further: list[Mapping[str, LossSum]] = []
        with contextlib.closing(cast(Generator, batches)):
            for batch, _ in batches:
                with jax.set_mesh(self._steps.rules.mesh):  # see `StepProgram.compile`
                    sums, found = self._step(params, non_params, batch, sums)
                queued.append(sums)
                further.append(found)
                if len(queued) > _QUEUED:
                    jax.block_until_ready(queued.popleft())
                if stop():
                    return None
        sums = jax.device_get(sums)
        total = float(sums.total)
        count = float(sums.count)
        if not count:
            return None
        return {
            "eval_loss": total / count,
            "eval_items": count,
            "eval_seconds": time.perf_counter() - began,
            **_means(jax.device_get(further)),
        }

    def _host_batches(self, max_tokens: int | None) -> tuple[Iterator[HostBatch], int | None]:
        """Return this process's rows of the held-out batches, and the global batch size (None if it may vary)."""
        size = self._batch_size
        data = self._data
        if isinstance(data, HeldOutData):
            rows = self._placement.local_rows(size)
            return data.held_out_batches(batch_size=size, rows=rows, max_tokens=max_tokens), size
        batches = [check_batch(batch) for batch in data or ()]
        sizes = {len(next(iter(batch.values()))) for batch in batches}
        for size in sizes:
            check_rows(size, self._steps.rules, "the number of rows of a held-out batch")
        if jax.process_count() == 1 or not batches:
            return iter(batches), None
        if len(sizes) > 1:
            raise JaxstackError(f"with several processes all held-out batches have one size; found {sorted(sizes)}")
        rows = self._placement.local_rows(size)
        return ({name: np.asarray(value)[rows] for name, value in batch.items()} for batch in batches), size


def _means(further: Sequence[Mapping[str, LossSum]]) -> dict[str, float]:
    """Return `eval_NAME` for each further value, its mean over all batches."""
    names = further[0] if further else ()
    totals = {name: sum(float(found[name].total) for found in further) for name in names}
    counts = {name: sum(float(found[name].count) for found in further) for name in names}
    return {f"eval_{name}": totals[name] / max(counts[name], 1.0) for name in names}


def bits_per_byte(values: Mapping[str, float], num_bytes: int) -> dict[str, float]:
    """Convert an evaluation's loss to perplexity and, if the text's size is known, to bits per byte of text.

    Unlike a loss per token, bits per byte do not depend on the tokenizer.

    Args:
      values: as `Evaluator.run` returns.
      num_bytes: bytes of the text that the tokens encode; 0: unknown.

    Returns:
      `eval_perplexity`, and `eval_bits_per_byte` = loss x tokens / ln 2 / bytes of the evaluated text.
    """
    loss = values["eval_loss"]
    found = {"eval_perplexity": math.exp(loss) if loss < 700 else math.inf}
    if num_bytes:
        found["eval_bits_per_byte"] = loss * values["eval_items"] / math.log(2) / num_bytes
    return found


def compression_baselines(raw: bytes) -> dict[str, float]:
    """Return the bits per byte that `gzip -9` and `xz -9` need for `raw`, compressed as one stream.

    A model compresses the text better if its negative log-likelihood in bits, summed over the same bytes and divided
    by their number, is lower.

    Returns:
      `{"gzip -9": ..., "xz -9": ...}`; empty for empty input.
    """
    if not raw:
        return {}
    bits = 8 / len(raw)
    return {
        "gzip -9": bits * len(gzip.compress(raw, compresslevel=9, mtime=0)),
        "xz -9": bits * len(lzma.compress(raw, preset=9)),
    }
