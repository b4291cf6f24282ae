"""Chooses the pipeline of a run: schedule, stages with their layers, and microbatches; checked without a device."""

import dataclasses

import numpy as np

from jaxstack.errors import ConfigError
from jaxstack.parallel.config import ParallelConfig
from jaxstack.parallel.pipeline.schedule import SCHEDULES, Schedule


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """Schedule of a run's pipeline, with its numbers of stages, virtual stages and microbatches."""

    schedule: str
    """A key of `SCHEDULES`."""
    stages: int
    """Devices along the axis `pipeline`."""
    chunks: int
    """Virtual stages on each device."""
    microbatches: int
    """Microbatches that each replica's batch is split into."""

    def table(self) -> Schedule:
        """Return the schedule as a table of the task that each stage runs at each tick."""
        return SCHEDULES[self.schedule](self.stages, self.microbatches, self.chunks)


def plan_pipeline(parallel: ParallelConfig, batch: int, accumulation: int = 1) -> PipelinePlan:
    """Return the pipeline schedule of a run, with its number of microbatches, for a global batch of `batch` rows.

    Args:
      parallel: degrees and choices of the pipeline.
      batch: rows of a global batch.
      accumulation: `train.gradient_accumulation`; in a pipeline another name for the number of microbatches.

    Raises:
      ConfigError: the microbatches do not fit batch or schedule; the message names the nearest numbers that do.
    """
    stages = parallel.pipeline
    chunks = parallel.virtual_stages
    shards = parallel.data * parallel.fsdp * parallel.expert
    unit = _unit(parallel)
    fits = fitting_microbatches(parallel, batch)
    wanted = parallel.microbatches or (accumulation if accumulation > 1 else None)
    if parallel.microbatches and accumulation not in (1, parallel.microbatches):
        raise ConfigError(
            f"parallel.microbatches ({parallel.microbatches}) and train.gradient_accumulation ({accumulation}) are one "
            "thing in a pipeline: leave one of them out, or make them equal."
        )
    if batch % shards or not fits or (wanted is not None and wanted not in fits):
        shown = "the default" if wanted is None else wanted
        why = f" and be a multiple of parallel.pipeline ({stages}) with the interleaved schedule" if unit > 1 else ""
        raise ConfigError(
            f"parallel.microbatches ({shown}) must divide the {batch} / {shards} rows of each pipeline{why}; "
            + _ways_out(fits, wanted, batch, shards, unit)
        )
    if wanted is None:
        wanted = max((m for m in fits if m <= 2 * stages), default=fits[0])
    return PipelinePlan(parallel.schedule, stages, chunks, wanted)


def fitting_microbatches(parallel: ParallelConfig, batch: int) -> list[int]:
    """Return the usable numbers of microbatches, ascending: they divide each replica's rows and suit the schedule.

    Args:
      parallel: degrees and schedule; without a pipeline the microbatches are those of gradient accumulation.
      batch: rows of a global batch.
    """
    rows = batch // (parallel.data * parallel.fsdp * parallel.expert)
    unit = _unit(parallel)
    return [m for m in range(unit, rows + 1, unit) if rows % m == 0]


def _unit(parallel: ParallelConfig) -> int:
    """Return the number of which the microbatches must be a multiple: the stages if interleaved, otherwise 1."""
    return parallel.pipeline if parallel.pipeline > 1 and parallel.schedule == "interleaved" else 1


def _ways_out(fits: list[int], wanted: int | None, batch: int, shards: int, unit: int) -> str:
    if batch % shards == 0 and fits and wanted is not None:
        near = {
            max((m for m in fits if m <= wanted), default=fits[0]),
            min((m for m in fits if m >= wanted), default=fits[-1]),
        }
        return f"nearest: {' or '.join(map(str, sorted(near)))}."
    pieces = max(unit, round((wanted or 1) / unit) * unit)
    also = "" if wanted in (None, pieces) else f": parallel.microbatches={pieces} with"
    step = shards * pieces
    below = batch // step * step
    return f"nearest{also} train.global_batch_size: {f'{below} or ' if below else ''}{below + step}."


@dataclasses.dataclass(frozen=True)
class StageLayout:
    """Assignment of a model's layers to virtual pipeline stages, in `groups` equal groups of layers.

    A group is a single layer, or a period of alternating ones.

    There are stages x chunks virtual stages; stage s holds the virtual stages s, s + stages, ... If the groups do not
    divide evenly, the first virtual stages get one more, because the last one also computes the head.
    """

    groups: int
    stages: int
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.groups < self.stages * self.chunks:
            raise ConfigError(
                f"parallel.pipeline x pipeline_virtual_stages ({self.stages} x {self.chunks}) must not exceed the "
                f"{self.groups} equal groups of layers of the model; nearest: parallel.pipeline="
                f"{max(1, self.groups // self.chunks)}" + (", or fewer virtual stages." if self.chunks > 1 else ".")
            )

    @property
    def most_groups(self) -> int:
        """Largest number of layer groups in any virtual stage; the storage of each has this size."""
        return -(-self.groups // (self.stages * self.chunks))

    @property
    def counts(self) -> np.ndarray:
        """Number of layer groups of each virtual stage, int32 [stages, chunks]."""
        virtual = self.stages * self.chunks
        sizes = np.full(virtual, self.groups // virtual) + (np.arange(virtual) < self.groups % virtual)
        return sizes.reshape(self.chunks, self.stages).T.astype(np.int32)

    @property
    def is_even(self) -> bool:
        """True if all virtual stages have equally many layer groups."""
        return self.groups % (self.stages * self.chunks) == 0

    @property
    def order(self) -> np.ndarray:
        """Index of the layer group in each storage row of each stage, int32 [stages, chunks x rows]; -1: empty row."""
        found = np.full((self.stages, self.chunks, self.most_groups), -1, np.int32)
        ends = np.cumsum(self.counts.T.reshape(-1))
        for virtual, end in enumerate(ends):
            count = self.counts[virtual % self.stages, virtual // self.stages]
            found[virtual % self.stages, virtual // self.stages, :count] = np.arange(end - count, end)
        return found.reshape(self.stages, self.chunks * self.most_groups)

    @property
    def is_canonical(self) -> bool:
        """True if the stages together store the layers in the model's order, without empty rows."""
        return bool(np.array_equal(self.order.reshape(-1), np.arange(self.groups)))

    @property
    def places(self) -> np.ndarray:
        """Storage row of each layer group, counted over all stages, int32 [groups]: the inverse of `order`."""
        flat = self.order.reshape(-1)
        rows = np.flatnonzero(flat >= 0)
        found = np.empty(self.groups, np.int32)
        found[flat[rows]] = rows
        return found
