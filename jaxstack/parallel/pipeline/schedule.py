"""Pipeline schedules as tables, made and checked without a device, and as arrays for the compiled loop.

All stages run one program and go in lock-step, as a boundary value travels by a permute in which every device takes
part. A tick therefore has one slot a kind of work (forward, then backward) instead of one task: with a single task a
tick every tick would cost the longer of the two.

Virtual stage k = chunk x stages + stage: with V chunks every device holds V pieces of the model (Narayanan et al.
2021).
"""

import dataclasses
import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

Kind = Literal["F", "B", "W"]
"""F: forward. B: backward, with zero-bubble only of the activations. W: weight gradients, with zero-bubble."""


class Task(NamedTuple):
    """Task of a pipeline schedule: forward, backward or weight-gradient pass of one microbatch through one stage."""

    kind: Kind
    microbatch: int
    chunk: int = 0


Slot = tuple[Task | None, ...]
"""The concurrent tasks, one or None for each stage."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A pipeline schedule as a table: `ticks[t][slot][stage]` is a stage's task in one of the time slots of tick t."""

    name: str
    stages: int
    chunks: int
    microbatches: int
    ticks: tuple[tuple[Slot, ...], ...]

    @property
    def splits_backward(self) -> bool:
        """True if weight gradients are separate tasks, apart from the backward pass of the activations."""
        return any(task.kind == "W" for _, _, _, task in self.tasks())

    def tasks(self) -> Iterator[tuple[int, int, int, Task]]:
        """Yield (tick, time slot in the tick, stage, task) of every task, in order of time."""
        for tick, slots in enumerate(self.ticks):
            for slot, row in enumerate(slots):
                for stage, task in enumerate(row):
                    if task is not None:
                        yield tick, slot, stage, task

    def when(self) -> dict[tuple[Kind, int, int], tuple[int, int]]:
        """Return when each task runs: (kind, microbatch, virtual stage) -> (tick, time slot in the tick)."""
        return {
            (task.kind, task.microbatch, task.chunk * self.stages + stage): (tick, slot)
            for tick, slot, stage, task in self.tasks()
        }


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return the GPipe schedule (Huang et al. 2019): all forwards, then all backwards; it keeps all activations."""
    start = microbatches + stages - 1
    return _two_slots("gpipe", stages, microbatches, chunks, start)


def one_forward_one_backward(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return the 1F1B schedule (Narayanan et al. 2019): each backward runs early, so that fewer activations are kept.

    The activations of at most 2 p - 1 microbatches are kept with p stages.
    """
    return _two_slots("1f1b", stages, microbatches, chunks, stages - 1)


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Return the interleaved schedule (Narayanan et al. 2021): 1F1B with several virtual stages per device.

    The bubble shrinks by their number.

    Raises:
      ValueError: `microbatches` is not a multiple of `stages`.
    """
    if microbatches % stages:
        raise ValueError(f"interleaved needs microbatches ({microbatches}) in multiples of the stages ({stages}).")
    return _two_slots("interleaved", stages, microbatches, chunks, stages * chunks - 1)


def zero_bubble(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return the ZB-H1 schedule (Qi et al. 2023): 1F1B with weight gradients deferred to fill the pipeline bubble.

    Every stage keeps back as many as it will have idle forward and backward slots at the end.
    """
    base = one_forward_one_backward(stages, microbatches, chunks).ticks
    idle: Slot = (None,) * stages
    waiting: list[list[Task]] = [[] for _ in range(stages)]
    ticks: list[tuple[Slot, ...]] = []
    while len(ticks) < len(base) or any(waiting):
        number = len(ticks)
        rows = base[number] if number < len(base) else (idle, idle)
        forward: list[Task | None] = list(rows[0])
        backward: list[Task | None] = list(rows[1])
        extra: list[Task | None] = list(idle)
        some_forward = any(forward)
        some_backward = any(backward)
        for stage, tasks in enumerate(waiting):
            if some_forward and number >= microbatches + stage and tasks:
                forward[stage] = tasks.pop(0)
            if task := backward[stage]:
                tasks.append(Task("W", task.microbatch, task.chunk))
            elif some_backward and number >= microbatches + 2 * (stages - 1) - stage and tasks:
                backward[stage] = tasks.pop(0)
            if number >= 3 * (stages - 1) and tasks:
                extra[stage] = tasks.pop(0)
        ticks.append((tuple(forward), tuple(backward), tuple(extra)))
    return Schedule("zero_bubble", stages, chunks, microbatches, tuple(ticks))


def forward_only(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Return a schedule of forward passes only, for evaluation."""
    forward = _forward_ticks(stages, microbatches, chunks)
    ticks = tuple((_row(stages, forward, tick),) for tick in range(1 + max(tick for tick, _ in forward)))
    return Schedule("forward_only", stages, chunks, microbatches, ticks)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}
"""Name in `parallel.pipeline_schedule` -> function of (stages, microbatches, chunks)."""


def _order(stages: int, microbatches: int, chunks: int, reverse: bool) -> list[tuple[int, int]]:
    """Return (microbatch, chunk) pairs in the order of a stage: `stages` microbatches of a chunk, then of the next."""
    if chunks == 1:
        return [(m, 0) for m in range(microbatches)]
    rounds = range(0, microbatches, stages)
    turns = [c for c in (reversed(range(chunks)) if reverse else range(chunks))]
    return [(first + i, chunk) for first in rounds for chunk in turns for i in range(stages)]


def _forward_ticks(stages: int, microbatches: int, chunks: int) -> dict[tuple[int, int], Task]:
    order = _order(stages, microbatches, chunks, reverse=False)
    # Where the last round is not full, its missing microbatches leave holes: the next chunk comes after a whole round.
    return {(i + s, s): Task("F", m, c) for s in range(stages) for i, (m, c) in enumerate(order) if m < microbatches}


def _row(stages: int, table: dict[tuple[int, int], Task], tick: int) -> Slot:
    return tuple(table.get((tick, stage)) for stage in range(stages))


def _two_slots(name: str, stages: int, microbatches: int, chunks: int, start: int) -> Schedule:
    """Return a schedule: forward passes from tick 0 on, backward passes from tick `start` on (on the last stage)."""
    forward = _forward_ticks(stages, microbatches, chunks)
    order = _order(stages, microbatches, chunks, reverse=True)
    backward = {
        (start + i + stages - 1 - s, s): Task("B", m, c) for s in range(stages) for i, (m, c) in enumerate(order)
    }
    ticks = range(1 + max(tick for tick, _ in backward))
    rows = tuple((_row(stages, forward, t), _row(stages, backward, t)) for t in ticks)
    return Schedule(name, stages, chunks, microbatches, rows)


def validate(schedule: Schedule) -> None:
    """Check that every task of a schedule occurs exactly once, after the tasks whose results it needs.

    Raises:
      ValueError: it names the first task that does not.
    """
    kinds = {task.kind for _, _, _, task in schedule.tasks()}
    when = schedule.when()
    last = schedule.stages * schedule.chunks - 1
    wanted = {(kind, m, k) for kind in kinds for m in range(schedule.microbatches) for k in range(last + 1)}
    if wanted != set(when) or len(wanted) != sum(1 for _ in schedule.tasks()):
        raise ValueError(f"{schedule.name}: tasks missing or repeated: {sorted(wanted ^ set(when))[:5]}.")
    for (kind, m, k), at in when.items():
        # A boundary value travels in the rest of its tick, so its reader is in a later one.
        needed: dict[Kind, tuple[Kind, int, int]] = {"F": ("F", m, k - 1), "B": ("B", m, k + 1), "W": ("B", m, k)}
        before = needed[kind]
        travels = kind != "W"
        if before in when and (at[0] <= when[before][0] if travels else at <= when[before]):
            raise ValueError(f"{schedule.name}: {kind}({m}, {k}) at {at} needs {before}, done at {when[before]}.")
        if kind == "B" and at <= when["F", m, k]:
            raise ValueError(f"{schedule.name}: B({m}, {k}) at {at} comes before its forward at {when['F', m, k]}.")


Costs = Mapping[str, float]
"""Kind of task -> its time for a whole stage (all chunks) and one microbatch."""

COSTS: Costs = {"F": 1.0, "B": 2.0, "W": 0.0}
"""A whole backward costs two forwards."""
SPLIT_COSTS: Costs = {"F": 1.0, "B": 1.0, "W": 1.0}
"""Costs with weight gradients as separate tasks: each half of the backward costs one forward."""


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Simulated time and memory of a pipeline schedule; the unit of time is by default one forward of a stage."""

    makespan: float
    ideal: float
    """Time of the work of one stage, without waiting."""
    spans: tuple[tuple[int, float, float, str, int, int], ...]
    """(stage, start, end, kind, microbatch, chunk) of every task."""
    in_flight: tuple[int, ...]
    """Maximum number of microbatches (of one chunk each) with saved activations, for each stage."""
    waiting: tuple[int, ...]
    """Maximum number of microbatches whose weight gradients are pending, for each stage."""

    @property
    def bubble(self) -> float:
        """Pipeline bubble: a stage's waiting time / its working time; (stages - 1) / microbatches for 1F1B."""
        return self.makespan / self.ideal - 1.0

    @property
    def efficiency(self) -> float:
        """Fraction of the total time in which a stage works."""
        return self.ideal / self.makespan


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Return simulated time and memory of a pipeline schedule; each time slot lasts as long as its longest task."""
    costs = costs or (SPLIT_COSTS if schedule.splits_backward else COSTS)
    cost = {kind: value / schedule.chunks for kind, value in costs.items()}
    clock = 0.0
    spans = []
    live = [0] * schedule.stages
    peak = [0] * schedule.stages
    late = [0] * schedule.stages
    most = [0] * schedule.stages
    for slots in schedule.ticks:
        for row in slots:
            for stage, task in enumerate(row):
                if task is None:
                    continue
                spans.append((stage, clock, clock + cost[task.kind], *task))
                live[stage] += {"F": 1, "B": -1, "W": 0}[task.kind]
                late[stage] += {"F": 0, "B": 1, "W": -1}[task.kind]
                peak[stage] = max(peak[stage], live[stage])
                most[stage] = max(most[stage], late[stage])
            clock += max((cost[task.kind] for task in row if task is not None), default=0.0)
    work = sum(cost[kind] for _, _, _, kind, _, _ in spans) / schedule.stages
    split = schedule.splits_backward
    return Simulation(clock, work, tuple(spans), tuple(peak), tuple(most) if split else (0,) * schedule.stages)


def describe_schedule(schedule: Schedule) -> dict[str, Any]:
    """Describe a pipeline schedule as plain JSON for a run's files: bubble, memory, and the time span of each task."""
    found = simulate(schedule)
    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "virtual_stages": schedule.chunks,
        "microbatches": schedule.microbatches,
        "bubble_of_work": round(found.bubble, 6),
        "efficiency": round(found.efficiency, 6),
        "peak_microbatches_held": list(found.in_flight),
        "peak_weight_gradients_waiting": list(found.waiting),
        "spans": [[s, round(a, 4), round(b, 4), kind, m, c] for s, a, b, kind, m, c in found.spans],
    }


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
