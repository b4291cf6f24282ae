"""The train and eval steps as pure functions of (state, batch), and the program compiled from the train step.

Gradients are those of the mean over the real tokens of the whole global batch: sums over microbatches and devices,
which `jaxstack.gradients` computes, divided once.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxstack.distributed.xla_options import builtin_step_options, translate_options
from jaxstack.errors import ConfigError
from jaxstack.gradients.build import make_gradients
from jaxstack.gradients.microbatches import GradientSums
from jaxstack.loss import Batch, Loss, LossFunction, LossSum, as_loss
from jaxstack.models.dropout import TOKEN_KEYS, token_keys
from jaxstack.module_arrays.module import Dict, ModuleArrays
from jaxstack.module_arrays.shardings import describe_shardings
from jaxstack.observe.what_ran import describe_program
from jaxstack.optim.base import SampledGradient
from jaxstack.optim.build import gradient_norm
from jaxstack.parallel.pipeline.schedule import describe_schedule
from jaxstack.parallel.rules import AxisRules
from jaxstack.parallel.sharding_context import ShardingContext, StepLayout
from jaxstack.parallel.weight_gather import share_host
from jaxstack.parameter_paths import path_name
from jaxstack.state import TrainState
from pallas_kernels import Choice, NotSupported, record_choices, sequence_order

Metrics = dict[str, jax.Array]
"""Scalars of one step."""
XlaOptions = dict[str, bool | int | float | str]
"""Name -> value of options of XLA."""


@dataclasses.dataclass(frozen=True)
class StepSettings:
    """Settings of the train step: when it is skipped, and what it measures in addition to loss and gradient norm."""

    spike_threshold: float | None = None
    """`resilience.spike_threshold`."""
    noise_scale: bool = False
    """`observe.noise_scale`."""


class StepFunctions:
    """The train and eval steps of one module, with its loss, optimizer and parallel layout.

    Args:
      module: the module.
      loss: see `jaxstack.loss`.
      optimizer: of the parameters that are not frozen.
      learning_rate: step -> learning rate, for the metrics; None if it is not known.
      rules: the mapping of logical axes onto the mesh.
      accumulation: number of microbatches that a batch is split into.
      layout: the other choices of parallelism; a StagedArrays needs its `pipeline`. None: `StepLayout()`.
    """

    metrics_spec = jax.P()
    """PartitionSpec of the metrics of a step."""

    def __init__(
        self,
        module: ModuleArrays,
        loss: LossFunction | Loss,
        optimizer: optax.GradientTransformation,
        learning_rate: Callable[[jax.Array], jax.Array] | None,
        rules: AxisRules,
        layout: StepLayout | None = None,
        accumulation: int = 1,
    ):
        self.module = module
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self._loss = loss
        self.rules = rules
        self.layout = layout or StepLayout()
        self.accumulation = accumulation
        self.settings = StepSettings()
        """See `with_settings`."""
        self._second: SampledGradient | None = getattr(optimizer, "sampled_gradient", None)
        self._make_gradients()

    def with_accumulation(self, count: int) -> "StepFunctions":
        """Return a copy that accumulates gradients over `count` microbatches."""
        other = copy.copy(self)
        other.accumulation = count
        other._make_gradients()
        return other

    def with_settings(self, settings: StepSettings) -> "StepFunctions":
        """Return a copy whose train step has these settings."""
        other = copy.copy(self)
        other.settings = settings
        return other

    def _make_gradients(self) -> None:
        """Set `self.gradients` to the function that computes gradients, summed over the given number of microbatches.

        Raises:
          ConfigError: the optimizer needs sampled labels, which the loss does not declare.
        """
        context = ShardingContext(self.inner_rules, self.layout)
        self.gradients = make_gradients(self.module.used, self._loss, context, self.accumulation)
        if self._second is not None:
            sampled = as_loss(self._loss).sampled
            if sampled is None:
                raise ConfigError(
                    "this optimizer needs a second gradient, of labels that are sampled from the model's predictions, "
                    "and the loss function does not say how: declare it with @jaxstack.loss.samples_labels(...), or "
                    "choose another optimizer."
                )
            self._sampled_gradients = make_gradients(self.module.used, sampled, context, self.accumulation)

    @property
    def inner_rules(self) -> AxisRules:
        """Sharding rules inside the function that computes a step; a subclass may exclude mesh axes."""
        return self.rules

    def one_model(self, state: TrainState) -> TrainState:
        """Return the abstract train state of one model copy; in a subclass `state` stacks that of several copies."""
        return state

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take one optimizer step on a batch: return the next train state and the step's metrics.

        A step whose loss or gradients are not finite, or exceed the spike limits, changes nothing except the step count
        and `skipped`.

        Returns:
          The next state, and the metrics loss, grad_norm, count (of items), skipped, learning_rate if it is known,
          `RouterSums.metrics` of a mixture of experts, loss_limit and grad_norm_limit with a spike threshold,
          gradient_signal and gradient_noise with `noise_scale`, and the means of the loss function's further values.
        """
        key = jax.random.fold_in(state.key, state.step)
        batch = self._with_keys(batch, key)
        trained, frozen = self.module.split_frozen(state.params)
        point = state.params
        if (at := getattr(self.optimizer, "gradient_point", None)) is not None:
            point = self.module.join(at(trained, state.optimizer), frozen)
        used, to_stored = self._use(point, key)
        sums, non_params = self.gradients(used, state.non_params, batch, key, noise=self.settings.noise_scale)
        sums = self._all_sums(sums)
        count = jnp.maximum(sums.count, 1.0)
        gradients = to_stored(jax.tree.map(lambda g: g / count, sums.gradients), 1.0)
        loss = sums.loss / count
        norm = gradient_norm(gradients)
        extra = self._second_gradient(state, used, to_stored, batch, key)
        updates, optimizer = self.optimizer.update(gradients, state.optimizer, trained, **extra)
        _check_dtypes(trained, optimizer, state.optimizer)
        new_trained = self.module.keep(trained, cast(dict[str, Any], optax.apply_updates(trained, updates)))

        taken = jnp.isfinite(loss) & jnp.isfinite(norm)
        limits = {}
        if self.settings.spike_threshold is not None:
            most = state.history.limits(self.settings.spike_threshold)
            loss_limit = most[0]
            norm_limit = most[1]
            taken &= (loss <= loss_limit) & (norm <= norm_limit)
            limits = {"loss_limit": loss_limit, "grad_norm_limit": norm_limit}

        def take(new, old):
            return jax.tree.map(lambda n, o: _where(taken, n, o), new, old)

        skipped = jnp.where(taken, 0, state.skipped + 1)
        new = TrainState(
            state.step + 1,
            self.module.join(take(new_trained, trained), frozen),
            take(non_params, state.non_params),
            take(optimizer, state.optimizer),
            state.key,
            skipped,
            take(state.history.plus(loss, norm), state.history),
        )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "count": sums.count,
            "skipped": skipped,
            **limits,
            **(sums.noise or {}),
        }
        for name, further in sums.further.items():
            metrics |= further.metrics(name)
        if self.learning_rate is not None:
            metrics["learning_rate"] = self.learning_rate(state.step)
        return new, metrics

    def _all_sums(self, sums: GradientSums) -> GradientSums:
        """Return the gradient and loss sums to use for a step; a subclass may add those of other groups of devices."""
        return sums

    def _use(self, params: Dict, key: jax.Array) -> tuple[Dict, Callable[[Dict, float], Dict]]:
        """Return the parameters to compute with, and a function from their gradients to those of the stored parameters.

        The function takes the gradients of the trained parameters, and the weight of the module's own penalty.
        """
        module = self.module
        if module.used is module:
            return params, lambda gradients, penalty: gradients
        trained, frozen = module.split_frozen(params)

        def use(trained: Dict) -> tuple[tuple[Dict, jax.Array], Dict]:
            used, penalty = module.use(module.join(trained, frozen), jax.random.fold_in(key, 2))
            own, others = module.used.split_frozen(used)
            return (own, jnp.zeros(()) if penalty is None else penalty), others

        (own, _), pull, others = jax.vjp(use, trained, has_aux=True)
        return module.join(own, others), lambda gradients, penalty: pull((gradients, jnp.float32(penalty)))[0]

    def _second_gradient(
        self,
        state: TrainState,
        params: Dict,
        to_stored: Callable[[Dict, float], Dict],
        batch: Batch,
        key: jax.Array,
    ) -> dict[str, Any]:
        """Return the keywords of the optimizer's update, see `SampledGradient`; {} if it needs no second gradient."""
        second = self._second
        if second is None:
            return {}
        key = jax.random.fold_in(key, 1)

        def estimate() -> Dict:
            keyed = self._with_keys(batch, key, always=True)
            sums, _ = self._sampled_gradients(params, state.non_params, keyed, key)
            return second.estimate(to_stored(sums.gradients, 0.0), sums.count)

        renewed = state.step % second.every == 0

        def zeros():
            return jax.tree.map(jnp.zeros_like, self.module.split_frozen(state.params)[0])

        return {second.name: jax.lax.cond(renewed, estimate, zeros), "renewed": renewed}

    def _with_keys(self, batch: Batch, key: jax.Array, always: bool = False) -> Batch:
        """Return the batch with a random key for each token if dropout (or label sampling) needs them."""
        if not (self.module.drops_tokens or always) or "tokens" not in batch:
            return batch
        rows, length = batch["tokens"].shape
        parts = self.rules.degree(self.rules.table["length"])
        tokens = np.arange(length) if parts == 1 else sequence_order(length, parts)
        return {**batch, TOKEN_KEYS: token_keys(key, rows, jnp.asarray(tokens, jnp.int32))}

    def eval_step(self, params: Dict, non_params: Dict, batch: Batch) -> LossSum:
        """Return the summed loss and the item count of a held-out batch."""
        return self.gradients.loss(self.module.load(params), non_params, batch)


class StepProgram:
    """The train step as a compiled XLA program: traces it, compiles it, and describes the result.

    Args:
      steps: the step functions.
      state: shapes, dtypes and shardings of the train state.
      xla_options: options of XLA that go before jaxstack's own.
    """

    def __init__(self, steps: StepFunctions, state: TrainState, xla_options: Mapping[str, bool | int | float | str]):
        self._steps = steps
        self._state = state
        self._xla_options = xla_options
        self.choices: list[Choice] = []
        """The kernels that the step took, and the reasons against others; known after `lower`."""
        self.compiled: jax.stages.Compiled | None = None
        """The program; None before `compile`."""

    def lower(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> jax.stages.Lowered:
        """Trace the train step for batches of these shapes and shardings.

        Raises:
          ConfigError: a kernel or method that was chosen explicitly does not support what the model needs.
        """
        metrics = self._steps.rules.sharding(self._steps.metrics_spec)
        shardings = jax.tree.map(lambda x: x.sharding, self._state), metrics
        step = jax.jit(self._steps.train_step, donate_argnums=0, out_shardings=shardings)
        try:
            # Kernels that reach other devices' memory inside nested shard_maps learn from the mesh which these are.
            with jax.set_mesh(self._steps.rules.mesh), record_choices() as choices:
                lowered = step.lower(self._state, dict(batch))
        except NotSupported as error:
            raise ConfigError(str(error)) from None
        self.choices = list(choices)
        return lowered

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compile the traced train step that `lower` returned."""
        self.compiled = lowered.compile(compiler_options=self.compiler_options)
        return self.compiled

    @property
    def compiler_options(self) -> XlaOptions:
        """XLA options with which the train step is compiled."""
        return self._installed_options[0]

    @property
    def compiler_notes(self) -> list[str]:
        """A sentence for each XLA option that the installed jaxlib renamed or lacks."""
        return self._installed_options[1]

    @functools.cached_property
    def _installed_options(self) -> tuple[XlaOptions, list[str]]:
        layout = self._steps.layout
        own = {}
        if self._on_gpu:
            own = builtin_step_options(
                pipeline=layout.pipeline is not None,
                peer_copies=layout.peer_copies,
                several_processes=jax.process_count() > 1 and share_host(self._steps.rules.mesh.devices.flat),
            )
        return translate_options({**own, **self._xla_options})

    @property
    def _on_gpu(self) -> bool:
        return self._steps.rules.mesh.devices.flat[0].platform in ("gpu", "cuda")

    def describe(self) -> dict[str, Any]:
        """Describe what the compiled step runs, such as kernels and collectives, as JSON data."""
        assert self.compiled is not None, "compile the step first"
        steps = self._steps
        # A pipeline's matmuls are inside conditionals: the program does not tell how many of them run.
        counted = self._on_gpu and steps.layout.pipeline is None
        expected = steps.module.fp8_matmuls * steps.accumulation if counted else 0
        ran = describe_program(self.compiled, self.choices, dict(steps.rules.mesh.shape), expected)
        ran["compiler_options"] = self.compiler_options
        if self.compiler_notes:
            ran["compiler_notes"] = self.compiler_notes
        ran["sharding"] = self.describe_sharding()
        if steps.layout.pipeline is not None:
            ran["pipeline"] = self.describe_pipeline()
        return ran

    def describe_sharding(self) -> dict[str, Any]:
        """Return how the arrays of the train state are sharded, with their bytes per device, as JSON data."""
        state = self._steps.one_model(self._state)
        steps = self._steps
        others = (state.step, state.non_params, state.key, state.history)
        zero = steps.layout.zero
        moments = (state.optimizer, state.outer)
        return describe_shardings(steps.module, state.params, moments, others, rules=steps.rules, zero=zero)

    def describe_pipeline(self) -> dict[str, Any]:
        """Return the schedule of the pipeline's stages as JSON data; {} without pipeline parallelism."""
        pipeline = self._steps.layout.pipeline
        return {} if pipeline is None else describe_schedule(pipeline.table())


def _check_dtypes(trained: Dict, new: optax.OptState, old: optax.OptState) -> None:
    """Check that an optimizer update keeps the dtypes of the optimizer's state.

    Raises:
      TypeError: it does not, because its state began in the dtype of parameters of another dtype than float32.
    """
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=False)
    if all(after.dtype == before.dtype for after, before in pairs):
        return
    leaves = jax.tree_util.tree_leaves_with_path(trained)
    others = [f"{path_name(path)} is {leaf.dtype}" for path, leaf in leaves if leaf.dtype != jnp.float32]
    raise TypeError(
        f"this optimizer needs parameters in float32; {', '.join(others[:3]) or 'its state changes dtype'}. Create "
        "them in float32 (param_dtype=jnp.float32); the module may compute in another dtype (dtype=jnp.bfloat16)."
    )


def _where(condition: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    if jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
        data = jnp.where(condition, jax.random.key_data(new), jax.random.key_data(old))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(new))
    return jax.lax.select(condition, new, old)  # each call of jnp.where would be lowered to a separate function
