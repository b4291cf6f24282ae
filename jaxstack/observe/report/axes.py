"""Ranges and ticks of chart axes."""

import math
from dataclasses import dataclass

import numpy as np

from jaxstack.observe.number_format import short_number


@dataclass(frozen=True)
class Axis:
    """An axis of a chart from `low` to `high`, linear or logarithmic."""

    low: float
    high: float
    log: bool
    ticks: tuple[float, ...]

    def position(self, values: np.ndarray) -> np.ndarray:
        """Return the positions of values along the axis, 0 at `low` and 1 at `high`."""
        if self.log:
            low = math.log10(self.low)
            high = math.log10(self.high)
            return (np.log10(values) - low) / (high - low)
        return (values - self.low) / (self.high - self.low)

    def labelled_ticks(self) -> list[tuple[float, str]]:
        """Return (position, label) of every tick, with as few digits as distinguish the ticks."""
        ticks = np.array(self.ticks)
        gap = float(np.min(np.diff(ticks))) if ticks.size > 1 else abs(float(ticks[0])) or 1.0
        digits = next((d for d in range(1, 8) if np.all(_rounding_errors(ticks, d) <= 0.02 * gap)), 8)
        labels = (short_number(tick, digits) for tick in self.ticks)
        return [(float(p), label) for p, label in zip(self.position(ticks), labels, strict=True)]


def _rounding_errors(values: np.ndarray, digits: int) -> np.ndarray:
    """Return the errors of rounding each value to `digits` significant digits."""
    return np.array([abs(float(f"{value:.{digits - 1}e}") - value) for value in values])


def value_axis(values: np.ndarray, scale: str = "auto", from_zero: bool = False) -> Axis:
    """Return the vertical axis of a chart of these values.

    Args:
      values: known values, finite.
      scale: "linear", "log", or "auto": logarithmic if all values are positive, their ratio exceeds 30, and
        `from_zero` is not set.
      from_zero: let a linear axis begin at zero.
    """
    low = float(np.min(values))
    high = float(np.max(values))
    log = low > 0 and (scale == "log" or (scale == "auto" and not from_zero and high / low > 30))
    if log:
        low, high = (low / 1.1, high * 1.1) if high / low < 1.01 else (low, high * (high / low) ** 0.03)
        return Axis(low, high, True, log_ticks(low, high))
    if from_zero:
        low = min(low, 0.0)
        high = max(high, 0.0)
    span = high - low or abs(high) or 1.0
    bottom = low if from_zero and low == 0 else low - 0.05 * span
    top = high if from_zero and high == 0 and low < 0 else high + 0.05 * span
    return Axis(bottom, top, False, linear_ticks(bottom, top))


def step_axis(low: float, high: float) -> Axis:
    """Return the horizontal axis of a chart over steps, without margins; a single step is in the middle."""
    if high <= low:
        low, high = low - 1, low + 1
        return Axis(low, high, False, (low + 1,))
    ticks = linear_ticks(low, high, 6)
    whole = tuple(tick for tick in ticks if tick == round(tick))
    return Axis(low, high, False, whole or ticks)


def linear_ticks(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    """Return about `count` round ticks between `low` and `high`, spaced by 1, 2, 2.5 or 5 times a power of ten."""
    raw = (high - low) / count
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(float(f"{index * step:.12g}") for index in range(first, last + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return about three to six round numbers between `low` and `high` as ticks of a logarithmic axis.

    These are powers of ten; if fewer than three, 1 and 3 times powers of ten; then 1, 2 and 5 times; if still fewer,
    the ticks of a linear axis.
    """
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    for factors in ((1,), (1, 3), (1, 2, 5)):
        ticks = [f * 10.0**e for e in range(first, last + 1) for f in factors if low <= f * 10.0**e <= high]
        if len(ticks) >= 3:
            return tuple(ticks[:: math.ceil(len(ticks) / 6)])
    return linear_ticks(low, high)
