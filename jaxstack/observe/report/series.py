"""Reads `metrics.jsonl` into series of values over steps, and downsamples a series without losing its peaks."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Series:
    """A metric's values over steps, as two float64 arrays of one length; NaN where unknown or not finite."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def finite(self) -> np.ndarray:
        """The finite values, which can be drawn."""
        return self.values[np.isfinite(self.values)]

    @property
    def last(self) -> float | None:
        """The last known value."""
        return float(self.finite[-1]) if self.finite.size else None

    def scaled(self, factor: float) -> "Series":
        """Return the series with all values multiplied by `factor`."""
        return Series(self.steps, self.values * factor)


def make_series(points: Iterable[tuple[Any, Any]]) -> Series:
    """Make a series of (step, value) pairs, in the order of the steps; values that are not numbers become NaN."""
    pairs = [(_number(step), _number(value)) for step, value in points]
    array = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    array = array[np.isfinite(array[:, 0])]
    array = array[np.argsort(array[:, 0], kind="stable")]
    values = np.where(np.isfinite(array[:, 1]), array[:, 1], np.nan)
    return Series(array[:, 0], values)


def read_metrics(path: str | Path) -> dict[str, Series]:
    """Read the series of each metric in a metrics file. Lines that are not a JSON object with a step are skipped.

    Empty if the file is missing. A line without a key adds nothing to the key's series.
    """
    points: dict[str, list[tuple[Any, Any]]] = {}
    if not Path(path).is_file():
        return {}
    with Path(path).open("rb") as lines:
        for line in lines:
            try:
                record = json.loads(line)
                step = record["step"]
            except (ValueError, KeyError, TypeError):
                continue
            for key, value in record.items():
                if key != "step":
                    points.setdefault(key, []).append((step, value))
    series = {key: make_series(pairs) for key, pairs in points.items()}
    return {key: found for key, found in series.items() if found.steps.size}


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return float("nan")
    try:
        return float(value)
    except OverflowError:
        return float("nan")


def downsample(series: Series, buckets: int = 400) -> Series:
    """Downsample a series: keep the smallest and the largest value of each of `buckets` ranges of steps.

    The first and the last point are kept. A bucket without a known value keeps one gap.
    """
    count = series.steps.size
    if count <= 2 * buckets:
        return series
    first = series.steps[0]
    last = series.steps[-1]
    bucket = np.minimum((series.steps - first) / max(last - first, 1e-12) * buckets, buckets - 1).astype(int)
    starts = np.flatnonzero(np.r_[True, bucket[1:] != bucket[:-1]])
    kept = {0, count - 1}
    for start, end in zip(starts, np.r_[starts[1:], count], strict=True):
        values = series.values[start:end]
        if np.isnan(values).all():
            kept.add(int(start))
        else:
            kept |= {int(start + np.nanargmin(values)), int(start + np.nanargmax(values))}
    chosen = np.array(sorted(kept))
    return Series(series.steps[chosen], series.values[chosen])


def smooth(series: Series, parts: int = 40) -> Series:
    """Smooth a series by a centred moving average over 1/`parts` of its points; gaps stay and are not counted.

    Towards the ends the window narrows equally on both sides, so that the curve neither lags nor leads.
    """
    known = np.isfinite(series.values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, series.values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    index = np.arange(series.values.size)
    half = np.minimum(series.values.size // (2 * parts), np.minimum(index, index[::-1]))
    first = index - half
    last = index + half + 1
    means = (sums[last] - sums[first]) / np.maximum(counts[last] - counts[first], 1)
    return Series(series.steps, np.where(known, means, np.nan))
