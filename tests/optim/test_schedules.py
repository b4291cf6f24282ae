"""Schedules at chosen steps against closed forms."""

import math

import numpy as np
import pytest

from jaxstack.config.loader import build_component
from jaxstack.optim.schedules import SCHEDULES, Constant, Cosine, InverseSqrt, Linear, OneCycle, WarmupStableDecay

STEPS = 100


def values(schedule, steps: int = STEPS) -> np.ndarray:
    multiplier = schedule.make_multiplier(steps)
    return np.array([float(multiplier(step)) for step in range(steps)])


@pytest.mark.parametrize("kind", SCHEDULES, ids=lambda kind: kind.__name__)
def test_warm_up_is_a_line_to_the_peak(kind):
    found = values(kind(warmup_steps=10))
    assert found[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert np.isfinite(found).all() and found.max() <= 1 + 1e-6 and found.min() >= 0


@pytest.mark.parametrize("kind", SCHEDULES, ids=lambda kind: kind.__name__)
def test_extreme_lengths(kind):
    for warmup, steps in ((0, 1), (1, 1), (5, 5), (0, 2)):
        assert np.isfinite(values(kind(warmup_steps=warmup), steps)).all()


def test_constant():
    assert values(Constant()) == pytest.approx(1.0)


def test_linear():
    found = values(Linear(warmup_steps=20, final_fraction=0.5))
    assert found[20:] == pytest.approx([1 - 0.5 * step / 80 for step in range(80)])


def test_cosine():
    found = values(Cosine(warmup_steps=20, final_fraction=0.1))
    assert found[20:] == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * s / 80)) / 2 for s in range(80)], abs=1e-6)


@pytest.mark.parametrize("shape", ["linear", "sqrt"])
def test_warmup_stable_decay(shape):
    found = values(WarmupStableDecay(warmup_steps=20, decay_fraction=0.25, final_fraction=0.1, shape=shape))
    assert found[20:81] == pytest.approx(1.0)
    progress = np.arange(20) / 20
    fall = 1 - (np.sqrt(progress) if shape == "sqrt" else progress)
    assert found[80:] == pytest.approx(0.1 + 0.9 * fall, abs=1e-6)


def test_warmup_stable_decay_over_a_number_of_steps():
    """The rates before the decay are those of a longer run, so that a decay can branch from it."""
    long = values(WarmupStableDecay(warmup_steps=20, decay_steps=10), 1000)
    short = values(WarmupStableDecay(warmup_steps=20, decay_steps=10), 100)
    assert (short[:90] == long[:90]).all()
    assert short[90:] == pytest.approx(1 - np.arange(10) / 10)
    assert values(WarmupStableDecay(warmup_steps=20, decay_steps=500), 100)[20:] == pytest.approx(
        1 - np.arange(80) / 80
    )


def test_one_cycle_rises_and_falls():
    found = values(OneCycle(rise_fraction=0.3, initial_divisor=25.0, final_divisor=100.0))
    assert found[0] == pytest.approx(1 / 25) and found[30] == pytest.approx(1.0)
    assert found[15] == pytest.approx((1 + 1 / 25) / 2, abs=1e-3), "half way up a cosine"
    assert (np.diff(found[:31]) > 0).all() and (np.diff(found[30:]) < 0).all()
    assert float(OneCycle(final_divisor=100.0).make_multiplier(STEPS)(STEPS)) == pytest.approx(1 / 2500, rel=1e-3)


def test_inverse_square_root():
    found = values(InverseSqrt(warmup_steps=16))
    assert found[16:] == pytest.approx([math.sqrt(16 / (16 + s)) for s in range(84)])
    assert values(InverseSqrt(timescale=4))[12] == pytest.approx(0.5)


@pytest.mark.parametrize("settings", [{"decay_fraction": 0.25}, {"decay_steps": 20}])
def test_inverse_square_root_with_a_decay(settings):
    """The decay multiplies what the rate would be, and leaves the steps before it as in a longer run."""
    found = values(InverseSqrt(warmup_steps=20, timescale=40, final_fraction=0.1, shape="sqrt", **settings))
    before = np.sqrt(40 / (40 + np.arange(80)))
    assert found[20:80] == pytest.approx(before[:60])
    assert found[80:] == pytest.approx(before[60:] * (1 - 0.9 * np.sqrt(np.arange(20) / 20)), abs=1e-6)


def test_wrong_settings_are_refused():
    for kind, tree in (
        (Cosine, {"warmup_steps": -1}),
        (WarmupStableDecay, {"decay_fraction": 0.0}),
        (InverseSqrt, {"decay_fraction": -0.1}),
        (OneCycle, {"rise_fraction": 1.0}),
    ):
        with pytest.raises(Exception, match=next(iter(tree))):
            build_component(kind, tree)
