"""The train and eval steps: pure functions of (state, batch), compiled once with donated state.

Gradients are those of the mean over the real tokens of the whole global batch: sums over microbatches and devices,
which `jaxstack.gradients.microbatches` computes, divided once.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxstack.functional.module import FunctionalModule
from jaxstack.gradients.build import make_gradients
from jaxstack.loss import Batch, Loss, LossFunction, LossSum
from jaxstack.models.dropout import TOKEN_KEYS, token_keys
from jaxstack.optim.build import gradient_norm, largest_overload
from jaxstack.parallel.context import ShardingContext
from jaxstack.parallel.layout import StepLayout
from jaxstack.parallel.rules import AxisRules
from jaxstack.state import TrainState
from pallas_kernels import sequence_order

Metrics = dict[str, jax.Array]


class StepFunctions:
    """The step of one module, loss, optimizer and layout.

    Args:
      loss: see `jaxstack.loss`.
      learning_rate: step -> learning rate, for the metrics; None where it is not known.
      accumulation: number of microbatches that a batch is cut into.
      layout: the other choices of parallelism; a StagedModule needs its `pipeline`. None: `StepLayout()`.
    """

    def __init__(
        self,
        module: FunctionalModule,
        loss: LossFunction | Loss,
        optimizer: optax.GradientTransformation,
        learning_rate: Callable[[jax.Array], jax.Array] | None,
        rules: AxisRules,
        layout: StepLayout | None = None,
        accumulation: int = 1,
    ):
        self.module, self.optimizer, self.rules, self.learning_rate = module, optimizer, rules, learning_rate
        self.spike_threshold: float | None = None
        """See `resilience.spike_threshold`; read when the step is traced."""
        context = ShardingContext(rules, layout or StepLayout())
        self.gradients = make_gradients(module, loss, context, accumulation)

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One optimizer step. Metrics: loss, grad_norm, learning_rate, count, skipped, expert_overload (scalars).

        A step whose loss or gradients are not finite, or spike, changes nothing but the step count and `skipped`. With
        a spike threshold the metrics also have `loss_limit` and `grad_norm_limit`.
        """
        key = jax.random.fold_in(state.key, state.step)
        batch = self._with_keys(batch, key)
        sums, non_params = self.gradients(state.params, state.non_params, batch, key)
        count = jnp.maximum(sums.count, 1.0)
        gradients = jax.tree.map(lambda g: g / count, sums.gradients)
        loss, norm = sums.loss / count, gradient_norm(gradients)
        trained, frozen = self.module.split_frozen(state.params)
        updates, optimizer = self.optimizer.update(gradients, state.optimizer, trained)
        new_trained = optax.apply_updates(trained, updates)

        taken, limits = jnp.isfinite(loss) & jnp.isfinite(norm), {}
        if self.spike_threshold is not None:
            most = state.history.limits(self.spike_threshold)
            taken &= (loss <= most[0]) & (norm <= most[1])
            limits = {"loss_limit": most[0], "grad_norm_limit": most[1]}
        keep = lambda new, old: jax.tree.map(lambda n, o: _where(taken, n, o), new, old)  # noqa: E731
        skipped = jnp.where(taken, 0, state.skipped + 1)
        new = TrainState(
            state.step + 1,
            self.module.join(keep(new_trained, trained), frozen),
            keep(non_params, state.non_params),
            keep(optimizer, state.optimizer),
            state.key,
            skipped,
            keep(state.history.plus(loss, norm), state.history),
        )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "count": sums.count,
            "skipped": skipped,
            **limits,
        }
        overload = largest_overload(gradients)
        if overload is not None:
            metrics["expert_overload"] = overload
        if self.learning_rate is not None:
            metrics["learning_rate"] = self.learning_rate(state.step)
        return new, metrics

    def _with_keys(self, batch: Batch, key: jax.Array) -> Batch:
        """The batch with a key for each token, where the module's dropout asks for them."""
        if not self.module.drops_tokens or "tokens" not in batch:
            return batch
        rows, length = batch["tokens"].shape
        parts = self.rules.degree(self.rules.table["length"])
        tokens = np.arange(length) if parts == 1 else sequence_order(length, parts)
        return {**batch, TOKEN_KEYS: token_keys(key, rows, jnp.asarray(tokens, jnp.int32))}

    def eval_step(self, params: Any, non_params: Any, batch: Batch) -> LossSum:
        """Return the loss sum and item count of a batch in evaluation."""
        return self.gradients.loss(params, non_params, batch)


def _where(condition: jax.Array, new: Any, old: Any) -> Any:
    if jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
        data = jnp.where(condition, jax.random.key_data(new), jax.random.key_data(old))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(new))
    return jax.lax.select(condition, new, old)  # of jnp.where each call is a function of its own, traced and lowered
