"""Timing of calls that are enqueued on a device: many are started and awaited together."""

import statistics
import time
from collections.abc import Callable
from typing import Any


def median_seconds(
    run: Callable[[], Any], wait: Callable[[Any], Any], block_seconds: float = 0.03, most_calls: int = 50
) -> float:
    """Return the median over five blocks of the seconds of one call; a block has 2 to `most_calls` calls.

    Args:
        run: starts one call and returns its result.
        wait: returns when a result, and so all calls before it, are complete.
        block_seconds: a GPU lowers its clocks under load within tenths of a second; the default mostly ends before.
        most_calls: of a block.
    """
    wait(run())
    begin = time.perf_counter()
    wait(run())
    calls = max(2, min(most_calls, int(block_seconds / max(time.perf_counter() - begin, 1e-5))))
    samples = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(calls):
            result = run()
        wait(result)
        samples.append((time.perf_counter() - begin) / calls)
    return statistics.median(samples)
