"""The state of a training, sharded over devices, and its compiled steps, for any Flax module and any loss."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jaxstack.data.batch_ramp import BatchSizes, sliceable
from jaxstack.data.batch_source import BatchSource, HostBatch, as_source, peek
from jaxstack.data.device_batches import BatchPlacement, abstract_batch, check_rows
from jaxstack.evaluation import Evaluator, HeldOutData, check_held_out
from jaxstack.loss import Loss, LossFunction
from jaxstack.module_arrays.module import Dict, ModuleArrays, NNXFactory
from jaxstack.module_arrays.pipeline_order import PipelineOrder
from jaxstack.module_arrays.views import with_views
from jaxstack.optim.base import Optimizer, StepOptimizer
from jaxstack.optim.build import build_optimizer, frozen_by_groups
from jaxstack.optim.optimizers import AdamW
from jaxstack.optim.schedules import Constant, Cosine, Schedule
from jaxstack.parallel import ParallelConfig, StepLayout, make_mesh
from jaxstack.parallel.mesh import with_all_axes
from jaxstack.parallel.pipeline.plan import PipelinePlan, plan_pipeline
from jaxstack.parameter_paths import flatten
from jaxstack.run_config import TrainConfig
from jaxstack.state import (
    TrainState,
    abstract_state,
    init_state,
    start_shapes,
    state_shardings,
    with_shardings,
)
from jaxstack.step import Metrics, StepFunctions, StepProgram, StepSettings, XlaOptions
from pallas_kernels import Choice

RunStep = Callable[[TrainState, Mapping[str, jax.Array]], tuple[TrainState, Metrics]]
"""(train state, batch) -> (next train state, metrics)."""

Data = BatchSource | Callable[[int], HostBatch] | Iterable[HostBatch]
"""Batches as dicts of arrays whose first dim is the global batch."""


class StepWrapper:
    """Runs the train step of a trainer; by default, one copy of the model takes one step on each batch.

    A subclass wraps an optimizer as `optax.MultiSteps` does, and is given to `Trainer` in its place: it extends the
    train state, changes the compiled step, and may run further programs between steps. See `jaxstack.local_sgd`.

    Args:
      optimizer: what `Trainer` takes as `optimizer`.
    """

    make_steps: Callable[..., StepFunctions] = StepFunctions
    """Makes the step functions from the arguments of `StepFunctions`."""
    reads_own_metrics = False
    """True if each process reads the metrics of its own copies of the model, and so knows of its own skipped steps."""

    def __init__(self, optimizer: Optimizer | optax.GradientTransformation | None = None):
        self.optimizer = optimizer

    def check(self, trainer: "Training") -> None:
        """Check that the wrapper supports what the trainer trains.

        Raises:
          ConfigError: it does not.
        """

    def extend_state(self, trainer: "Training", state: TrainState) -> TrainState:
        """Return the run's initial train state, given that of one model copy. Traceable."""
        return state

    def extend_shardings(self, trainer: "Training", shardings: TrainState) -> TrainState:
        """Return the shardings of the run's train state, given those of one model copy."""
        return shardings

    def state_is_replaced(self) -> None:
        """Forget what was known about the train state, such as its step: it is another one from now on."""

    def store(self, trainer: "Training", state: TrainState) -> TrainState:
        """Convert the train state to the form in checkpoints, the same for every parallel layout."""
        module = trainer.module
        if module.stores_plain:
            return state._replace(params=module.split_saved(state.params)[0])
        return trainer.to_plain(state)

    def load(self, trainer: "Training", state: TrainState) -> TrainState:
        """Convert a train state from the form in checkpoints to that of training, without what no checkpoint holds."""
        module = trainer.module
        if module.stores_plain:
            return state
        return trainer.from_plain(state)

    def abstract_stored(self, trainer: "Training") -> TrainState:
        """Return shapes, dtypes and shardings of the train state in the form in checkpoints."""
        module = trainer.module
        shapes = with_shardings(abstract_state(module.plain, trainer.optimizer), trainer.plain_shardings)
        return shapes._replace(params=module.split_saved(shapes.params)[0])

    def evaluated(self, trainer: "Training", state: TrainState) -> tuple[Dict, Dict, dict[str, jax.Array]]:
        """Return the parameters and other variables to evaluate, and further values for an evaluation's metrics."""
        return state.params, state.non_params, {}

    def compile(self, trainer: "Training", batch: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Compile the programs that run in addition to the train step, after the train step is compiled."""

    def step(
        self, trainer: "Training", state: TrainState, batch: Mapping[str, jax.Array], run: RunStep
    ) -> tuple[TrainState, Metrics]:
        """Take a step with `run(state, batch)`, which is the compiled train step, and run what else is due."""
        return run(state, batch)

    def read(self, metrics: Metrics) -> dict[str, float]:
        """Wait for the metrics of a step, and convert them from arrays to numbers."""
        return {name: float(value) for name, value in jax.device_get(metrics).items()}

    def describe(self, trainer: "Training") -> dict[str, Any]:
        """Return what a description of the compiled step says of the wrapper, as JSON data."""
        return {}

    def rows_in_data(self) -> tuple[int, int]:
        """Return (number of runs whose rows a batch of the data has, index of this run among them)."""
        return 1, 0


class Training:
    """The state of a training and its compiled steps: all of a `jaxstack.Trainer` but the loop over the steps.

    Its arguments and errors are those of `Trainer`.
    """

    steps_together = 1
    """Number of steps after which a checkpoint can be saved: those that share data that is not saved."""
    waits = False
    """True if a step is done when `train_step` returns, so that its metrics are read at once."""

    def __init__(
        self,
        module: nnx.Module | NNXFactory | ModuleArrays,
        loss_fn: LossFunction | Loss,
        data: Data,
        *,
        optimizer: Optimizer | optax.GradientTransformation | StepWrapper | None = None,
        schedule: Schedule | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        layout: StepLayout | None = None,
        train: TrainConfig | None = None,
        eval_data: HeldOutData | Iterable[HostBatch] | None = None,
        seed: int = 0,
    ):
        _check_arguments(train, schedule, mesh, layout)
        self.train = train or TrainConfig()
        self.seed = seed
        self.data = as_source(data)
        self.batch_sizes = BatchSizes(self.train)
        layout = layout or StepLayout()
        self.rules = layout.rules_on(cast(Mesh, make_mesh() if mesh is None else with_all_axes(mesh)))
        self.placement = BatchPlacement(self.rules)
        self.pipeline = layout.pipeline or self._default_pipeline()
        order = [] if self.pipeline is None else [PipelineOrder(self.pipeline.stages, self.pipeline.chunks)]
        self.module: ModuleArrays = with_views(module, order)
        self.learning_rate: Callable[[jax.typing.ArrayLike], jax.Array] | None = None
        self.wrapper = optimizer if isinstance(optimizer, StepWrapper) else StepWrapper(optimizer)
        optimizer = self.wrapper.optimizer
        if not isinstance(optimizer, optax.GradientTransformation):
            if not isinstance(optimizer, Optimizer | None):
                raise TypeError(
                    "optimizer must be one of jaxstack.optim.optimizers, such as AdamW(learning_rate=1e-3), or an "
                    f"optax transformation; found {optimizer!r}."
                )
            if optimizer is None:
                optimizer = AdamW()
                schedule = schedule or Cosine()
            elif "clip_norm" not in optimizer.model_fields_set:
                optimizer = optimizer.model_copy(update={"clip_norm": None})
            optimizer = self._scheduled(optimizer, schedule or Constant(), layout.zero)
        self.module.check_dtypes()
        self.optimizer = optimizer
        layout = dataclasses.replace(layout, pipeline=self.pipeline)
        self.steps = self.wrapper.make_steps(
            self.module, loss_fn, optimizer, self.learning_rate, self.rules, layout, self.train.gradient_accumulation
        )
        self.wrapper.check(self)
        shardings = state_shardings(self.module, optimizer, self.rules, layout.zero)
        self.shardings = self.wrapper.extend_shardings(self, shardings)
        self.program = StepProgram(self.steps, self.abstract_state, self.train.xla_options)
        self._smaller: dict[int, StepProgram] = {}
        check_held_out(eval_data)
        self._eval_data = data if eval_data is None and isinstance(data, HeldOutData) else eval_data
        self._state: TrainState | None = None
        self._unsaved: Dict = {}

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """The evaluator of the loss on the held-out data."""
        rows = self.train.eval_batch_size or self.train.global_batch_size // self.train.gradient_accumulation
        return Evaluator(self.steps, self._eval_data, rows, self.compiler_options)

    def _scheduled(self, optimizer: Optimizer, schedule: Schedule, zero: int) -> StepOptimizer:
        """Return the optimizer of the trained parameters, with learning-rate schedule and freezing rules applied."""
        multiplier = schedule.make_multiplier(self.train.steps)
        peak = optimizer.learning_rate
        sizes = self.batch_sizes
        if sizes.grows:
            self.learning_rate = lambda step: (
                peak * sizes.learning_rate_factor(step) * multiplier(sizes.schedule_position(step))
            )
        else:
            self.learning_rate = lambda step: peak * multiplier(step)
        everything = self.module.abstract_params
        self.module.freeze(frozen_by_groups(optimizer))
        trained = self.module.split_frozen(everything)[0]
        stacked = self.module.stacked_parameters(self.rules)
        specs = self.module.split_frozen(self.module.parameter_specs(self.rules, zero))[0]
        return build_optimizer(
            optimizer,
            self.learning_rate,
            trained,
            everything,
            stacked,
            total_steps=self.train.steps,
            width=self.module.width,
            specs=specs if self.rules.mesh.size > 1 else None,
        )

    def _default_pipeline(self) -> PipelinePlan | None:
        shape = self.rules.mesh.shape
        if shape["pipeline"] == 1:
            return None
        parallel = ParallelConfig(**shape)
        return plan_pipeline(parallel, self.train.global_batch_size, self.train.gradient_accumulation)

    @property
    def state(self) -> TrainState:
        """The train state; it is initialized, sharded over the devices, when it is first used."""
        state = self._state
        if state is None:

            def create(key):
                return self.wrapper.extend_state(self, init_state(self.module, self.optimizer, key))

            create = jax.jit(create, out_shardings=self.shardings)
            state = create(jax.random.key(self.seed))
            self._state = state = state._replace(params=self.module.join(state.params, self._unsaved))
            self._unsaved = {}
        return state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state = self._with_unsaved(state)
        self.wrapper.state_is_replaced()

    def start_from(self, params: Dict) -> None:
        """Restart at step 0 from these parameters, which are donated (their memory is reused).

        Args:
          params: as `start_shapes` describes; what views add to them, such as adapters, is initialized.
        """
        params = self.module.join(params, self._take_unsaved())

        def create(key: jax.Array, params: Dict) -> TrainState:
            params = self.module.complete(self.module.store(params), key)
            state = init_state(self.module, self.optimizer, key)
            moments = self.optimizer.init(self.module.split_frozen(params)[0])
            return self.wrapper.extend_state(self, state._replace(params=params, optimizer=moments))

        donated = 1 if self.module.used is self.module else ()  # factors have other shapes
        create = jax.jit(create, out_shardings=self.shardings, donate_argnums=donated)
        self._state = create(jax.random.key(self.seed), params)

    @property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the train state, known without computing it."""
        extend = functools.partial(self.wrapper.extend_state, self)
        state = jax.eval_shape(extend, abstract_state(self.module, self.optimizer))
        return with_shardings(state, self.shardings)

    @functools.cached_property
    def start_shapes(self) -> tuple[Dict, Dict]:
        """Shapes, dtypes and shardings of the parameters for `start_from`, and of those for `load_unsaved`."""
        return start_shapes(self.module, self.rules, self.steps.layout.zero)

    def load_unsaved(self, params: Dict) -> None:
        """Set parameters that checkpoints do not hold, such as those of a teacher: `{"teacher": its parameters}`.

        Args:
          params: nested dicts with all or some of them, shaped as `start_shapes` says.
        """
        self._unsaved = self.module.join(self._unsaved, params)
        if self._state is not None:
            self.state = self._state

    def _take_unsaved(self) -> Dict:
        """Return the parameters that no checkpoint holds for a new state: as loaded, or else from the old state."""
        loaded = self._unsaved
        self._unsaved = {}
        wanted = self.module.split_saved(self.module.abstract_params)[1]
        if flatten(wanted).keys() <= flatten(loaded).keys():
            return loaded
        return self.module.join(self.module.split_saved(self.state.params)[1], loaded)

    def _with_unsaved(self, state: TrainState) -> TrainState:
        """Return a new train state with the parameters put in that checkpoints do not hold."""
        unsaved = self._take_unsaved()
        return state._replace(params=self.module.join(state.params, unsaved)) if unsaved else state

    @property
    def stored_state(self) -> TrainState:
        """The train state in the form that checkpoints have, which is the same for every parallel layout."""
        return self.wrapper.store(self, self.state)

    @stored_state.setter
    def stored_state(self, state: TrainState) -> None:
        self.state = self.wrapper.load(self, state)

    @property
    def plain_shardings(self) -> TrainState:
        """Shardings of the train state with parameters in the form in checkpoints."""
        return state_shardings(self.module.plain, self.optimizer, self.rules, self.steps.layout.zero)

    @functools.cached_property
    def to_plain(self) -> Any:
        """Compiled function that converts a train state to the form in checkpoints, where the two forms differ."""
        wanted = abstract_state(self.module.plain, self.optimizer)
        return jax.jit(functools.partial(self.module.to_plain, wanted=wanted), out_shardings=self.plain_shardings)

    @functools.cached_property
    def from_plain(self) -> Any:
        """Compiled function that converts a train state from the form in checkpoints, where the two forms differ."""
        wanted = abstract_state(self.module, self.optimizer)
        return jax.jit(functools.partial(self.module.from_plain, wanted=wanted), out_shardings=self.shardings)

    @property
    def data_state(self) -> Mapping[str, np.ndarray]:
        """Arrays that a checkpoint keeps for the data; {} if the number of the step is enough to go on."""
        return {}

    @data_state.setter
    def data_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        del arrays

    @property
    def abstract_stored_state(self) -> TrainState:
        """Shapes, dtypes and shardings of `stored_state`, without computing it."""
        return self.wrapper.abstract_stored(self)

    @property
    def trained_module(self) -> Any:
        """The Flax module with the current parameters."""
        params, non_params, _ = self.wrapper.evaluated(self, self.state)
        return self.module.merge(params, non_params)

    def count_parameters(self) -> int:
        """Return the number of the module's parameters, trained or not."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.module.abstract_params))

    def frozen_parameters(self) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
        """Return the model's own parameters that are not trained, as path -> (logical axes, shape)."""
        used = self.module.used
        known = used.map_parameters(lambda names, shape, _: (tuple(names or ()), shape), self.rules)
        frozen = flatten(used.split_saved(used.split_frozen(known)[1])[0])
        return {"/".join(path): leaf for path, leaf in frozen.items()}

    def set_step(self, settings: StepSettings) -> None:
        """Choose when a train step is skipped and what it measures; it is compiled again where this changes it."""
        if settings != self.steps.settings:
            self.steps = self.steps.with_settings(settings)
            self.program = StepProgram(self.steps, self.abstract_state, self.train.xla_options)

    def compile(self, batch: Mapping[str, jax.ShapeDtypeStruct], *, create_state: bool = False) -> jax.stages.Compiled:
        """Compile the train step before its first use; `choices` then lists the kernels that it uses.

        Args:
          batch: shapes and shardings, as from `peek_batch`.
          create_state: True also creates the state, if there is none, while Python traces the step.

        Raises:
          ConfigError: a kernel or method that was chosen explicitly does not support what the model needs.
        """
        with ThreadPoolExecutor(1) as thread:
            created = thread.submit(lambda: jax.block_until_ready(self.state) if create_state else None)
            lowered = self.program.lower(batch)
        created.result()  # before XLA compiles, so that it has the devices to itself when it times kernels
        step = self.program.compile(lowered)
        self.wrapper.compile(self, batch)
        return step

    def compile_smaller(self, batch: Mapping[str, jax.ShapeDtypeStruct], start: int) -> None:
        """Compile the train step for the smaller batches of a batch-size ramp that are used from step `start` on.

        Raises:
          ConfigError: the devices do not divide a smaller batch.
        """
        for rows in self.batch_sizes.smaller(start):
            shards = self.rules.degree(self.rules.table["batch"])
            check_rows(rows, self.rules, f"the batch of {rows} sequences that train.batch_ramp begins with")
            shapes = {
                name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=x.sharding)
                for name, x in batch.items()
            }
            steps = self.steps.with_accumulation(self.batch_sizes.microbatches(rows, shards))
            program = StepProgram(steps, self.abstract_state, self.train.xla_options)
            program.compile(program.lower(shapes))
            self._smaller[rows] = program

    @property
    def choices(self) -> list[Choice]:
        """The kernels that the compiled train step uses, and why others were not chosen."""
        return self.program.choices

    @property
    def compiler_options(self) -> XlaOptions:
        """XLA options with which the train step is compiled."""
        return self.program.compiler_options

    @property
    def compiler_notes(self) -> list[str]:
        """A sentence for each XLA option that the installed jaxlib renamed or lacks."""
        return self.program.compiler_notes

    def describe(self) -> dict[str, Any]:
        """Describe what the compiled train step runs, such as kernels and collectives, as JSON data."""
        return {**self.program.describe(), **self.wrapper.describe(self)}

    def describe_sharding(self) -> dict[str, Any]:
        """Return how the arrays of the train state are sharded, with their bytes per device, as JSON data."""
        return self.program.describe_sharding()

    def describe_pipeline(self) -> dict[str, Any]:
        """Return the schedule of the pipeline's stages as JSON data; {} without pipeline parallelism."""
        return self.program.describe_pipeline()

    def peek_batch(self, start: int = 0) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes, dtypes and shardings of a full batch, without using up the batch of step `start`."""
        size = self.train.global_batch_size
        runs, _ = self.wrapper.rows_in_data()
        start = self.batch_sizes.rows_before(start) // size
        batch = peek(self.data, global_batch_size=size * runs, rows=self._rows(size), start=start)
        return abstract_batch(batch, self.rules, size)

    def _rows(self, size: int) -> Any:
        """Return the indices of the rows that this process loads of each batch of the data."""
        _, index = self.wrapper.rows_in_data()
        return self.placement.local_rows(size) + index * size if index else self.placement.local_rows(size)

    def batches(self, start: int) -> Generator[tuple[dict[str, jax.Array], float], None, None]:
        """Yield (batch on the devices, seconds waited for it) for each step from `start` on."""
        data = sliceable(self.data, self.batch_sizes)
        runs, _ = self.wrapper.rows_in_data()
        for size, first, count in self.batch_sizes.phases_from(start):
            host = data.batches(global_batch_size=size * runs, rows=self._rows(size), start=first)
            yield from self.placement.stream(host if count is None else itertools.islice(host, count), size, size)

    def put(self, batch: HostBatch) -> dict[str, jax.Array]:
        """Put a whole global batch from host memory onto the devices, sharded as the train step needs it."""
        return self.placement.put(batch)

    def train_step(self, batch: Mapping[str, jax.Array]) -> Metrics:
        """Take one step on a global batch on the devices; return its metrics without waiting for them."""
        rows = len(next(iter(batch.values())))
        step = self._smaller.get(rows, self.program).compiled
        if step is None:
            shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for k, x in batch.items()}
            step = self.compile(shapes)
        self._state, metrics = self.wrapper.step(self, self.state, dict(batch), step)
        return metrics

    def read(self, metrics: Metrics) -> dict[str, float]:
        """Wait for the metrics of a step, and convert them from arrays to numbers."""
        return self.wrapper.read(metrics)

    def evaluate(
        self, max_tokens: int | None = None, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Return the held-out loss of the current parameters, see `Evaluator.run`."""
        if not self.evaluator.has_data:
            return None
        params, non_params, more = self.wrapper.evaluated(self, self.state)
        values = self.evaluator.run(params, non_params, max_tokens, stop)
        return None if values is None else {**values, **{name: float(x) for name, x in more.items()}}


def _check_arguments(train: object, schedule: object, mesh: object, layout: object) -> None:
    """Raise TypeError if an argument of `Trainer` does not have the documented type."""
    wanted = (
        ("train", train, TrainConfig, "a TrainConfig, such as TrainConfig(steps=100)"),
        (
            "schedule",
            schedule,
            Schedule,
            "one of jaxstack.optim.schedules, such as Cosine(warmup_steps=10); a schedule of optax goes into an "
            "optimizer of optax: optimizer=optax.adamw(schedule)",
        ),
        ("mesh", mesh, Mesh | AbstractMesh, "a jax.sharding.Mesh, such as one of jaxstack.parallel.make_mesh"),
        ("layout", layout, StepLayout, "a jaxstack.parallel.StepLayout"),
    )
    for name, value, kind, text in wanted:
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be {text}; found {value!r}.")
