"""Trains any Flax module with any loss: builds the sharded state, compiles the step, evaluates; `fit` runs the loop."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxstack.data.batch_source import BatchShardings, abstract_batch, arrange, as_source, batch_sharding, check_batch
from jaxstack.data.device import device_batches, local_rows
from jaxstack.distributed.xla_options import installed_options, own_options
from jaxstack.errors import ConfigError
from jaxstack.evaluation import Evaluator
from jaxstack.functional.module import make_functional
from jaxstack.functional.shardings import describe_shardings
from jaxstack.gradients.pipeline_module import StagedModule
from jaxstack.loop import Loop, LoopSettings
from jaxstack.observe.what_ran import describe_program
from jaxstack.optim.base import Optimizer
from jaxstack.optim.build import build_optimizer, frozen_rule
from jaxstack.optim.optimizers import AdamW
from jaxstack.optim.schedules import Cosine, Schedule
from jaxstack.parallel import AxisRules, ParallelConfig, StepLayout, make_mesh, make_rules
from jaxstack.parallel.pipeline.plan import PipelinePlan, plan_pipeline
from jaxstack.parallel.pipeline.simulate import describe_schedule
from jaxstack.run_config import TrainConfig
from jaxstack.state import TrainState, abstract_state, init_state, state_shardings
from jaxstack.step import StepFunctions
from jaxstack.tree_rules import path_name
from pallas_kernels import Choice, NotSupported, record_choices


class Trainer:
    """Trains a module.

    Args:
      module: a `flax.nnx.Module`, or a function `rngs -> nnx.Module` (created sharded, for large models), such as
        `jaxstack.functional.linen.from_linen` makes of a `flax.linen.Module`.
      loss_fn: `loss_fn(module, batch)` or `loss_fn(module, batch, key)`: a scalar mean over the batch, or a
        `jaxstack.loss.LossSum` where items weigh differently. `key` is None in evaluation.
      data: batches as dicts of arrays whose first dim is the global batch: an iterable, a function of the step, or an
        object with `batches(...)` such as `jaxstack.data.loader.open_data` returns.
      optimizer: one of `jaxstack.optim`, or an optax transformation (then `schedule` is not used).
      mesh: a mesh of `make_mesh`, or `AxisRules` on it (`make_rules`); default: all devices on `data`.
      layout: the other choices of parallelism, such as the ZeRO stage; default: `StepLayout()`. Its pipeline, or 1F1B
        where the mesh has stages, is for `jaxstack.models.Transformer` only.
      train: number of steps, batch size, accumulation.
      eval_data: held-out batches, an iterable of dicts; default: those of `data` where it has some.
      seed: of initial weights and of the loss function's keys.

    Raises:
      TypeError: the module, the loss or the data is of a kind that cannot be used.
    """

    def __init__(
        self,
        module: Any,
        loss_fn: Callable[..., Any],
        data: Any,
        *,
        optimizer: Optimizer | optax.GradientTransformation | None = None,
        schedule: Schedule | None = None,
        mesh: Mesh | AxisRules | None = None,
        layout: StepLayout | None = None,
        train: TrainConfig | None = None,
        eval_data: Any = None,
        seed: int = 0,
    ):
        self.train, self.seed, self.data = train or TrainConfig(), seed, as_source(data)
        self.rules = mesh if isinstance(mesh, AxisRules) else make_rules(mesh if mesh is not None else make_mesh())
        layout = layout or StepLayout()
        self.pipeline = layout.pipeline or self._default_pipeline()
        self.layout = dataclasses.replace(layout, pipeline=self.pipeline)
        self.module = make_functional(module)
        if self.pipeline is not None:
            self.module = StagedModule(self.module.make, self.pipeline.stages, self.pipeline.chunks)
        self.learning_rate: Callable[[jax.typing.ArrayLike], jax.Array] | None = None
        if not isinstance(optimizer, optax.GradientTransformation):
            optimizer = self._scheduled(optimizer or AdamW(), schedule or Cosine())
        self.optimizer = optimizer
        accumulation = self.train.gradient_accumulation
        self.steps = StepFunctions(
            self.module, loss_fn, optimizer, self.learning_rate, self.rules, self.layout, accumulation
        )
        self.shardings = state_shardings(self.module, optimizer, self.rules, self.layout.zero)
        if eval_data is None and hasattr(data, "held_out_batches"):
            eval_data = data
        eval_size = self.train.eval_batch_size or self.train.global_batch_size // accumulation
        self._held_out = eval_data, eval_size
        self.choices: list[Choice] = []
        self._state: TrainState | None = None
        self._compiled: Any = None

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """Evaluates on the held-out data."""
        return Evaluator(self.steps, *self._held_out, self.compiler_options)

    def _scheduled(self, optimizer: Optimizer, schedule: Schedule) -> optax.GradientTransformation:
        """Sets the learning rate, freezes what the optimizer's groups freeze, and builds it for the rest."""
        multiplier, peak = schedule.multiplier(self.train.steps), optimizer.learning_rate
        self.learning_rate = lambda step: peak * multiplier(step)
        everything = self.module.abstract_params
        self.module.freeze(frozen_rule(optimizer, everything))
        trained = self.module.split_frozen(everything)[0]
        stacked = self.module.split_frozen(self.module.map_parameters(_counts_layers, self.rules))[0]
        return build_optimizer(optimizer, self.learning_rate, trained, everything, stacked)

    def _default_pipeline(self) -> PipelinePlan | None:
        shape = self.rules.mesh.shape
        if shape["pipeline"] == 1:
            return None
        parallel = ParallelConfig(**shape)
        return plan_pipeline(parallel, self.train.global_batch_size, self.train.gradient_accumulation)

    @property
    def state(self) -> TrainState:
        """The train state; created, sharded, at its first use."""
        state = self._state
        if state is None:
            create = jax.jit(lambda key: init_state(self.module, self.optimizer, key), out_shardings=self.shardings)
            state = self._state = create(jax.random.key(self.seed))
        return state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state = state

    def start_from(self, params: Any) -> None:
        """A fresh state at step 0 with these parameters, as in `abstract_stored_state`, but without those of adapters,
        which start new; it takes over their buffers.
        """

        def create(key: jax.Array, params: Any) -> TrainState:
            if isinstance(self.module, StagedModule):
                params = self.module.stage_parameters(params)
            params = self.module.add_adapters(params, key)
            state = init_state(self.module, self.optimizer, key)
            return state._replace(params=params, optimizer=self.optimizer.init(self.module.split_frozen(params)[0]))

        create = jax.jit(create, out_shardings=self.shardings, donate_argnums=1)
        self._state = create(jax.random.key(self.seed), params)

    @property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and layouts of the state."""
        shapes = abstract_state(self.module, self.optimizer)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.shardings)

    @property
    def stored_state(self) -> TrainState:
        """The state as checkpoints hold it: the same for every layout."""
        if not isinstance(self.module, StagedModule) or self.module.stores_plain:
            return self.state
        module, optimizer = self.module, self.optimizer
        convert = jax.jit(lambda state: module.to_plain(optimizer, state), out_shardings=self._stored_shardings())
        return convert(self.state)

    @stored_state.setter
    def stored_state(self, state: TrainState) -> None:
        if isinstance(self.module, StagedModule) and not self.module.stores_plain:
            module, optimizer = self.module, self.optimizer
            convert = lambda state: module.from_plain(optimizer, state)  # noqa: E731
            state = jax.jit(convert, out_shardings=self.shardings)(state)
        self._state = state

    @property
    def abstract_stored_state(self) -> TrainState:
        """Shapes, dtypes and layouts of `stored_state`."""
        if not isinstance(self.module, StagedModule):
            return self.abstract_state
        shapes = abstract_state(self.module.plain, self.optimizer)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self._stored_shardings()
        )

    def _stored_shardings(self) -> TrainState:
        return state_shardings(getattr(self.module, "plain", self.module), self.optimizer, self.rules, self.layout.zero)

    @property
    def trained_module(self) -> Any:
        """The module with the present parameters."""
        return self.module.merge(self.state.params, self.state.non_params)

    def count_parameters(self) -> int:
        """Parameters of the module."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self.module.abstract_params))

    def frozen_parameters(self) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
        """Path -> logical axes and shape of the parameters that are not trained."""
        known = self.module.map_parameters(lambda names, shape, _: (tuple(names or ()), shape), self.rules)
        frozen = self.module.split_frozen(known)[1]
        leaves = jax.tree_util.tree_leaves_with_path(frozen, is_leaf=lambda x: isinstance(x, tuple))
        return {path_name(path): leaf for path, leaf in leaves}

    def host_rows(self, batch_size: int) -> np.ndarray:
        """The rows of a global batch that this process's devices need."""
        return local_rows(batch_sharding(self.rules, (batch_size,)), (batch_size,))

    def compile(self, batch: Mapping[str, jax.ShapeDtypeStruct], *, create_state: bool = False) -> jax.stages.Compiled:
        """Compiles the train step ahead of its first use; `choices` then tells which kernels it took.

        Args:
          batch: shapes and layouts, as from `peek_batch`.
          create_state: also creates the state, where there is none, while Python traces the step.

        Raises:
          ConfigError: a kernel or method that was asked for by name cannot compute what the model needs.
        """
        with ThreadPoolExecutor(1) as beside:
            # Waited for before the step is compiled: what XLA times then has the devices to itself.
            created = beside.submit(lambda: jax.block_until_ready(self.state) if create_state else None)
            lowered = self._lower(batch)
        created.result()
        self._compiled = lowered.compile(compiler_options=self.compiler_options)
        return self._compiled

    def _lower(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> jax.stages.Lowered:
        step = jax.jit(
            self.steps.train_step, donate_argnums=0, out_shardings=(self.shardings, self.rules.sharding(jax.P()))
        )
        try:
            # In a shard_map within another the kernels that reach other devices' memory learn from it which these are.
            with jax.set_mesh(self.rules.mesh), record_choices() as choices:
                lowered = step.lower(self.abstract_state, dict(batch))
        except NotSupported as error:
            raise ConfigError(str(error)) from None
        self.choices = list(choices)
        return lowered

    @property
    def compiler_options(self) -> dict[str, Any]:
        """XLA's options that the step is compiled with."""
        return self._installed_options[0]

    @property
    def compiler_notes(self) -> list[str]:
        """A sentence for each option that the installed jaxlib has under another name, or not."""
        return self._installed_options[1]

    @functools.cached_property
    def _installed_options(self) -> tuple[dict[str, Any], list[str]]:
        own = (
            own_options(pipeline=self.pipeline is not None, peer_copies=self.layout.peer_copies) if self._on_gpu else {}
        )
        return installed_options({**own, **self.train.xla_options})

    @property
    def _on_gpu(self) -> bool:
        return self.rules.mesh.devices.flat[0].platform in ("gpu", "cuda")

    def describe(self) -> dict[str, Any]:
        """What actually runs: see `jaxstack.observe.what_ran`."""
        # A pipeline's program has them within conditionals, so that how many of them run cannot be read from it.
        counted = self._on_gpu and self.pipeline is None
        expected = self.module.fp8_matmuls * self.train.gradient_accumulation if counted else 0
        ran = describe_program(self._compiled, self.choices, dict(self.rules.mesh.shape), expected)
        ran["compiler_options"] = self.compiler_options
        if self.compiler_notes:
            ran["compiler_notes"] = self.compiler_notes
        ran["sharding"] = self.describe_sharding()
        return ran if self.pipeline is None else {**ran, "pipeline": self.describe_pipeline()}

    def describe_sharding(self) -> dict[str, Any]:
        """Where every parameter lies, and what a device holds of the state: see `jaxstack.functional.shardings`."""
        return describe_shardings(self.module, self.optimizer, self.rules, self.shardings, self.layout.zero)

    def describe_pipeline(self) -> dict[str, Any]:
        """The schedule of the stages; empty without a pipeline."""
        return {} if self.pipeline is None else describe_schedule(self.pipeline.table())

    def peek_batch(self, start: int = 0) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and layouts of the batches, learnt from the first one."""
        size = self.train.global_batch_size
        stream = self.data.batches(global_batch_size=size, rows=self.host_rows(size), start=start)
        try:
            first = next(iter(stream), None)
        finally:
            getattr(stream, "close", lambda: None)()
        return abstract_batch(check_batch(first), self.rules, size)

    def batches(self, start: int) -> Any:
        """Global batches on the devices from batch `start` on, each with the seconds waited for it."""
        size = self.train.global_batch_size
        host = self.data.batches(global_batch_size=size, rows=self.host_rows(size), start=start)
        return self._place(host, size)

    def put(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """A whole global batch, laid out on the devices."""
        size = len(next(iter(check_batch(batch).values())))
        (placed, _), *_ = self._place(iter([batch]), size)
        return placed

    def _place(self, host: Iterator[Mapping[str, np.ndarray]], size: int) -> Any:
        arranged = (arrange(batch, self.rules) for batch in host)
        return device_batches(arranged, BatchShardings(self.rules, size), global_batch_size=size)

    def train_step(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """One step on a global batch on the devices; returns its metrics, not waited for."""
        step = self._compiled
        if step is None:
            shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for k, x in batch.items()}
            step = self.compile(shapes)
        self._state, metrics = step(self.state, dict(batch))
        return metrics

    def evaluate(
        self, max_tokens: int | None = None, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Held-out loss (nats an item), with `eval_items` and `eval_seconds`; None where there is no held-out data, or
        where `stop`, asked after each batch, gives it up.
        """
        return self.evaluator.run(self.state.params, self.state.non_params, max_tokens, stop)

    def fit(self, run_dir: str | Path | None = None, settings: LoopSettings | None = None) -> dict[str, Any]:
        """Trains until `train.steps`, resuming from the newest checkpoint in `run_dir`.

        Args:
          run_dir: keeps checkpoints, metrics and the report; None: nothing is written.
          settings: how often to save, log and evaluate, and what to tell.

        Returns:
          The last logged values, with `eval_loss` where there is held-out data.

        Raises:
          JaxstackError: the run cannot go on, or was stopped by a signal after saving (`exit_code` 143 or 130).
        """
        return Loop(self, run_dir, settings or LoopSettings()).run()


def _counts_layers(names: Sequence[str | None] | None, *_: Any) -> bool:
    return bool(names) and names[0] == "layers"


def numpy_batches(rows: Mapping[str, np.ndarray], batch_size: int, seed: int = 0) -> Callable[[int], dict[str, Any]]:
    """A data function for `Trainer` over arrays in memory; batch `step` depends on (seed, step): it resumes exactly."""
    count = len(next(iter(check_batch(rows).values())))

    def at(step: int) -> dict[str, Any]:
        pick = np.random.default_rng((seed, step)).integers(0, count, batch_size)
        return {name: value[pick] for name, value in rows.items()}

    return at
