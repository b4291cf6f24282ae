"""Advice on how often to save checkpoints, from the time that a save takes and the rate of failures."""

import math

LLAMA3_HOURS = 50_700
"""GPU-hours between two unexpected interruptions of Llama 3's training: 419 in 54 days on 16,384 GPUs (Llama Team 2024,
arXiv:2407.21783)."""


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
