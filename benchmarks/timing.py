"""Timing of calls that are queued on a device: many are started and waited for together."""

import statistics
import time
from collections.abc import Callable
from typing import Any


def median_seconds(run: Callable[[], Any], wait: Callable[[Any], Any], block_seconds: float = 0.03) -> float:
    """Median over five blocks of the seconds of one call; a block has about `block_seconds`, 2 to 50 calls.

    Args:
        run: starts one call and returns its result.
        wait: returns when a result, and so all calls before it, are complete.
    """
    wait(run())
    begin = time.perf_counter()
    wait(run())
    calls = max(2, min(50, int(block_seconds / max(time.perf_counter() - begin, 1e-5))))
    samples = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(calls):
            result = run()
        wait(result)
        samples.append((time.perf_counter() - begin) / calls)
    return statistics.median(samples)
