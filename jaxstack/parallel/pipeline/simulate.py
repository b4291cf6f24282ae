"""Simulates a pipeline schedule: its time in lock-step, its bubble, and the activations that each stage holds."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxstack.parallel.pipeline.schedule import Schedule

Costs = Mapping[str, float]
"""Kind of task -> its time for a whole stage (all chunks) and one microbatch."""

COSTS: Costs = {"F": 1.0, "B": 2.0, "W": 0.0}
"""A whole backward costs two forwards."""
SPLIT_COSTS: Costs = {"F": 1.0, "B": 1.0, "W": 1.0}
"""Costs with weight gradients as tasks of their own: each half of the backward costs one forward."""


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
