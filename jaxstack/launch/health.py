"""What the progress of the processes says: who is stuck, and who holds the others up. Plain functions of records."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxstack.resilience.progress_file import Record


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds without a sign of life after which a process counts as stuck."""

    step: float = 300.0
    """Between two training steps or evaluation batches."""
    start: float = 3600.0
    """Until the first step: reading data, restoring, compiling; the same holds for the first evaluation."""
    save: float = 1800.0
    """In a save that the training waits for."""

    def of(self, record: Record, suspended: bool = False) -> float:
        """The limit that holds for what a process is at; for a suspended one, which is at nothing, that of a step."""
        if record.phase == "train" or suspended:
            return self.step
        return self.save if record.phase in ("save", "end") else self.start


def find_stuck(
    records: Mapping[int, Record],
    limits: Limits,
    now: float,
    since: float = -math.inf,
    suspended: Mapping[int, Callable[[], bool]] = MappingProxyType({}),
) -> int | None:
    """The rank that is stuck: of those beyond their limit the one that fell silent first; None where all go on.

    In a collective the others wait for it and fall silent after it. Silence before `since` does not count. `suspended`
    tells whether a rank is, and is asked beyond the limit of a step only.
    """
    silent = {}
    for rank, record in records.items():
        seconds = now - max(record.at, since)
        if seconds > limits.of(record) or (seconds > limits.step and rank in suspended and suspended[rank]()):
            silent[rank] = record.at
    return min(silent, key=lambda rank: silent[rank], default=None)


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A process that holds the others up: seconds a step on its own host, beside the median of the others."""

    rank: int
    own: float
    others: float
    step: float


def find_straggler(before: Mapping[int, Record], after: Mapping[int, Record]) -> Straggler | None:
    """The process whose own part of a step was so long between two looks that it must have cost the others time.

    Steps take the same time on all ranks, as they wait for one another in collectives; what tells them apart is the
    time that each spends on its host instead of waiting. More than a tenth of a step over the median is told.
    """
    own, pace = {}, []
    for rank, now in after.items():
        past = before.get(rank)
        if past is None or past.phase != "train" or now.phase != "train" or now.step - past.step < 3:
            return None
        steps = now.step - past.step
        own[rank] = (now.own_seconds - past.own_seconds) / steps
        pace.append((now.at - past.at) / steps)
    if len(own) < 2:
        return None
    slowest = max(own, key=lambda rank: own[rank])
    others = statistics.median(value for rank, value in own.items() if rank != slowest)
    step = statistics.median(pace)
    if own[slowest] - others < max(0.1 * step, 0.002):
        return None
    return Straggler(slowest, own[slowest], others, step)
