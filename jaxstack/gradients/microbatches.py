"""Sums of loss, item count and gradients over the microbatches of a batch.

Gradients are those of the sum over the real items of the whole global batch; the step divides once.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp

from jaxstack.gradients.noise import Measure, Squares
from jaxstack.loss import Batch, Loss, LossSum
from jaxstack.models.layer_sums import Sums
from jaxstack.module_arrays.module import Dict, ModuleArrays

SmallBatches: TypeAlias = tuple[Squares, jax.Array] | None
"""Sums of squares of the gradients of each microbatch, and their numbers of items, [M]; None if not measured."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientSums:
    """Sums of loss and gradients over the items of a batch, not yet divided by the item count, which is stored too."""

    gradients: Dict
    """Gradient of the loss sum by the trained parameters; float32, laid out as these are stored."""
    loss: jax.Array
    """[] float32: the loss sum."""
    count: jax.Array
    """[] float32: the number of items."""
    maxima: Dict | None = None
    """FP8 amax values, the cotangents of the scaling states; None once `Microbatches.finish` has used them."""
    noise: Dict | None = None
    """Metrics of the gradient noise, see `jaxstack.gradients.noise`; None if they are not measured."""
    further: Mapping[str, LossSum | Sums] = dataclasses.field(default_factory=dict)
    """Sums of the further values that the loss function returns."""

    def plus(self, other: "GradientSums") -> "GradientSums":
        """Add the sums of two microbatches; of their FP8 amax values, keep the larger ones."""
        gradients = jax.tree.map(jnp.add, self.gradients, other.gradients)
        loss = self.loss + other.loss
        count = self.count + other.count
        return GradientSums(gradients, loss, count, jax.tree.map(jnp.maximum, self.maxima, other.maxima))


class Gradients(Protocol):
    """Interface of gradient computation: sums loss and gradients over a global batch. Call it under `jax.jit`."""

    def __call__(
        self, params: Dict, non_params: Dict, batch: Batch, key: jax.Array, *, noise: bool = False
    ) -> tuple[GradientSums, Dict]:
        """Return loss and gradients summed over the global batch (noise metrics if `noise`), and updated variables."""
        ...

    def loss(self, params: Dict, non_params: Dict, batch: Batch) -> LossSum:
        """Return the loss sum and item count of a batch for evaluation, without gradients and dropout."""
        ...


class Microbatches:
    """Runs a module and its loss on the microbatches of a batch in turn, summing gradients in float32.

    Args:
      module: the module.
      loss: its loss.
      count: number of microbatches that a batch is split into.
      parts: True if each device calls the loss on its part of the batch, where a mean raises `MeanLoss`.
    """

    def __init__(self, module: ModuleArrays, loss: Loss, count: int, *, parts: bool = False):
        self.module = module
        self.count = count
        self._loss = loss
        self._parts = parts

    def loss(
        self, params: Dict, non_params: Dict, batch: Batch, *, key: jax.Array | None, train: bool
    ) -> tuple[LossSum, Dict]:
        """Run the whole batch at once; return its loss, and the module's updated non-parameter variables."""
        model = self.module.merge(params, non_params)
        loss = self._loss(model, batch, key=key, train=train, part=self._parts)
        return loss, self.module.split(model)[1]

    def __call__(
        self,
        params: Dict,
        non_params: Dict,
        batch: Batch,
        key: jax.Array,
        *,
        shards: int = 1,
        prepare: Callable[[Dict], Dict] = lambda params: params,
        measure: Measure | None = None,
    ) -> tuple[GradientSums, Dict, SmallBatches]:
        """Return loss and gradients summed over microbatches, updated variables, and squared gradients if `measure`.

        Args:
          params: the parameters that the gradients belong to.
          non_params: the module's other variables.
          batch: the batch; its rows are split into `count` microbatches. Those in which an array `computed` [B] is 0
            add nothing, and take no time; on every device they must be the same ones.
          key: random key; microbatch i gets fold_in(key, i) if there are several.
          shards: number of shards of the batch's rows that XLA partitions.
          prepare: turns the parameters into those that the module uses; it is differentiated.
          measure: measures the gradients of each of several microbatches.
        """
        if self.count == 1:
            return *self._one(params, non_params, batch, key, prepare), None

        def add(
            carry: tuple[GradientSums, Dict], item: tuple[Batch, jax.Array]
        ) -> tuple[tuple[GradientSums, Dict], tuple[SmallBatches, Mapping[str, LossSum | Sums]]]:
            sums, non_params = carry
            microbatch, index = item

            def run() -> tuple[GradientSums, Dict]:
                return self._one(params, non_params, microbatch, jax.random.fold_in(key, index), prepare)

            new, non_params = _unless_empty(run, non_params, microbatch)
            measured = None if measure is None else (measure(new.gradients), new.count)
            return (sums.plus(new), non_params), (measured, new.further)

        zero = jnp.zeros((), jnp.float32)

        def zeros(tree):
            return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), tree)

        gradients = self.module.split_frozen(params)[0]
        maxima = self.module.split_scaling(non_params)[0]
        start = GradientSums(zeros(gradients), zero, zero, zeros(maxima))
        pieces = {name: self._split(x, shards) for name, x in batch.items()}
        (sums, non_params), (measured, further) = jax.lax.scan(
            add, (start, non_params), (pieces, jnp.arange(self.count))
        )
        # Which further values there are is known only once the loss function is traced, so that they are not carried.
        further = jax.tree.map(lambda x: jnp.sum(x, axis=0), further)
        return dataclasses.replace(sums, further=further), non_params, measured

    def _one(
        self, params: Dict, non_params: Dict, batch: Batch, key: jax.Array, prepare: Callable[[Dict], Dict]
    ) -> tuple[GradientSums, Dict]:
        """Compute loss and gradients of one microbatch, and the module's updated non-parameter variables."""
        scaling, others = self.module.split_scaling(non_params)
        trained, frozen = self.module.split_frozen(params)

        def objective(trained: Dict, scaling: Dict) -> tuple[jax.Array, tuple[LossSum, Dict]]:
            used = prepare(self.module.join(trained, frozen))
            loss, new = self.loss(used, self.module.join(scaling, others), batch, key=key, train=True)
            return loss.total, (loss, new)

        compute = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        (total, (loss, non_params)), (gradients, maxima) = compute(trained, scaling)
        return GradientSums(gradients, total, loss.count, maxima, further=loss.further), non_params

    def finish(self, sums: GradientSums, non_params: Dict, axes: tuple[str, ...] = ()) -> tuple[GradientSums, Dict]:
        """Return the sums without FP8 amax values, and variables with FP8 scaling states updated from these values.

        Args:
          sums: of all microbatches.
          non_params: the module's other variables, with this step's scaling states.
          axes: manual mesh axes over whose devices the largest amax value is taken.
        """
        assert sums.maxima is not None
        maxima = jax.lax.pmax(sums.maxima, axes) if axes else sums.maxima
        return dataclasses.replace(sums, maxima=None), self.module.renew_scaling(non_params, maxima)

    def _split(self, x: jax.Array, shards: int) -> jax.Array:
        """Split rows into microbatches without moving them between shards: [B, ...] -> [count, B / count, ...]."""
        rows = x.shape[0] // shards // self.count
        x = jnp.swapaxes(x.reshape(shards, self.count, rows, *x.shape[1:]), 0, 1)
        return x.reshape(self.count, shards * rows, *x.shape[3:])


def _unless_empty(
    run: Callable[[], tuple[GradientSums, Dict]], non_params: Dict, microbatch: Batch
) -> tuple[GradientSums, Dict]:
    """Return what `run` returns, or zeros and unchanged variables for a microbatch that is not computed."""
    if "computed" not in microbatch:
        return run()

    def skip() -> tuple[GradientSums, Dict]:
        shapes, _ = jax.eval_shape(run)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), non_params

    return jax.lax.cond(jnp.any(microbatch["computed"] > 0), run, skip)
