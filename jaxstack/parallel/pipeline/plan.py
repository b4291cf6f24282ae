"""Chooses the pipeline of a run: schedule, virtual stages and microbatches, with the checks that need no device."""

import dataclasses

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
