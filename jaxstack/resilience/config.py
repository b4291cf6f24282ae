"""The configuration of a run's reactions to failures, and advice on the interval between checkpoints."""

import math
from typing import Literal

from pydantic import Field

from jaxstack.config.base import Component

LLAMA3_HOURS = 50_700
"""GPU-hours between two unexpected interruptions of Llama 3's training: 419 in 54 days on 16,384 GPUs (Llama Team 2024,
arXiv:2407.21783)."""


class ResilienceConfig(Component):
    """Reaction of a run to failures: limits on skipped steps and waiting, replica checks, expected failure rate."""

    max_skipped_steps: int = Field(default=10, ge=1)
    """Largest number of steps in a row that may be skipped because their loss or gradients are not finite, or spike.
    After that the run goes back to the checkpoint before them and stops with an error."""
    max_skipped_share: float = Field(default=0.05, gt=0, le=1)
    """Largest share of skipped steps among the last 1,000; with more the run stops as after max_skipped_steps."""
    spike_threshold: float | None = Field(default=None, gt=0)
    """Skip a step whose loss or gradient norm exceeds the median of the last 128 steps by more than this many standard
    deviations, e.g. 10. The deviation is estimated from the median absolute one, and is at least 1 % of the median.
    null: spikes are not skipped."""
    checksum_every_steps: int | None = Field(default=None, ge=1)
    """Compare the replicas of the state every so many steps, and before each save; a difference stops the run. null:
    never."""
    verify_layout: bool | Literal["auto"] = "auto"
    """Before a run on several devices, compare one step of a small copy of the model in the run's layout with the step
    of one device; another loss or gradient stops the run. auto: in float32, once for each program on a machine, if
    devices hold parts of the model and compiling takes at most 20 s. true: always, in the run's precision."""
    accept_data_change: bool = False
    """Resume with other data, another tokenizer, seed or batch size than the checkpoint's."""
    heartbeat_seconds: int = Field(default=10, ge=2, le=86_400)
    """Time after which a silent process counts as dead, and the other processes exit."""
    step_seconds: float | None = Field(default=None, gt=0)
    """Limit on the time of a train step, and of a batch of an evaluation: a process that takes longer is stuck, and the
    launcher names it, prints stacks, and restarts the run. null: the launcher's `--step-seconds` (300)."""
    compile_ahead: bool = False
    """Compile the step for one node fewer during the first steps of a run of `launch --nodes MIN:MAX`, in a thread of
    low priority, so that a start after a loss finds it in the compilation cache. Tried on CPUs only."""
    connect_seconds: int = Field(default=300, ge=1, le=86_400)
    """Limit on the time that the processes of a run wait for one another at its start."""
    device_hours_between_failures: float = Field(default=LLAMA3_HOURS, gt=0)
    """Expected device-hours between failures, for the advice on the checkpoint interval."""


def young_daly_seconds(save_seconds: float, failure_seconds: float) -> float:
    """Return the interval in seconds between saves that loses the least time: sqrt(2 save_seconds failure_seconds).

    See Young 1974 and Daly 2006.

    Args:
      save_seconds: time that a save delays training.
      failure_seconds: mean time between failures of the whole run.
    """
    return math.sqrt(2 * save_seconds * failure_seconds)


def advise_interval(
    every_steps: int, step_seconds: float, blocking_seconds: float, total_seconds: float, devices: int, hours: float
) -> str:
    """Return one line of advice on how often a run should save, from the cost of a save and the rate of failures.

    Args:
      every_steps: the configured interval.
      step_seconds: duration of a training step.
      blocking_seconds: time that a save delays training.
      total_seconds: time until a save is committed, the shortest useful interval.
      devices: number of devices of the run.
      hours: device-hours between failures.
    """
    between = hours * 3600 / devices
    best = max(young_daly_seconds(blocking_seconds, between), total_seconds)
    steps = max(1, round(best / step_seconds))
    present = every_steps * step_seconds
    lost = blocking_seconds / present + present / 2 / between
    least = blocking_seconds / best + best / 2 / between
    return (
        f"a save held up training for {_seconds(blocking_seconds)} and was on disk after {_seconds(total_seconds)}; "
        f"with a failure every {between / 3600:,.0f} h on {devices} device{'s' * (devices > 1)}, "
        f"checkpoint.every_steps={steps} ({_seconds(best)}) would lose least, {_percent(least)} of the time; "
        f"{every_steps} loses {_percent(lost)}"
    )


def _percent(fraction: float) -> str:
    value = 100 * fraction
    return f"{value:.0f} %" if value >= 10 else f"{value:.2g} %"


def _seconds(value: float) -> str:
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 90 else f"{value:.2g} s"
