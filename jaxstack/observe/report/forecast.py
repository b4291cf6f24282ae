"""Shows the predicted speed and memory of a run beside the measured ones, with a warning where they differ much."""

import html
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxstack.observe.number_format import byte_size, short_number
from jaxstack.observe.report.series import Series
from jaxstack.observe.report.tables import row_table

WARN_ABOVE = 0.15
"""Relative difference above which a warning is shown."""


def render_forecast(forecast: object, metrics: Mapping[str, Series]) -> str:
    """Render predicted and measured step time, throughput and memory as HTML; empty without a forecast.

    Args:
      forecast: `forecast` of `environment.json`: `step_seconds`, `tokens_per_second` and `predicted_bytes`, and
        `seconds` and `memory_bytes` by part.
      metrics: the run's metrics by key.
    """
    if not isinstance(forecast, Mapping):
        return ""
    rows = []
    warnings = []
    for title, predicted, measured, show in _quantities(forecast, metrics):
        row = {"quantity": title, "predicted": show(predicted), "measured": "–", "difference": "–"}
        if measured:
            difference = measured / predicted - 1
            row |= {"measured": show(measured), "difference": f"{100 * difference:+.1f} %"}
            if abs(difference) > WARN_ABOVE:
                warnings.append(f"{title} differs from the forecast by {100 * difference:+.0f} %")
        rows.append(row)
    seconds = forecast.get("seconds")
    for name, value in seconds.items() if isinstance(seconds, Mapping) else ():
        rows.append({"quantity": f"of the step: {name.replace('_', ' ')}", "predicted": f"{short_number(value)} s"})
    if not rows:
        return ""
    warning = f'<p class="ended"><b>{html.escape("; ".join(warnings))}.</b></p>' if warnings else ""
    title = f"Forecast for {html.escape(str(forecast.get('cluster', 'this cluster')))}"
    return f'<h2>{title}</h2>{warning}<div class="card">{row_table(rows)}</div>'


def _quantities(
    forecast: Mapping[str, Any], metrics: Mapping[str, Series]
) -> list[tuple[str, float, float | None, Any]]:
    """Return (title, predicted, measured, formatter) of each predicted quantity, such as step time and memory."""
    peak = metrics.get("peak_memory_bytes")
    found = [
        ("time of a step", "step_seconds", _median(metrics, "step_time_seconds"), lambda x: f"{short_number(x)} s"),
        ("tokens per second", "tokens_per_second", _median(metrics, "tokens_per_second"), short_number),
        ("memory of a device", "predicted_bytes", None if peak is None else peak.last, byte_size),
    ]
    return [
        (title, float(forecast[key]), measured, show)
        for title, key, measured, show in found
        if isinstance(forecast.get(key), int | float) and forecast[key] > 0
    ]


def _median(metrics: Mapping[str, Series], key: str) -> float | None:
    series = metrics.get(key)
    return float(np.median(series.finite)) if series is not None and series.finite.size else None
