"""Held-out evaluation: the exact mean loss over all items, and bits per byte."""

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.data.batch_source import BatchShardings, arrange, batch_sharding, check_batch, check_rows
from jaxstack.data.device import device_batches, local_rows
from jaxstack.errors import JaxstackError
from jaxstack.loss import LossSum
from jaxstack.step import StepFunctions

_QUEUED = 4
"""Batches that wait for the devices. With hundreds, simulated CPU devices run out of threads, and hang."""


class Evaluator:
    """Evaluates parameters on held-out data.

    Args:
      steps: holds the loss and the layout.
      data: has `held_out_batches(batch_size=, rows=, max_tokens=)` as `jaxstack.data.loader.Data`, or is an iterable of
        batches (dicts of arrays); None: there is nothing to evaluate on.
      batch_size: rows of a global batch, where the data can choose it.
      compiler_options: XLA's, as for the train step.
    """

    def __init__(
        self, steps: StepFunctions, data: Any, batch_size: int, compiler_options: dict[str, Any] | None = None
    ):
        if isinstance(data, Iterator):  # every evaluation reads it anew
            data = list(data)
        self._steps, self._data = steps, data
        self._batch_size = max(batch_size, steps.rules.degree(steps.rules.table["batch"]))
        whole = steps.rules.sharding(jax.P())

        # One batch waits for the one before by its sums: collectives of programs that run at once on a CPU meet in
        # another order on another process, and hang.
        def add_batch(params: Any, non_params: Any, batch: Any, sums: LossSum) -> LossSum:
            return jax.tree.map(jnp.add, sums, steps.eval_step(params, non_params, batch))

        self._step = jax.jit(add_batch, out_shardings=whole, compiler_options=compiler_options)
        self._zero = jax.jit(lambda: LossSum(jnp.zeros(()), jnp.zeros(())), out_shardings=whole)

    def run(
        self, params: Any, non_params: Any, max_tokens: int | None = None, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """`eval_loss` (nats an item), `eval_items`, `eval_seconds`; None where there is no held-out data.

        Args:
          max_tokens: stop after so many tokens, where the data can; None: all of it.
          stop: asked after each batch, on all processes alike; True gives the evaluation up, which returns None.
        """
        rules = self._steps.rules
        host, size = self._host_batches(max_tokens)
        began, sums = time.perf_counter(), self._zero()
        arranged = (arrange(batch, rules) for batch in host)
        batches = device_batches(arranged, BatchShardings(rules, self._batch_size), global_batch_size=size)
        queued: collections.deque[LossSum] = collections.deque()
        with contextlib.closing(cast(Any, batches)):
            for batch, _ in batches:
                with jax.set_mesh(rules.mesh):  # as `Trainer.compile`
                    sums = self._step(params, non_params, batch, sums)
                queued.append(sums)
                if len(queued) > _QUEUED:
                    jax.block_until_ready(queued.popleft())
                if stop():
                    return None
        sums = jax.device_get(sums)
        total, count = float(sums.total), float(sums.count)
        if not count:
            return None
        return {
            "eval_loss": total / count,
            "eval_items": count,
            "eval_seconds": time.perf_counter() - began,
        }

    def _host_batches(self, max_tokens: int | None) -> tuple[Any, int | None]:
        """This process's rows of the held-out batches, and the rows of a global batch (None: they may differ)."""
        size = self._batch_size
        if hasattr(self._data, "held_out_batches"):
            rows = local_rows(batch_sharding(self._steps.rules, (size,)), (size,))
            return self._data.held_out_batches(batch_size=size, rows=rows, max_tokens=max_tokens), size
        batches = [check_batch(batch) for batch in self._data or ()]
        sizes = {len(next(iter(batch.values()))) for batch in batches}
        for size in sizes:
            check_rows(size, self._steps.rules, "the number of rows of a held-out batch")
        if jax.process_count() == 1 or not batches:
            return iter(batches), None
        if len(sizes) > 1:
            raise JaxstackError(f"with several processes all held-out batches have one size; found {sorted(sizes)}")
        rows = local_rows(batch_sharding(self._steps.rules, (size,)), (size,))
        return ({name: np.asarray(value)[rows] for name, value in batch.items()} for batch in batches), size


def bits_per_byte(values: Mapping[str, float], num_bytes: int) -> dict[str, float]:
    """`eval_perplexity`, and `eval_bits_per_byte` = loss x tokens / ln 2 / bytes of the text that the tokens encode.

    Unlike a loss a token, bits per byte do not depend on the tokenizer.
    """
    loss = values["eval_loss"]
    found = {"eval_perplexity": math.exp(loss) if loss < 700 else math.inf}
    if num_bytes:
        found["eval_bits_per_byte"] = loss * values["eval_items"] / math.log(2) / num_bytes
    return found
