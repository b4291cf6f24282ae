"""Sums of loss, item count and gradients over the microbatches of a batch.

Gradients are those of the sum over the real items of the whole global batch; the step divides once.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxstack.functional.module import FunctionalModule
from jaxstack.loss import LossSum, as_loss_sum

Batch = Mapping[str, jax.Array]
LossFunction = Callable[..., Any]


class Sums(NamedTuple):
    """What a batch adds: gradient of the loss sum, loss sum, weight."""

    gradients: Any
    """Of the parameters that are trained; float32, laid out as these are stored."""
    loss: jax.Array
    weight: jax.Array
    maxima: Any = None
    """What comes as the gradient of FP8 scaling states, while microbatches and devices are combined."""

    def plus(self, other: "Sums") -> "Sums":
        """Both microbatches' together."""
        gradients, loss, weight = jax.tree.map(jnp.add, self[:3], other[:3])
        return Sums(gradients, loss, weight, jax.tree.map(jnp.maximum, self.maxima, other.maxima))


class Gradients(Protocol):
    """A way to compute the sums of a global batch; it may be called under `jax.jit` only."""

    def __call__(self, params: Any, non_params: Any, batch: Batch, key: jax.Array) -> tuple[Sums, Any]:
        """The sums of the global batch, and the module's other variables after it."""
        ...

    def loss(self, params: Any, non_params: Any, batch: Batch) -> LossSum:
        """The loss sum and weight of a batch, without gradients, accumulation and random key."""
        ...


class Microbatches:
    """A module and its loss over a batch in pieces, one after the other, their gradients added up in float32."""

    def __init__(
        self,
        module: FunctionalModule,
        loss: LossFunction,
        count: int,
        as_sum: Callable[[Any], LossSum] = as_loss_sum,
    ):
        self.module, self.count, self._loss, self._as_sum = module, count, loss, as_sum

    def loss(self, params: Any, non_params: Any, batch: Batch, key: jax.Array | None) -> tuple[LossSum, Any]:
        """The loss of the batch as one piece, and the module's other variables after it."""
        model = self.module.merge(params, non_params)
        return self._as_sum(self._loss(model, batch, key)), self.module.split(model)[1]

    def __call__(
        self,
        params: Any,
        non_params: Any,
        batch: Batch,
        key: jax.Array,
        *,
        shards: int = 1,
        use: Callable[[Any], Any] = lambda params: params,
    ) -> tuple[Sums, Any]:
        """The sums of this batch, and the module's other variables after it.

        Args:
          shards: into how many parts XLA splits the batch's rows.
          use: makes of the parameters, to which the gradients belong, what the module gets.
        """
        if self.count == 1:
            return self._one(params, non_params, batch, key, use)

        def add(carry: tuple[Sums, Any], item: tuple[Batch, jax.Array]) -> tuple[tuple[Sums, Any], None]:
            sums, non_params = carry
            microbatch, index = item
            new, non_params = self._one(params, non_params, microbatch, jax.random.fold_in(key, index), use)
            return (sums.plus(new), non_params), None

        zero = jnp.zeros((), jnp.float32)
        zeros = lambda tree: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), tree)  # noqa: E731
        start = Sums(
            zeros(self.module.split_frozen(params)[0]), zero, zero, zeros(self.module.split_scaling(non_params)[0])
        )
        pieces = {name: self._split(x, shards) for name, x in batch.items()}
        carry, _ = jax.lax.scan(add, (start, non_params), (pieces, jnp.arange(self.count)))
        return carry

    def _one(
        self, params: Any, non_params: Any, batch: Batch, key: jax.Array, use: Callable[[Any], Any]
    ) -> tuple[Sums, Any]:
        scaling, others = self.module.split_scaling(non_params)
        trained, frozen = self.module.split_frozen(params)

        def objective(trained: Any, scaling: Any) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            params = self.module.join(trained, frozen)
            loss, new = self.loss(use(params), self.module.join(scaling, others), batch, key)
            return loss.total, (loss.weight, new)

        compute = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        (total, (weight, non_params)), (gradients, maxima) = compute(trained, scaling)
        return Sums(gradients, total, weight, maxima), non_params

    def finish(self, sums: Sums, non_params: Any, axes: tuple[str, ...] = ()) -> tuple[Sums, Any]:
        """The sums without the maxima, which make the next scaling states, of all devices along `axes`."""
        maxima = jax.lax.pmax(sums.maxima, axes) if axes else sums.maxima
        return sums._replace(maxima=None), self.module.renew_scaling(non_params, maxima)

    def _split(self, x: jax.Array, shards: int) -> jax.Array:
        """[B, ...] -> [count, B / count, ...], each device keeping its own rows."""
        rows = x.shape[0] // shards // self.count
        x = jnp.swapaxes(x.reshape(shards, self.count, rows, *x.shape[1:]), 0, 1)
        return x.reshape(self.count, shards * rows, *x.shape[3:])


def takes_key(loss: LossFunction) -> bool:
    """Whether `loss` takes the random key: a third positional parameter, without a default or called `key`."""
    parameters = inspect.signature(loss).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    third = positional[2] if len(positional) >= 3 else None
    return third is not None and (third.default is third.empty or third.name == "key")
