"""Converts a pipeline schedule to arrays for the compiled loop: what each stage does, and in which buffer entries."""

import dataclasses
import heapq
from collections.abc import Hashable, Iterable

import numpy as np

from jaxstack.parallel.pipeline.schedule import Schedule

IDLE = 0
RUN = 1
WEIGHTS = 2
"""Values of the column `slot{j}`: nothing, the slot's own kind of task, or a weight gradient."""
HEAD = 1
EMBEDDING = 2
"""Values of the column `ends`: the loss (on the last virtual stage), the embedding's gradient (on the first)."""


def colour_intervals(intervals: Iterable[tuple[int, int, Hashable]]) -> tuple[dict[Hashable, int], int]:
    """Assign values to as few buffer entries as possible; values in use at the same tick get different entries.

    Args:
      intervals: (first tick, last tick, name) of each value.

    Returns:
      (name -> entry, number of entries).
    """
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    found: dict[Hashable, int] = {}
    for start, end, name in sorted(intervals, key=lambda item: item[:2]):
        while busy and busy[0][0] < start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        entry = heapq.heappop(free) if free else len(busy)
        found[name] = entry
        heapq.heappush(busy, (end, entry))
    return found, 1 + max(found.values(), default=-1)


@dataclasses.dataclass(frozen=True)
class Program:
    """A pipeline schedule as int32 arrays [ticks, stages] that the compiled loop reads, and the sizes of its buffers.

    There is an array for each column of `make_program`; the last tick only finishes the one before it.

    Entry numbers equal to the number of entries mean "nowhere": every buffer has one entry more for what arrives
    without being wanted.
    """

    columns: dict[str, np.ndarray]
    activations: int
    gradients: int
    residuals: int
    weight_gradients: int


def make_program(schedule: Schedule) -> Program:
    """Convert a pipeline schedule to arrays that say what each stage does at each tick, and in which buffer entries.

    Columns, by slot: `slot{j}` what it does, `microbatch{j}`, `chunk{j}`; `first` whether slot 0 embeds; `activation`
    the entry that slot 0 reads, `residual0` the one it writes, `arriving` the one in which the activation that arrives
    is put; `gradient`, `residual1`, `arriving_gradient` the same of slot 1; `pending{j}` the entry of a weight
    gradient; `ends`, `ends_microbatch`, `ends_gradient` for head and embedding.
    """
    builder = _Builder(schedule)
    for tick, slot, stage, task in schedule.tasks():
        builder.add(tick, slot, stage, task.kind, task.microbatch, task.chunk)
    return builder.program()


class _Builder:
    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.stages = schedule.stages
        self.last = schedule.stages * schedule.chunks - 1
        self.when = {key: tick for key, (tick, _) in schedule.when().items()}
        kinds = {kind for kind, _, _ in self.when}
        self.backward = "B" in kinds
        self.split = "W" in kinds
        self._allocate()
        shape = (len(schedule.ticks) + 1, self.stages)
        names = ["first", "activation", "residual0", "arriving", "gradient", "residual1", "arriving_gradient"]
        names += ["ends", "ends_microbatch", "ends_gradient"]
        for j in range(len(schedule.ticks[0])):
            names += [f"slot{j}", f"microbatch{j}", f"chunk{j}", f"pending{j}"]
        self.columns = {name: np.zeros(shape, np.int32) for name in names}
        self.columns["arriving"][:] = self.sizes[0]
        self.columns["arriving_gradient"][:] = self.columns["ends_gradient"][:] = self.sizes[1]

    def _allocate(self) -> None:
        """Assign an index in a buffer to each activation, gradient and residual of each stage.

        All stages get buffers of one size: that of the stage that needs most.
        """
        when = self.when
        sizes = [0, 0, 0, 0]
        self.entries: list[list[dict[Hashable, int]]] = []
        for stage in range(self.stages):
            lives: list[list[tuple[int, int, Hashable]]] = [[], [], [], []]
            for k in range(stage, self.last + 1, self.stages):
                for m in range(self.schedule.microbatches):
                    forward = when["F", m, k]
                    if k:  # written when the tick of its producer ends
                        lives[0].append((when["F", m, k - 1] + 1, forward, (m, k)))
                    if self.backward:
                        backward = when["B", m, k]
                        made = forward if k == self.last else when["B", m, k + 1] + 1
                        lives[1].append((made, backward, (m, k)))
                        lives[2].append((forward, backward, (m, k)))
                    if self.split:
                        lives[3].append((when["B", m, k], when["W", m, k], (m, k)))
            coloured = [colour_intervals(intervals) for intervals in lives]
            self.entries.append([entries for entries, _ in coloured])
            sizes = [max(size, count) for size, (_, count) in zip(sizes, coloured, strict=True)]
        self.sizes = sizes

    def add(self, tick: int, slot: int, stage: int, kind: str, microbatch: int, chunk: int) -> None:
        columns = self.columns
        k = chunk * self.stages + stage
        activations, gradients, residuals, pending = self.entries[stage]
        at = (tick, stage)
        name = (microbatch, k)
        columns[f"slot{slot}"][at] = WEIGHTS if kind == "W" else RUN
        columns[f"microbatch{slot}"][at] = microbatch
        columns[f"chunk{slot}"][at] = chunk
        if kind == "W":
            columns[f"pending{slot}"][at] = pending[name]
        elif kind == "F":
            columns["first"][at] = k == 0
            columns["activation"][at] = activations.get(name, 0)
            columns["residual0"][at] = residuals.get(name, 0)
            if k < self.last:
                after = (stage + 1) % self.stages
                columns["arriving"][tick, after] = self.entries[after][0][microbatch, k + 1]
            else:
                columns["ends"][at] = HEAD
                columns["ends_microbatch"][at] = microbatch
                columns["ends_gradient"][at] = gradients.get(name, self.sizes[1])
        else:
            columns["gradient"][at] = gradients[name]
            columns["residual1"][at] = residuals[name]
            columns[f"pending{slot}"][at] = pending.get(name, 0)
            if k:
                before = (stage - 1) % self.stages
                columns["arriving_gradient"][tick + 1, before] = self.entries[before][1][microbatch, k - 1]
            else:
                columns["ends"][tick + 1, stage] = EMBEDDING
                columns["ends_microbatch"][tick + 1, stage] = microbatch

    def program(self) -> Program:
        return Program(self.columns, *self.sizes)
