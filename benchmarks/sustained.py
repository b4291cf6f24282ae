"""Sustained speed: the time of a step once the GPU has lowered its clock, beside the time in the first seconds.

Under matmuls a GPU reaches its power limit and lowers its clock, over ten seconds or more. A short measurement is
therefore faster than training is. `measure_blocks` runs steps for `seconds`, and reports both.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.clocks import GpuClocks

SECONDS = 30.0
"""Default length of a measurement."""
BLOCK_SECONDS = 2.0
"""Length of a block of steps that is enqueued at once. After each block the device is idle for a moment."""
START_SECONDS = 4.0
"""Blocks that end within this time are the start."""
SETTLED_FRACTION = 0.5
"""Part of the measurement after which the clock counts as settled."""


@dataclass(frozen=True)
class Block:
    """Steps that were timed together: when they ended, after the measurement's start, and the seconds of a step."""

    end: float
    step_seconds: float


def block_steps(step_seconds: float, seconds: float = SECONDS) -> int:
    """Return the number of steps in a block, at most an eighth of the measurement long, for a step of this length."""
    return max(1, min(500, int(min(BLOCK_SECONDS, seconds / 8) / max(step_seconds, 1e-6))))


def measure_blocks(
    run_steps: Callable[[int], None],
    steps: int,
    seconds: float = SECONDS,
    elapsed: Callable[[float], float] = lambda passed: passed,
) -> dict[str, float]:
    """Repeat blocks of steps for at least `seconds` and summarise them.

    Args:
        run_steps: Runs this number of steps and returns when the device has completed them.
        steps: Steps of a block.
        seconds: Length of the measurement; at least three blocks are run.
        elapsed: Maps the seconds that passed in this process to a number on which all processes of the job agree, so
            that all of them run the same number of blocks.

    Returns:
        The fields of `summarize_blocks`, and where the GPUs' clocks can be read `sm_mhz` and `watts` (mean power of one
        GPU) of the settled part.
    """
    began = time.perf_counter()
    blocks = []
    clocks = None
    while len(blocks) < 3 or elapsed(blocks[-1].end) < seconds:
        if clocks is None and blocks and elapsed(blocks[-1].end) >= SETTLED_FRACTION * seconds:
            clocks = GpuClocks()
            clocks.__enter__()
        before = time.perf_counter()
        run_steps(steps)
        now = time.perf_counter()
        blocks.append(Block(now - began, (now - before) / steps))
    if clocks is not None:
        clocks.__exit__(None, None, None)
    return {**summarize_blocks(blocks), **(clocks.row if clocks else {})}


def summarize_blocks(blocks: list[Block]) -> dict[str, float]:
    """Return `milliseconds` of a step once settled, `start_milliseconds`, and `measured_seconds`; times are medians."""
    total = blocks[-1].end
    settled = [block.step_seconds for block in blocks if block.end > SETTLED_FRACTION * total]
    start = [block.step_seconds for block in blocks if block.end <= START_SECONDS] or [blocks[0].step_seconds]
    return {
        "milliseconds": 1e3 * median(settled),
        "start_milliseconds": 1e3 * median(start),
        "measured_seconds": total,
    }


def energy_fields(row: Mapping[str, Any], devices: int) -> dict[str, float]:
    """Return `joules_per_step` of all devices, where the row has the power of one."""
    return {"joules_per_step": row["watts"] * devices * row["milliseconds"] / 1e3} if "watts" in row else {}
