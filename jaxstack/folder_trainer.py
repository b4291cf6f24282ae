"""Trains one island: a run with its own model copy that averages parameter changes with other runs through files."""

import functools
from collections.abc import Generator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack.data.batch_source import peek
from jaxstack.data.device_batches import abstract_batch
from jaxstack.errors import ConfigError
from jaxstack.islands.base import OuterState
from jaxstack.islands.folder import FolderDiLoCo, FolderExchange, local_arrays
from jaxstack.loss import Batch
from jaxstack.resilience.progress_file import ProgressFile
from jaxstack.state import TrainState
from jaxstack.step import Metrics, StepFunctions
from jaxstack.trainer import Trainer


class FolderSteps(StepFunctions):
    """Train and eval steps of one island (a run with its own model copy); they do not change the outer optimizer."""

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take one optimizer step without changing the outer optimizer's state; see `StepFunctions.train_step`."""
        new, metrics = super().train_step(state, batch)
        return new._replace(outer=state.outer), metrics


class FolderTrainer(Trainer):
    """A `Trainer` of one island: a run that exchanges parameter changes with other runs through a shared folder.

    Args:
      islands: folder and outer optimizer.
      arguments, settings: those of `Trainer`; `train.global_batch_size` is that of this island. A pipeline,
        `train.batch_ramp` and modules with compressed weights or a teacher are not supported.

    Raises:
      ConfigError: an argument is not supported.
    """

    make_steps = FolderSteps

    def __init__(self, *arguments: Any, islands: FolderDiLoCo, **settings: Any):
        self._method = islands
        self._taken: int | None = None
        super().__init__(*arguments, **settings)
        unsupported = {
            "a pipeline": self.pipeline is not None,
            "train.batch_ramp": self.train.batch_ramp is not None,
            "a module with compressed weights": self.module.used is not self.module,
            "a teacher": bool(self.start_shapes[1]),
        }
        for name in (name for name, found in unsupported.items() if found):
            raise ConfigError(f"islands.name=folder does not support {name}; remove it, or do without islands.")
        self.exchange.mean.alive = ProgressFile.of_this_process().note

    @functools.cached_property
    def exchange(self) -> FolderExchange:
        """The `FolderExchange` that averages parameter changes over all runs through files in the shared folder."""
        return self._method.build(self._method.count, {})

    def _run_state(self, state: TrainState) -> TrainState:
        return state._replace(outer=self.exchange.init(self.module.split_frozen(state.params)[0]))

    def _run_shardings(self, shardings: Any) -> Any:
        params = self.module.split_frozen(shardings.params)[0]
        shared = {"anchor": params, "velocity": params, "round": self.rules.sharding(jax.P())}
        return shardings._replace(outer=OuterState(shared, {}))

    @property
    def abstract_stored_state(self) -> TrainState:
        """Shapes, dtypes and shardings of `stored_state`, which here is the train state itself."""
        return self.abstract_state

    @property
    def state(self) -> TrainState:
        """The train state; `outer.shared` has parameters and outer momentum as of the last averaging over runs."""
        return super().state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state = state
        self._taken = None

    @property
    def stored_state(self) -> TrainState:
        """The train state as checkpoints store it, which here is the train state itself."""
        return self.state

    @stored_state.setter
    def stored_state(self, state: TrainState) -> None:
        self.state = state

    def peek_batch(self, start: int = 0) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes, dtypes and shardings of this run's rows of a batch; see `Trainer.peek_batch`."""
        size = self.train.global_batch_size
        batch = peek(self.data, global_batch_size=size * self._method.count, rows=self._rows(), start=start)
        return abstract_batch(batch, self.rules, size)

    def batches(self, start: int) -> Generator[tuple[dict[str, jax.Array], float], None, None]:
        """Yield this run's rows of each batch, whose rows are split over the islands (runs); see `Trainer.batches`."""
        size = self.train.global_batch_size
        host = self.data.batches(global_batch_size=size * self._method.count, rows=self._rows(), start=start)
        yield from self.placement.stream(host, size, size)

    def _rows(self) -> Any:
        """Return the indices of the rows that this process loads of each batch, whose rows are split over the runs."""
        size = self.train.global_batch_size
        return self.placement.local_rows(size) + self._method.island * size

    def train_step(self, batch: Mapping[str, jax.Array]) -> Metrics:
        """Take one training step, then exchange parameters with the other islands (runs) if an exchange is due."""
        taken = int(jax.device_get(self.state.step)) if self._taken is None else self._taken
        metrics = super().train_step(batch)
        self._taken = taken + 1
        if (phase := self.exchange.due(self._taken)) is not None:
            state = self.state
            trained, frozen = self.module.split_frozen(state.params)
            trained, outer = self.exchange(phase, trained, state.outer)
            # The step donates the buffers of its parameters, and would donate those of the anchor with them.
            trained = jax.tree.map(jnp.copy, trained)
            self._state = state._replace(params=self.module.join(trained, frozen), outer=outer)
        return metrics

    def describe(self) -> dict[str, Any]:
        """Describe as plain JSON what the compiled step runs, and how many bytes the runs exchange per averaging."""
        trained = self.module.split_frozen(self.state.params)[0]
        size = sum(x.nbytes for x in local_arrays(trained)) // jax.local_device_count()
        described = {**self._method.model_dump(mode="json"), "step_bytes": 0, "exchange_bytes": [size]}
        return {**super().describe(), "islands": described}
