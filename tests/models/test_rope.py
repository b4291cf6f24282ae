"""Rotary frequencies against formulas written down from the papers, one pair at a time."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.models import RopeScaling
from jaxstack.models.rope import apply_rope, rope_cos_sin, rope_frequencies


def test_plain_frequencies():
    assert rope_frequencies(8, 10000.0) == pytest.approx([1.0, 0.1, 0.01, 0.001])


def test_linear_scaling_divides_positions():
    scaling = RopeScaling(rope_type="linear", factor=4.0)
    assert rope_frequencies(8, 10000.0, scaling) == pytest.approx([0.25, 0.025, 0.0025, 0.00025])


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_by_wavelength(factor):
    """As Llama 3.1's reference code decides it: by comparing wavelengths with the original context."""
    scaling = RopeScaling(rope_type="llama3", factor=factor, original_max_position_embeddings=8192)
    wanted = []
    for pair in range(64):
        frequency = 500000.0 ** (-2 * pair / 128)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            wanted.append(frequency)
        elif wavelength > 8192 / 1:
            wanted.append(frequency / factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            wanted.append((1 - smooth) * frequency / factor + smooth * frequency)
    found = rope_frequencies(128, 500000.0, scaling)
    assert found == pytest.approx(wanted, rel=1e-12)
    assert len({round(f / w, 3) for f, w in zip(found, rope_frequencies(128, 500000.0), strict=True)}) > 3


def test_a_pair_is_rotated_as_a_complex_number():
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 0, 1, 100]])
    frequencies = rope_frequencies(8, 100.0)
    found = apply_rope(jnp.asarray(x), rope_cos_sin(jnp.asarray(positions), frequencies))
    turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[..., None, None] * frequencies)
    np.testing.assert_allclose(found, np.concatenate((turned.real, turned.imag), -1), atol=2e-5)


def test_angles_are_exact_at_a_million_tokens():
    positions = np.array([5, 1023, 1024, 131071, 1048575])
    frequencies = rope_frequencies(128, 500000.0)
    exact = np.exp(1j * positions[:, None] * frequencies)
    cos, sin = (np.asarray(x)[:, 0] for x in rope_cos_sin(jnp.asarray(positions), frequencies))
    assert np.abs(cos + 1j * sin - exact).max() < 1e-3
    assert np.abs(cos + 1j * sin - exact)[:2].max() < 1e-4
    plain = np.exp(1j * (positions[:, None].astype(np.float32) * frequencies.astype(np.float32)))
    assert np.abs(plain - exact).max() > 0.02  # what one product in float32 gives


def test_the_ramp_needs_a_range():
    with pytest.raises(ValueError, match="below high_freq_factor"):
        RopeScaling(rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0)
