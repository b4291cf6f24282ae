"""Shows what was predicted of a run beside what was measured."""

import html
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxstack.observe.report.series import Series
from jaxstack.observe.report.tables import render_value

LARGEST_DIFFERENCE = 0.15
"""Difference between predicted and measured step time, as a fraction of the prediction, above which there is a
warning."""
_AT_THE_END = ("peak_memory_bytes", "energy_kwh", "gpu_hours", "cost")
"""Metrics that accumulate: their last value is compared, not their median."""


def render_forecast(forecast: object, metrics: Mapping[str, Series]) -> str:
    """Render a forecast as HTML: a table of predicted and measured values, and a warning; empty without a forecast.

    Args:
      forecast: numbers by the names of metrics, such as `step_time_seconds`, which are compared; other values, such as
        the parts of the step time, are shown as they are.
      metrics: the series of the run.
    """
    if not isinstance(forecast, Mapping) or not forecast:
        return ""
    rows, others = [], {}
    for key, predicted in forecast.items():
        measured = _measured(str(key), metrics)
        if measured is None or isinstance(predicted, bool) or not isinstance(predicted, int | float) or not predicted:
            others[key] = predicted
            continue
        difference = measured / predicted - 1
        size = str(key).endswith("_bytes")
        values = [render_value(int(value) if size else float(value), str(key)) for value in (predicted, measured)]
        rows.append(
            {
                "metric": str(key).removesuffix("_bytes").replace("_", " "),
                "predicted": html.unescape(values[0]),
                "measured": html.unescape(values[1]),
                "difference": f"{100 * difference:+.1f} %",
            }
        )
    body = _warning(forecast, metrics) + (render_value(rows) if rows else "")
    body += render_value(others) if others else ""
    return f'<h2>Predicted and measured</h2><div class="card">{body}</div>'


def _measured(key: str, metrics: Mapping[str, Series]) -> float | None:
    series = metrics.get(key)
    if series is None or not series.finite.size:
        return None
    return series.last if key in _AT_THE_END else float(np.median(series.finite))


def _warning(forecast: Mapping[Any, Any], metrics: Mapping[str, Series]) -> str:
    """Return a paragraph if the measured step time is far from the predicted one."""
    predicted, measured = forecast.get("step_time_seconds"), _measured("step_time_seconds", metrics)
    if not isinstance(predicted, int | float) or predicted <= 0 or measured is None:
        return ""
    difference = measured / predicted - 1
    if abs(difference) <= LARGEST_DIFFERENCE:
        return ""
    word = "longer" if difference > 0 else "shorter"
    text = (
        f"A step takes {measured:.4g} s, {100 * abs(difference):.0f} % {word} than the {predicted:.4g} s that were "
        "predicted."
    )
    hint = " Compare the parts with a profile of some steps (observe.profile_steps)."
    return f'<p class="ended"><b>{html.escape(text)}</b>{hint}</p>'
