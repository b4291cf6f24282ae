"""AdEMAMix against the paper's algorithm 1 in numpy, with its two schedules."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxstack.optim.base import RunInfo
from jaxstack.optim.optimizers import AdEMAMix


def algorithm(gradients, settings: AdEMAMix, total: int) -> list[np.ndarray]:
    m1 = m2 = v = np.zeros_like(gradients[0])
    found = []
    for t, g in enumerate(gradients, start=1):
        share = min(t / total, 1)
        alpha = settings.alpha * share
        log1 = np.log(settings.b1)
        log3 = np.log(settings.b3)
        b3 = min(np.exp(log1 * log3 / ((1 - share) * log3 + share * log1)), settings.b3)
        m1 = settings.b1 * m1 + (1 - settings.b1) * g
        m2 = b3 * m2 + (1 - b3) * g
        v = settings.b2 * v + (1 - settings.b2) * g**2
        first = m1 / (1 - settings.b1**t)
        second = v / (1 - settings.b2**t)
        found.append((first + alpha * m2) / (np.sqrt(second) + settings.eps))
    return found


@pytest.mark.parametrize("total, ramp", [(4, None), (100, 4)])
def test_directions_are_those_of_the_paper(total, ramp):
    settings = AdEMAMix(b3=0.99, ramp_steps=ramp)
    random = np.random.default_rng(0)
    gradients = [random.normal(size=5) for _ in range(8)]
    core = settings.core(RunInfo(total_steps=total))
    state = core.init(jnp.zeros(5))
    for g, wanted in zip(gradients, algorithm(gradients, settings, 4), strict=True):
        found, state = core.update(jnp.asarray(g, jnp.float32), state)
        np.testing.assert_allclose(found, wanted, rtol=2e-4)


def test_without_the_slow_momentum_it_is_adam():
    core = AdEMAMix(alpha=0.0).core(RunInfo())
    adam = optax.scale_by_adam(0.9, 0.95)
    g = jnp.array([1.0, -2.0, 0.5])
    ours, _ = core.update(g, core.init(g))
    theirs, _ = adam.update(g, adam.init(g))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_the_slow_decay_rate_rises_from_b1_to_b3():
    settings = AdEMAMix(b1=0.9, b3=0.999)
    np.testing.assert_allclose(
        [settings._b3(0.0), settings._b3(1.0), settings._b3(2.0)], [0.9, 0.999, 0.999], rtol=1e-6
    )
    half_life = np.log(0.5) / np.log(np.asarray([0.9, float(settings._b3(0.5)), 0.999]))
    assert half_life[1] == pytest.approx((half_life[0] + half_life[2]) / 2, rel=2e-3), "it rises linearly"
