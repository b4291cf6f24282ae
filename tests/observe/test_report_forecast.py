"""The report's table of predicted and measured values."""

from jaxstack.observe.report.panels import render_forecast
from jaxstack.observe.report.series import make_series

FORECAST = {
    "cluster": "1 x 8 H200",
    "step_seconds": 0.5,
    "seconds": {"matmul": 0.4, "bubble": 0.1},
    "tokens_per_second": 1000.0,
    "predicted_bytes": 2**30,
}


def metrics(step_seconds):
    pairs = [(step, step_seconds) for step in (1, 2, 3)]
    return {"step_time_seconds": make_series(pairs), "tokens_per_second": make_series([(1, 1000.0)])}


def test_small_differences_are_shown_without_a_warning():
    page = render_forecast(FORECAST, metrics(0.55))
    assert "Forecast for 1 x 8 H200" in page and "+10.0 %" in page and "matmul" in page and "1.0 GiB" in page
    assert "differs from the forecast" not in page


def test_differences_above_fifteen_percent_are_warned_of():
    assert "time of a step differs from the forecast by +20 %" in render_forecast(FORECAST, metrics(0.6))
    assert "by -20 %" in render_forecast(FORECAST, metrics(0.4))


def test_no_forecast_and_no_metrics():
    assert render_forecast(None, {}) == "" and render_forecast({}, {}) == ""
    assert "–" in render_forecast(FORECAST, {})
