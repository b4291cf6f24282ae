"""Trains on workers, groups of devices joined by slow links: each worker trains its own copy of the model.

The train state has a leading dim [workers], split over the mesh axis of that name. A step runs in a `shard_map` that
is manual over this axis alone, so that no collective of it connects two workers. The exchanges between workers are
separate programs; that of an `OverlappedExchange` also contains the train step that it overlaps with.

`FolderWorker` is for separate runs, each a worker, that average parameter changes through files in a shared folder.
"""

import contextlib
import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxstack.distributed.xla_options import OptionValue, overlap_options
from jaxstack.errors import ConfigError
from jaxstack.gradients.microbatches import GradientSums
from jaxstack.local_sgd import SEPARATE_RUNS, SEVERAL_WORKERS
from jaxstack.local_sgd.base import Exchange, OuterState, OverlappedExchange, WorkerMethod
from jaxstack.local_sgd.folder import FolderDiLoCo, FolderExchange, local_arrays
from jaxstack.loss import Batch, LossSum
from jaxstack.module_arrays.module import Dict, ModuleArrays
from jaxstack.observe.collectives import bytes_over_axis
from jaxstack.optim.base import Optimizer
from jaxstack.parallel.config import WORKERS
from jaxstack.parallel.rules import AxisRules, state_spec
from jaxstack.parameter_paths import flatten, nest
from jaxstack.resilience.progress_file import ProgressFile
from jaxstack.state import TrainState, with_shardings
from jaxstack.step import Metrics, StepFunctions, StepProgram
from jaxstack.training import RunStep, StepWrapper, Training

Communicate = Callable[[Dict, OuterState], tuple[Dict, OuterState]]
"""(trained parameters of a worker, state of the method) -> both after an exchange. Runs inside the `shard_map`."""

_WHOLE = PartitionSpec()
_OWN = PartitionSpec(WORKERS)
_OWN_FIELDS = ("params", "non_params", "optimizer", "skipped", "history")
_SPECS = TrainState(_WHOLE, _OWN, _OWN, _OWN, _WHOLE, _OWN, _OWN, OuterState(_WHOLE, _OWN))  # pyright: ignore[reportArgumentType]
"""Which parts of the state each worker has for itself."""


class WorkerSteps(StepFunctions):
    """Train and eval steps on all workers."""

    metrics_spec = _OWN
    _beside: tuple[OverlappedExchange, int] | None = None
    _synchronous = False

    @property
    def inner_rules(self) -> AxisRules:
        return self.rules.within([WORKERS])

    def one_model(self, state: TrainState) -> TrainState:
        def one(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=_drop_first(x.sharding))

        return _map_own(one, state)

    def overlapped_with(self, exchange: OverlappedExchange, phase: int) -> "WorkerSteps":
        """Return a copy whose train step also runs one phase of `exchange` (averaging over workers) meanwhile."""
        other = copy.copy(self)
        other._beside = exchange, phase
        return other

    def synchronous_copy(self) -> "WorkerSteps":
        """Return a copy whose train step sums gradients over all workers, as data parallelism does."""
        other = copy.copy(self)
        other._synchronous = True
        return other

    def _all_sums(self, sums: GradientSums) -> GradientSums:
        if not self._synchronous:
            return sums
        total = jax.lax.psum((sums.gradients, sums.loss, sums.count), WORKERS)
        return dataclasses.replace(sums, gradients=total[0], loss=total[1], count=total[2])

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take one optimizer step on each worker; metrics are arrays [workers]."""

        def own(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            new, metrics = self._own_step(_map_own(lambda x: x[0], state), batch)
            return _map_own(lambda x: x[None], new), {name: x[None] for name, x in metrics.items()}

        return self._on_each(own, (_SPECS, _OWN), (_SPECS, _OWN))(state, dict(batch))

    def _own_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take the train step of one worker, overlapped with communication if `overlapped_with` has added it."""
        key = jax.random.fold_in(state.key, jax.lax.axis_index(WORKERS))
        if self._beside is None:
            new, metrics = super().train_step(state._replace(key=key), batch)
            return new._replace(key=state.key, outer=state.outer), metrics
        exchange, phase = self._beside
        changes = exchange.compute_changes(phase, self.module.split_frozen(state.params)[0], state.outer)
        # The step reads the parameters after the changes are known: otherwise XLA computes these, and begins to
        # communicate, as late as it can.
        changes, params = jax.lax.optimization_barrier((changes, state.params))
        new, metrics = super().train_step(state._replace(key=key, params=params), batch)
        new = new._replace(key=state.key)
        outer = exchange.send(phase, changes, state.outer)
        if exchange.delay > 1:
            return new._replace(outer=outer), metrics
        trained, frozen = self.module.split_frozen(new.params)
        params = self.module.join(exchange.merge(phase, trained, outer), frozen)
        return new._replace(params=params, outer=outer), metrics

    def exchange(self, communicate: Communicate, state: TrainState) -> TrainState:
        """Return the train state after `communicate` has exchanged (e.g. averaged) parameters between workers."""

        def own(state: TrainState) -> TrainState:
            state = _map_own(lambda x: x[0], state)
            trained, frozen = self.module.split_frozen(state.params)
            trained, outer = communicate(trained, state.outer)
            state = state._replace(params=self.module.join(trained, frozen), outer=outer)
            return _map_own(lambda x: x[None], state)

        return self._on_each(own, (_SPECS,), _SPECS)(state)

    def eval_step(self, params: Dict, non_params: Dict, batch: Batch) -> LossSum:
        """Return the loss sum and item count of a held-out batch, which is split over the workers."""
        evaluate = super().eval_step

        def own(params: Dict, non_params: Dict, batch: Batch) -> LossSum:
            return jax.lax.psum(evaluate(params, non_params, batch), WORKERS)

        return self._on_each(own, (_WHOLE, _WHOLE, _OWN), _WHOLE)(params, non_params, dict(batch))

    def _on_each(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            function,
            mesh=self.rules.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={WORKERS},
            check_vma=False,
        )


class Workers(StepWrapper):
    """Wraps the train step for several workers, groups of devices that each train a model copy and communicate rarely.

    Evaluation uses the mean of the workers' parameters. Checkpoints hold it too, for generation, export and other runs.
    A pipeline, `train.batch_ramp` and modules with compressed weights or a teacher are not supported.

    Args:
      method: the method that keeps the workers together.
      optimizer: of each worker, as `Trainer` takes it.
    """

    make_steps = WorkerSteps
    reads_own_metrics = True

    def __init__(self, method: WorkerMethod, optimizer: Optimizer | optax.GradientTransformation | None = None):
        super().__init__(optimizer)
        self._method = method
        self._beside: dict[int, jax.stages.Compiled] = {}
        self._between: dict[int, jax.stages.Compiled] = {}
        self._synchronous: tuple[jax.stages.Compiled, jax.stages.Compiled] | None = None
        self._taken: int | None = None
        self._exchange: Exchange | None = None
        self._compiled_mean: Callable[[TrainState], tuple[Dict, Dict, jax.Array]] | None = None

    @property
    def exchange(self) -> Exchange:
        """Object that synchronises the parameters of workers, e.g. by averaging, as configured."""
        assert self._exchange is not None, "give the wrapper to a Trainer first"
        return self._exchange

    def check(self, trainer: Training) -> None:
        """Check that the method suits the number of workers and what is trained.

        Raises:
          ConfigError: it does not.
        """
        if trainer.rules.mesh.devices.flat[0].platform == "cpu":
            # Programs that come from the persistent cache hang or crash on simulated CPU devices: none is stored.
            jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
        count = trainer.rules.mesh.shape[WORKERS]
        if problem := self._method.problem(count):
            raise ConfigError(problem)
        self._exchange = self._method.build(count, trainer.module.stacked_parameters(trainer.rules))
        SEVERAL_WORKERS.refuse(features_of(trainer), "remove it, or set parallel.workers=1")

    def extend_state(self, trainer: Training, state: TrainState) -> TrainState:
        count = trainer.rules.mesh.shape[WORKERS]
        outer = self.exchange.init(trainer.module.split_frozen(state.params)[0])
        return _map_own(lambda x: jnp.broadcast_to(x[None], (count, *x.shape)), state._replace(outer=outer))

    def extend_shardings(self, trainer: Training, shardings: TrainState) -> TrainState:
        module = trainer.module
        rules = trainer.rules
        params, _ = module.split_frozen(module.abstract_params)
        shapes = flatten(params)
        specs = flatten(shardings.params)

        def place(entry: Dict) -> Dict:
            def one(path: tuple[str, ...], x: jax.ShapeDtypeStruct) -> NamedSharding:
                spec = state_spec(rules.mesh, specs[path[1:]].spec, shapes[path[1:]].shape, x.shape)
                return rules.sharding(spec)

            return nest((path, one(path, x)) for path, x in flatten(entry).items())

        shared, own = jax.eval_shape(self.exchange.init, params)
        return _map_own(_split_first, shardings._replace(outer=OuterState(place(shared), place(own))))

    def state_is_replaced(self) -> None:
        self._taken = None

    def _mean(self, module: ModuleArrays, state: TrainState) -> tuple[Dict, Dict, jax.Array]:
        """Return parameters and other variables averaged over workers, and the workers' RMS distance from it."""
        params, non_params = jax.tree.map(_mean_of_first, (state.params, state.non_params))

        def squares(x, mean):
            return jnp.sum(jnp.mean((x - mean) ** 2, 0))

        def trained(tree):
            return module.split_frozen(tree)[0]

        apart = jax.tree.map(squares, trained(state.params), trained(params))
        return params, non_params, jnp.sqrt(sum(jax.tree.leaves(apart)))

    def evaluated(self, trainer: Training, state: TrainState) -> tuple[Dict, Dict, dict[str, jax.Array]]:
        """Return the workers' mean parameters, and the workers' distance from that mean.

        The latter, `eval_worker_distance`, is the root of the mean square of their Euclidean distances.
        """
        if self._compiled_mean is None:
            one = _map_own(_drop_first, trainer.shardings)
            places = one.params, one.non_params, trainer.rules.sharding(_WHOLE)
            self._compiled_mean = jax.jit(functools.partial(self._mean, trainer.module), out_shardings=places)
        params, non_params, distance = self._compiled_mean(state)
        return params, non_params, {"eval_worker_distance": distance}

    def store(self, trainer: Training, state: TrainState) -> TrainState:
        """Return the train state as in checkpoints: `params` and `non_params` are means over workers.

        Each worker's own values are in `outer.own`.
        """
        params, non_params, _ = self.evaluated(trainer, state)
        return _with_means(state, params, non_params)

    def load(self, trainer: Training, state: TrainState) -> TrainState:
        own = dict(state.outer.own)
        params = own.pop("params")
        non_params = own.pop("non_params")
        return state._replace(params=params, non_params=non_params, outer=state.outer._replace(own=own))

    def abstract_stored(self, trainer: Training) -> TrainState:
        state = trainer.abstract_state
        params, non_params, _ = jax.eval_shape(functools.partial(self._mean, trainer.module), state)
        one = _map_own(_drop_first, trainer.shardings)
        return with_shardings(
            _with_means(state, params, non_params), _with_means(trainer.shardings, one.params, one.non_params)
        )

    def compile(self, trainer: Training, batch: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Compile the communication between workers."""
        exchange = self.exchange
        state = trainer.abstract_state
        steps = cast(WorkerSteps, trainer.steps)
        options = trainer.train.xla_options
        if self._method.synchronous_steps:
            program = StepProgram(steps.synchronous_copy(), state, options)
            begin = self._compile_exchange(trainer, lambda params, _: (params, exchange.init(params)))
            self._synchronous = program.compile(program.lower(batch)), begin
        for phase in range(exchange.phases):
            if isinstance(exchange, OverlappedExchange):
                overlapped = self._overlap_options(trainer, exchange, phase)
                program = StepProgram(steps.overlapped_with(exchange, phase), state, overlapped)
                self._beside[phase] = program.compile(program.lower(batch))
                if exchange.delay > 1:
                    merge = functools.partial(exchange.merge, phase)
                    self._between[phase] = self._compile_exchange(trainer, lambda p, o, merge=merge: (merge(p, o), o))
            else:
                self._between[phase] = self._compile_exchange(trainer, functools.partial(exchange, phase))

    def _overlap_options(self, trainer: Training, exchange: OverlappedExchange, phase: int) -> dict[str, OptionValue]:
        """Return the XLA options of a step that communicates with other workers while it computes."""
        if trainer.rules.mesh.devices.flat[0].platform == "cpu":
            return trainer.train.xla_options
        state = trainer.steps.one_model(trainer.abstract_state)
        trained = trainer.module.split_frozen(state.params)[0]
        sent = jax.eval_shape(functools.partial(exchange.compute_changes, phase), trained, state.outer)
        return {**overlap_options(trainer.compiler_options, len(sent)), **trainer.train.xla_options}

    def _compile_exchange(self, trainer: Training, communicate: Communicate) -> jax.stages.Compiled:
        function = functools.partial(cast(WorkerSteps, trainer.steps).exchange, communicate)
        with jax.set_mesh(trainer.rules.mesh):
            exchange = jax.jit(function, donate_argnums=0, out_shardings=trainer.shardings)
            lowered = exchange.lower(trainer.abstract_state)
        return lowered.compile(compiler_options=trainer.compiler_options)

    def step(
        self, trainer: Training, state: TrainState, batch: Mapping[str, jax.Array], run: RunStep
    ) -> tuple[TrainState, Metrics]:
        """Take one step on each worker, with the parameter exchange between them if one is due."""
        taken = int(jax.device_get(state.step)) if self._taken is None else self._taken
        delay = self.exchange.delay if isinstance(self.exchange, OverlappedExchange) else 0
        sent = self._due(taken) if delay else None
        self._taken = taken + 1
        if self._synchronous is not None and taken < self._method.synchronous_steps:
            synchronous, begin = self._synchronous
            state, metrics = synchronous(state, batch)
            if self._taken == self._method.synchronous_steps:
                state = begin(jax.block_until_ready(state))
            return state, metrics
        state, metrics = run(state, batch) if sent is None else self._beside[sent](state, batch)
        if delay != 1 and (phase := self._due(self._taken - delay)) is not None:
            # Simulated CPU devices share threads, which collectives of two programs at once may block for good.
            on_cpu = trainer.rules.mesh.devices.flat[0].platform == "cpu"
            state = self._between[phase](jax.block_until_ready(state) if on_cpu else state)
            state = jax.block_until_ready(state) if on_cpu else state
        return state, metrics

    def _due(self, step: int) -> int | None:
        """Return which phase of the parameter exchange between workers is due after a step, or None."""
        return self.exchange.due(step) if step > self._method.synchronous_steps else None

    def bytes_of_steps(self, trainer: Training, steps: int) -> float:
        """Return how many bytes each device sends to other workers in a run's first `steps` steps."""
        known = self.describe(trainer)["local_sgd"]
        first = min(steps, self._method.synchronous_steps)
        phases = [phase for step in range(1, steps + 1) if (phase := self._due(step)) is not None]
        sent = sum(known["exchange_bytes"][phase] for phase in phases)
        return first * known["synchronous_bytes"] + (steps - first) * known["step_bytes"] + sent

    def read(self, metrics: Metrics) -> dict[str, float]:
        """Wait for the metrics of a step; return them as numbers, averaged over this process's workers.

        `count` is the sum and `skipped` the largest; the loss is the mean over items; the overload of experts is that
        of the worker where it is largest.
        """
        values = {name: _per_worker(x) for name, x in metrics.items()}
        means = {name: float(np.mean(x)) for name, x in values.items()}
        count = values["count"]
        loss = float(np.sum(values["loss"] * count) / np.sum(count)) if np.sum(count) else means["loss"]
        if "expert_overload" in values:
            worst = int(np.argmax(values["expert_overload"]))
            means |= {name: float(x[worst]) for name, x in values.items() if name.startswith("expert_overload")}
        return {**means, "loss": loss, "count": float(np.sum(count)), "skipped": float(np.max(values["skipped"]))}

    def describe(self, trainer: Training) -> dict[str, Any]:
        """Return how many bytes workers send each other, as `workers`.

        It has the bytes that each device sends to other workers: in a step, in the exchanges, and in each of the
        synchronous steps.
        """
        axes = dict(trainer.rules.mesh.shape)
        exchanges = [*(self._beside or self._between).values()]
        described: dict[str, Any] = {"count": axes[WORKERS], **self._method.model_dump(mode="json")}

        def sent(program):
            return 0 if program is None else bytes_over_axis(program.as_text(), axes, WORKERS)

        with contextlib.suppress(ValueError, AssertionError):  # HLO text of an unknown form must not stop a run
            described["step_bytes"] = sent(trainer.program.compiled)
            described["exchange_bytes"] = [sent(program) for program in exchanges]
            described["synchronous_bytes"] = sent(self._synchronous and self._synchronous[0])
        return {"local_sgd": described}


def features_of(trainer: Training) -> list[str]:
    """Return the names of the features that a trainer uses, as far as exchanges between copies of a model ask."""
    used = {
        "pipeline": trainer.pipeline is not None,
        "batch ramp": trainer.train.batch_ramp is not None,
        "compressed weights": trainer.module.used is not trainer.module,
    }
    declared = [view.feature for view in trainer.module.views if view.feature]
    return [*(name for name, found in used.items() if found), *declared]


def _per_worker(x: jax.Array) -> np.ndarray:
    """Return the values that an array [workers] holds for the workers of this process."""
    shards = {shard.index[0].start: shard.data for shard in x.addressable_shards}
    return np.array([jax.device_get(value).item() for value in shards.values()])


def _with_means(state: TrainState, params: Any, non_params: Any) -> TrainState:
    """Return the state for checkpoints: the given means, and in `outer.own` each worker's values."""
    own = {**state.outer.own, "params": state.params, "non_params": state.non_params}
    return state._replace(params=params, non_params=non_params, outer=state.outer._replace(own=own))


def _map_own(function: Callable[[Any], Any], state: TrainState) -> TrainState:
    """Return the train state with `function` applied to arrays that differ between workers, e.g. parameters."""
    own = {name: jax.tree.map(function, getattr(state, name)) for name in _OWN_FIELDS}
    outer = state.outer._replace(own=jax.tree.map(function, state.outer.own))
    return state._replace(**own, outer=outer)


def _mean_of_first(x: jax.Array) -> jax.Array:
    return jnp.mean(x, 0) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]


def _split_first(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(WORKERS, *sharding.spec))


def _drop_first(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


class FolderSteps(StepFunctions):
    """Train and eval steps of one worker; they do not change the outer optimizer."""

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take one optimizer step without changing the outer optimizer's state; see `StepFunctions.train_step`."""
        new, metrics = super().train_step(state, batch)
        return new._replace(outer=state.outer), metrics


class FolderWorker(StepWrapper):
    """Wraps the train step of one worker: a run that exchanges parameter changes with others through a shared folder.

    `train.global_batch_size` is that of this worker. A pipeline, `train.batch_ramp` and modules with compressed weights
    or a teacher are not supported. The state's `outer.shared` has the parameters and outer momentum after the
    last averaging over runs; checkpoints hold the train state as it is.

    Args:
      method: folder and outer optimizer.
      optimizer: of this worker, as `Trainer` takes it.
    """

    make_steps = FolderSteps

    def __init__(self, method: FolderDiLoCo, optimizer: Optimizer | optax.GradientTransformation | None = None):
        super().__init__(optimizer)
        self._method = method
        self._taken: int | None = None
        self.exchange: FolderExchange = method.build(method.count, {})
        """Averages parameter changes over all runs through files in the shared folder."""

    def check(self, trainer: Training) -> None:
        SEPARATE_RUNS.refuse(features_of(trainer), "remove it, or do without workers")
        self.exchange.mean.alive = ProgressFile.of_this_process().note

    def extend_state(self, trainer: Training, state: TrainState) -> TrainState:
        return state._replace(outer=self.exchange.init(trainer.module.split_frozen(state.params)[0]))

    def extend_shardings(self, trainer: Training, shardings: TrainState) -> TrainState:
        params = trainer.module.split_frozen(shardings.params)[0]
        shared = {"anchor": params, "velocity": params, "round": trainer.rules.sharding(jax.P())}
        return shardings._replace(outer=OuterState(shared, {}))

    def state_is_replaced(self) -> None:
        self._taken = None

    def abstract_stored(self, trainer: Training) -> TrainState:
        return trainer.abstract_state

    def rows_in_data(self) -> tuple[int, int]:
        return self._method.count, self._method.worker

    def step(
        self, trainer: Training, state: TrainState, batch: Mapping[str, jax.Array], run: RunStep
    ) -> tuple[TrainState, Metrics]:
        """Take one training step, then exchange parameters with the other workers if an exchange is due."""
        taken = int(jax.device_get(state.step)) if self._taken is None else self._taken
        state, metrics = run(state, batch)
        self._taken = taken + 1
        if (phase := self.exchange.due(self._taken)) is not None:
            trained, frozen = trainer.module.split_frozen(state.params)
            trained, outer = self.exchange(phase, trained, state.outer)
            # The step donates the buffers of its parameters, and would donate those of the anchor with them.
            trained = jax.tree.map(jnp.copy, trained)
            state = state._replace(params=trainer.module.join(trained, frozen), outer=outer)
        return state, metrics

    def describe(self, trainer: Training) -> dict[str, Any]:
        """Return how many bytes the runs exchange per averaging, as `workers`."""
        trained = trainer.module.split_frozen(trainer.state.params)[0]
        size = sum(x.nbytes for x in local_arrays(trained)) // jax.local_device_count()
        return {"local_sgd": {**self._method.model_dump(mode="json"), "step_bytes": 0, "exchange_bytes": [size]}}
