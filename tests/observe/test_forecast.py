"""Predicted values beside measured ones in the report."""

import pytest

from jaxstack.observe.report.forecast import render_forecast
from jaxstack.observe.report.series import make_series

METRICS = {
    "step_time_seconds": make_series([(1, 9.0), (10, 1.1), (20, 1.1), (30, 1.2)]),
    "peak_memory_bytes": make_series([(1, 2**30), (30, 3 * 2**30)]),
}


def test_shows_predicted_beside_measured():
    """The median step time, which the slow first step does not move, and the last peak of memory."""
    page = render_forecast({"step_time_seconds": 1.0, "peak_memory_bytes": 2 * 2**30}, METRICS)
    assert "+15.0 %" in page and "2.0 GiB" in page and "3.0 GiB" in page and "+50.0 %" in page
    assert "predicted." not in page


@pytest.mark.parametrize(("predicted", "word"), [(0.99, "longer"), (1.4, "shorter")])
def test_warns_of_a_step_time_that_is_far_off(predicted, word):
    metrics = {"step_time_seconds": make_series([(1, 1.15)])}
    assert f" % {word} than the {predicted} s that were predicted." in render_forecast(
        {"step_time_seconds": predicted}, metrics
    )


def test_other_values_are_shown_as_they_are():
    page = render_forecast({"parts": {"<b>attention": 0.25}, "layout": "fsdp 2", "step_time_seconds": True}, METRICS)
    assert "&lt;b&gt;attention" in page and "<b>attention" not in page and "fsdp 2" in page
    assert "measured" not in page.replace("Predicted and measured", "")


@pytest.mark.parametrize("forecast", [None, {}, [1.0], "soon", 3])
def test_nothing_without_a_forecast(forecast):
    assert render_forecast(forecast, METRICS) == ""
