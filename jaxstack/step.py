"""The train and eval steps: pure functions of (state, batch), compiled once with donated state.

Gradients are those of the mean over the real tokens of the whole global batch: sums over microbatches and devices,
divided once. With accumulation the microbatches' gradients are added up in float32 on each replica, and reduced over
the `data` axis once a step.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxstack.functional import FunctionalModule
from jaxstack.loss import LossSum, as_loss_sum
from jaxstack.optim.build import gradient_norm, largest_overload
from jaxstack.parallel.rules import AxisRules, logical_axis_rules
from jaxstack.state import TrainState

Batch = Mapping[str, jax.Array]
LossFunction = Callable[..., Any]
Metrics = dict[str, jax.Array]


class Sums(NamedTuple):
    """What one microbatch adds: gradient of the loss sum, loss sum, weight."""

    gradients: Any
    loss: jax.Array
    weight: jax.Array


class StepFunctions:
    """The step of one module, loss, optimizer and layout.

    Args:
      loss: `loss(module, batch)` or `loss(module, batch, key)`; returns a scalar mean or a `LossSum`.
      learning_rate: step -> learning rate, for the metrics; None where it is not known.
      accumulation: number of microbatches that a batch is cut into.
    """

    def __init__(
        self,
        module: FunctionalModule,
        loss: LossFunction,
        optimizer: optax.GradientTransformation,
        learning_rate: Callable[[jax.Array], jax.Array] | None,
        rules: AxisRules,
        accumulation: int = 1,
    ):
        self.module, self.optimizer, self.rules = module, optimizer, rules
        self.learning_rate, self.accumulation = learning_rate, accumulation
        self._loss = loss if _takes_key(loss) else lambda model, batch, key: loss(model, batch)

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step. Metrics: loss, grad_norm, learning_rate, weight, skipped, expert_overload (scalars).

        A step whose loss or gradients are not finite changes nothing but the step count and `skipped`.
        """
        key = jax.random.fold_in(state.key, state.step)
        sums, rest = self._accumulate(state.params, state.rest, batch, key)
        weight = jnp.maximum(sums.weight, 1.0)
        gradients = jax.tree.map(lambda g: g / weight, sums.gradients)
        loss, norm = sums.loss / weight, gradient_norm(gradients)
        updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)

        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        keep = lambda new, old: jax.tree.map(lambda n, o: _where(finite, n, o), new, old)  # noqa: E731
        skipped = jnp.where(finite, 0, state.skipped + 1)
        new = TrainState(
            state.step + 1,
            keep(params, state.params),
            keep(rest, state.rest),
            keep(optimizer, state.optimizer),
            state.key,
            skipped,
        )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "weight": sums.weight,
            "skipped": skipped,
        }
        overload = largest_overload(gradients)
        if overload is not None:
            metrics["expert_overload"] = overload
        if self.learning_rate is not None:
            metrics["learning_rate"] = self.learning_rate(state.step)
        return new, metrics

    def eval_step(self, params: Any, rest: Any, batch: Batch) -> LossSum:
        """The loss sum and weight of a batch, without dropout keys."""
        with logical_axis_rules(self.rules):
            return as_loss_sum(self._loss(self.module.merge(params, rest), batch, None))

    def _microbatch(self, params: Any, rest: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
        def objective(params: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            model = self.module.merge(params, rest)
            loss = as_loss_sum(self._loss(model, batch, key))
            return loss.total, (loss.weight, self.module.split(model)[1])

        (total, (weight, rest)), gradients = jax.value_and_grad(objective, has_aux=True)(params)
        return Sums(gradients, total, weight), rest

    def _accumulate(self, params: Any, rest: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
        rules = self.rules
        if self.accumulation == 1:
            with logical_axis_rules(rules):
                return self._microbatch(params, rest, batch, key)
        if rules.mesh.shape["data"] == 1:
            with logical_axis_rules(rules):
                return self._scan_microbatches(params, rest, batch, key)

        # `data` is manual here: XLA, left to itself, would reduce gradients over it once a microbatch.
        def replica(params: Any, rest: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
            key = jax.random.fold_in(key, jax.lax.axis_index("data"))
            with logical_axis_rules(rules.within(["data"])):
                sums, rest = self._scan_microbatches(params, rest, batch, key)
            return jax.lax.psum(sums, "data"), jax.tree.map(_mean_over_data, rest)

        whole, split = PartitionSpec(), PartitionSpec("data")
        return jax.shard_map(
            replica,
            mesh=rules.mesh,
            in_specs=(whole, whole, split, whole),
            out_specs=(whole, whole),
            axis_names={"data"},
            check_vma=False,
        )(params, rest, batch, key)

    def _scan_microbatches(self, params: Any, rest: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
        def add(carry: tuple[Sums, Any], item: tuple[Batch, jax.Array]) -> tuple[tuple[Sums, Any], None]:
            sums, rest = carry
            microbatch, index = item
            new, rest = self._microbatch(params, rest, microbatch, jax.random.fold_in(key, index))
            return (jax.tree.map(jnp.add, sums, new), rest), None

        zero = jnp.zeros((), jnp.float32)
        start = Sums(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params), zero, zero)
        pieces = {name: self._split(x) for name, x in batch.items()}
        carry, _ = jax.lax.scan(add, (start, rest), (pieces, jnp.arange(self.accumulation)))
        return carry

    def _split(self, x: jax.Array) -> jax.Array:
        """[B, ...] -> [accumulation, B / accumulation, ...], each device keeping its own rows."""
        # `data` is either 1 or manual by now; the batch's other axes still split its rows.
        shards = self.rules.degree([axis for axis in self.rules.table["batch"] if axis != "data"])
        rows = x.shape[0] // shards // self.accumulation
        x = jnp.swapaxes(x.reshape(shards, self.accumulation, rows, *x.shape[1:]), 0, 1)
        return x.reshape(self.accumulation, shards * rows, *x.shape[3:])


def _mean_over_data(x: jax.Array) -> jax.Array:
    return jax.lax.pmean(x, "data") if jnp.issubdtype(x.dtype, jnp.floating) else x


def _where(condition: jax.Array, new: Any, old: Any) -> Any:
    if jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
        data = jnp.where(condition, jax.random.key_data(new), jax.random.key_data(old))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(new))
    return jnp.where(condition, new, old)


def _takes_key(loss: LossFunction) -> bool:
    """Whether `loss` takes the random key: a third positional parameter, without a default or called `key`."""
    parameters = inspect.signature(loss).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    third = positional[2] if len(positional) >= 3 else None
    return third is not None and (third.default is third.empty or third.name == "key")
