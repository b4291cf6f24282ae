"""Trains one worker: a run with its own model copy that averages parameter changes with other runs through files."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack.local_sgd import SEPARATE_RUNS
from jaxstack.local_sgd.base import OuterState
from jaxstack.local_sgd.folder import FolderDiLoCo, FolderExchange, local_arrays
from jaxstack.loss import Batch
from jaxstack.resilience.progress_file import ProgressFile
from jaxstack.state import TrainState
from jaxstack.step import Metrics, StepFunctions
from jaxstack.training import RunStep, StepWrapper, Training
from jaxstack.worker_steps import features_of


class FolderSteps(StepFunctions):
    """Train and eval steps of one worker; they do not change the outer optimizer."""

    def train_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Take one optimizer step without changing the outer optimizer's state; see `StepFunctions.train_step`."""
        new, metrics = super().train_step(state, batch)
        return new._replace(outer=state.outer), metrics


class FolderWorker(StepWrapper):
    """Wraps the train step of one worker: a run that exchanges parameter changes with others through a shared folder.

    `train.global_batch_size` is that of this worker. A pipeline, `train.batch_ramp` and modules with compressed weights
    or companions are not supported. The state's `outer.shared` has parameters and outer momentum as of the last
    averaging over runs; checkpoints hold the train state as it is.

    Args:
      method: folder and outer optimizer.
    """

    make_steps = FolderSteps

    def __init__(self, method: FolderDiLoCo):
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
