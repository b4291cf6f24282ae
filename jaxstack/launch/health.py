"""Finds stuck and slow processes of a run from the progress records that they write."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from types import MappingProxyType

from jaxstack.resilience.progress_file import Record


@dataclasses.dataclass(frozen=True)
class Limits:
    """Timeouts for each phase of a run: seconds without progress after which a process counts as stuck."""

    step: float = 300.0
    """Limit between two training steps or evaluation batches."""
    start: float = 3600.0
    """Limit until the first step (reading data, restoring, compiling), and for the first evaluation."""
    save: float = 1800.0
    """Limit on a save that training waits for."""

    def timeout_of(self, record: Record, suspended: bool = False) -> float:
        """Return the timeout for the phase that a process is in; a suspended process has that of a train step."""
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
    """Return the rank that has been stuck longest, without progress for more than its timeout; None if none is.

    In a collective the other ranks wait for it, and fall silent after it.

    Args:
      records: newest progress record of each rank.
      limits: seconds of silence that are accepted.
      now: time of the monotonic clock.
      since: silence before this time does not count.
      suspended: rank -> function that returns True if it is suspended; only called beyond the limit of a step.
    """
    silent = {}
    for rank, record in records.items():
        seconds = now - max(record.at, since)
        if seconds > limits.timeout_of(record) or (seconds > limits.step and rank in suspended and suspended[rank]()):
            silent[rank] = record.at
    return min(silent, key=lambda rank: silent[rank], default=None)


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A process that slows the others down: its host seconds per step, and the median of the others."""

    rank: int
    own: float
    others: float
    step: float


def find_straggler(before: Mapping[int, Record], after: Mapping[int, Record]) -> Straggler | None:
    """Return the process whose host time per step, between two progress records, slows the others; else None.

    A step takes the same time on all ranks, as they wait for one another in collectives. They differ in the time that
    each spends on its host instead of waiting. A process is reported if it exceeds the median of the others by at least
    a tenth of a step and 2 ms.
    """
    own = {}
    pace = []
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
