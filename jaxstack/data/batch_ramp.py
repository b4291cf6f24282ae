"""Batch-size ramp: the global batch size doubles after given numbers of tokens; it depends on the step alone.

Sizes are a function of the step alone, so that a resumed run needs no further state. All rows of the data are used in
the same order as without a ramp, each once: a batch begins at a multiple of its own size. Merrill et al. 2025
(arXiv:2505.23971) reach a 1B model's loss in 43 % fewer steps with such a ramp.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.config.sections import TrainConfig
from jaxstack.data.batch_source import BatchSource, HostBatch, UserBatches
from jaxstack.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Phase:
    """A range of steps with the same batch size.

    Attributes:
      first_step: number of steps before it.
      first_row: number of rows that these used.
      rows: rows of each of its batches.
    """

    first_step: int
    first_row: int
    rows: int


class BatchSizes:
    """The batch size of each step of a run, constant or following a batch-size ramp; steps count from 0.

    Args:
      train: number of steps, final batch size, sequence length, microbatches, and the ramp, if there is one.

    Raises:
      ConfigError: the final batch size cannot be halved as often as the ramp doubles.
    """

    def __init__(self, train: TrainConfig):
        self._train = train
        self.full = train.global_batch_size
        ramp = train.batch_ramp
        thresholds = ramp.double_at_tokens if ramp is not None else ()
        self._exponent = ramp.learning_rate_exponent if ramp is not None else 0.0
        if self.full % 2 ** len(thresholds):
            raise ConfigError(
                f"train.global_batch_size ({self.full}) must be divisible by {2 ** len(thresholds)} for the "
                f"{len(thresholds)} doublings of train.batch_ramp."
            )
        rows = self.full >> len(thresholds)
        phases = [Phase(0, 0, rows)]
        for tokens in thresholds:
            before = phases[-1]
            rows = 2 * rows
            first_row = max(before.first_row, -(-tokens // (rows * train.sequence_length)) * rows)
            steps = (first_row - before.first_row) // before.rows
            phases.append(Phase(before.first_step + steps, first_row, rows))
        self.phases: tuple[Phase, ...] = tuple(phases)

    @property
    def grows(self) -> bool:
        """True if the batch size grows during the run."""
        return len(self.phases) > 1

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Batch-size settings as plain JSON; a resumed run must have the same ones, to find its place in the data."""
        ramp = self._train.batch_ramp
        return {"global_batch_size": self.full} | ({"batch_ramp": list(ramp.double_at_tokens)} if ramp else {})

    def phase(self, step: int) -> Phase:
        """Return the phase (range of steps with equal batch size) that contains a step."""
        return next(phase for phase in reversed(self.phases) if phase.first_step <= step)

    def rows(self, step: int) -> int:
        """Return the number of rows in a step's batch."""
        return self.phase(step).rows

    def rows_before(self, step: int) -> int:
        """Return the total number of rows in the batches of all steps before this one."""
        phase = self.phase(step)
        return phase.first_row + (step - phase.first_step) * phase.rows

    def steps_left(self, done: int) -> float:
        """Return how many steps of the current batch size would cover the rows left to train on after `done` steps."""
        if done >= self._train.steps:
            return 0.0
        return (self.rows_before(self._train.steps) - self.rows_before(done)) / self.rows(max(done - 1, 0))

    def smaller(self, start: int) -> list[int]:
        """Return the batch sizes, smaller than the final one, that the steps from `start` on still use."""
        steps = self._train.steps
        ends = [phase.first_step for phase in self.phases[1:]] + [steps]
        used = [
            p.rows for p, end in zip(self.phases, ends, strict=True) if start < end and p.first_step < min(end, steps)
        ]
        return [rows for rows in used if rows != self.full]

    def microbatches(self, rows: int, shards: int) -> int:
        """Return the fewest microbatches to split `rows` rows into, none larger than a microbatch of the full batch.

        Args:
          rows: rows of the batch.
          shards: number of devices that its rows are split over; they divide it.
        """
        count = max(1, -(-self._train.gradient_accumulation * rows // self.full))
        while (rows // shards) % count:
            count += 1
        return count

    def schedule_position(self, step: jax.typing.ArrayLike) -> jax.Array:
        """Return a step's position in the learning-rate schedule: tokens before it / mean tokens per step of the run.

        Traceable. Without a ramp it is the step itself.
        """
        if not self.grows:
            return jnp.asarray(step)
        steps = self._train.steps
        ends = [min(phase.first_step, steps) for phase in self.phases] + [steps]
        rows = [self.rows_before(end) * steps / self.rows_before(steps) for end in ends]
        return jnp.interp(
            jnp.asarray(step, jnp.float32), jnp.asarray(ends, jnp.float32), jnp.asarray(rows, jnp.float32)
        )

    def phases_from(self, step: int) -> Iterator[tuple[int, int, int | None]]:
        """Yield the remaining phases of the ramp: (rows per batch, number of the first batch, number of batches).

        The last phase has None batches: as many as there are.
        """
        ends = [phase.first_step for phase in self.phases[1:]]
        for phase, end in zip(self.phases, [*ends, None], strict=True):
            begin = max(step, phase.first_step)
            if end is None or begin < end:
                yield phase.rows, self.rows_before(begin) // phase.rows, None if end is None else end - begin

    def learning_rate_factor(self, step: jax.typing.ArrayLike) -> jax.Array:
        """Return the factor that scales the learning rate for a step's batch size; 1 for the full batch. Traceable."""
        starts = jnp.asarray([phase.first_step for phase in self.phases])
        factors = [(phase.rows / self.full) ** self._exponent for phase in self.phases]
        return jnp.asarray(factors, jnp.float32)[jnp.searchsorted(starts, jnp.asarray(step), side="right") - 1]

    def describe(self) -> str:
        """Return the batch sizes as text: `256`, or `64 to 256`."""
        return f"{self.phases[0].rows} to {self.full}" if self.grows else str(self.full)


class SlicedBatches:
    """Source of smaller batches for a batch-size ramp, cut from the full-size batches of another source.

    Args:
      source: gives batches of `full` rows.
      full: a multiple of every size that is asked for.
    """

    def __init__(self, source: UserBatches, full: int):
        self._source = source
        self._full = full

    def batches(self, *, global_batch_size: int, rows: Sequence[int] | np.ndarray, start: int) -> Iterator[HostBatch]:
        """Yield the rows at indices `rows` of each batch of `global_batch_size` rows, from batch number `start` on."""
        parts = self._full // global_batch_size
        everything = np.arange(self._full)
        first, skip = divmod(start, parts)
        for whole in self._source.batches(global_batch_size=self._full, rows=everything, start=first):
            for part in range(skip, parts):
                yield {name: x[np.asarray(rows) + part * global_batch_size] for name, x in whole.items()}
            skip = 0


def sliceable(source: BatchSource, sizes: BatchSizes) -> BatchSource:
    """Return a source that can yield every batch size of a ramp; a user's full-size batches are wrapped if needed.

    Raises:
      ConfigError: the source is an iterator, which cannot go back to the rest of a batch that was read ahead.
    """
    if not sizes.grows or not isinstance(source, UserBatches):
        return source
    if source.is_iterator:
        raise ConfigError(
            "train.batch_ramp needs data that can be read again: give a function of the step or a list of full "
            "batches, no generator."
        )
    return SlicedBatches(source, sizes.full)
