"""Rotary frequencies against formulas written down from the papers, one pair at a time."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.config.loader import build_component
from jaxstack.models import ModelConfig, RopeScaling, Transformer
from jaxstack.models.rope import Rotation, apply_rope, rope_cos_sin, rope_frequencies


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


def test_the_first_channels_rotate_as_a_small_head():
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 8)).astype(np.float32)
    (rotation,) = ModelConfig(head_dim=8, rope_theta=100.0, partial_rotary_factor=0.5).rotations().values()
    angles = rope_cos_sin(jnp.arange(5)[None], rotation.frequencies())
    found = apply_rope(jnp.asarray(x), angles)
    turned = (x[..., :2] + 1j * x[..., 2:4]) * np.exp(1j * np.arange(5)[:, None, None] * np.array([1.0, 0.1]))
    np.testing.assert_allclose(found, np.concatenate((turned.real, turned.imag, x[..., 4:]), -1), atol=2e-5)


@pytest.mark.parametrize(
    ("factor", "message"), [(0.4, "0.4.*must be even"), (0.1, "must be even and not 0"), (1.5, "1")]
)
def test_a_share_of_a_head_must_be_pairs(factor, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(head_dim=8, partial_rotary_factor=factor)


def test_angles_are_exact_at_a_million_tokens():
    positions = np.array([5, 1023, 1024, 131071, 1048575])
    frequencies = rope_frequencies(128, 500000.0)
    exact = np.exp(1j * positions[:, None] * frequencies)
    cos, sin = (np.asarray(x)[:, 0] for x in rope_cos_sin(jnp.asarray(positions), frequencies))
    assert np.abs(cos + 1j * sin - exact).max() < 1e-3
    assert np.abs(cos + 1j * sin - exact)[:2].max() < 1e-4
    plain = np.exp(1j * (positions[:, None].astype(np.float32) * frequencies.astype(np.float32)))
    assert np.abs(plain - exact).max() > 0.02  # what one product in float32 gives


YARN = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=1024)


def yarn_by_channel(width: int, theta: float, factor: float, original: int, fast=32.0, slow=1.0, truncate=True):
    """Frequencies as the paper's code computes them, one pair at a time."""
    ends = []
    for turns in (fast, slow):
        wavelength = original / turns
        ends.append(width / 2 * math.log(wavelength / (2 * math.pi), theta))
    if truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], width - 1)
    high = high + 0.001 if low == high else high
    found = []
    for pair in range(width // 2):
        kept = 1 - min(max((pair - low) / (high - low), 0), 1)
        frequency = 1 / theta ** (2 * pair / width)
        found.append(frequency * kept + frequency / factor * (1 - kept))
    return found


@pytest.mark.parametrize(
    ("width", "theta", "settings"),
    [
        (128, 500000.0, dict(factor=8.0, original=8192)),  # OLMo 3
        (64, 150000.0, dict(factor=32.0, original=4096, truncate=False)),  # gpt-oss
        (64, 50000.0, dict(factor=32.0, original=4096, fast=1.0, slow=1.0)),  # Kimi K2
        (8, 100.0, dict(factor=4.0, original=16, slow=0.001)),  # both ends are beyond the channels
    ],
)
def test_yarn_divides_slow_frequencies(width, theta, settings):
    names = {"original": "original_max_position_embeddings", "fast": "beta_fast", "slow": "beta_slow"}
    named: Any = {names.get(key) or key: value for key, value in settings.items()}
    scaling = RopeScaling(rope_type="yarn", **named)
    wanted = yarn_by_channel(width, theta, **settings)
    found = rope_frequencies(width, theta, scaling)
    assert found == pytest.approx(wanted, rel=1e-12)
    assert found[0] == pytest.approx(1.0) and found[-1] < 0.75 * rope_frequencies(width, theta)[-1]


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({}, 0.1 * math.log(8) + 1),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(8) + 1) / (0.05 * math.log(8) + 1)),
        ({"mscale": 0.5}, 0.1 * math.log(8) + 1),
        ({"attention_factor": 1.5, "mscale": 1.0, "mscale_all_dim": 0.5}, 1.5),
        ({"factor": 0.5}, 1.0),
    ],
)
def test_yarn_scales_cosines_and_sines(settings, factor):
    rotation = Rotation(8, 100.0, RopeScaling(**{**YARN, **settings}))
    assert rotation.factor == pytest.approx(factor)
    cos, sin = rope_cos_sin(jnp.arange(5), rotation.frequencies(), rotation.factor)
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos**2 + sin**2, np.full((5, 1, 4), factor**2), rtol=1e-5)


def test_the_model_multiplies_scores_by_the_square_of_the_factor():
    shape = dict(vocab_size=64, hidden_size=32, num_layers=1, num_heads=4, initialization="fan_in")
    plain = ModelConfig(**shape, rope_scaling={**YARN, "attention_factor": 1.0}, query_pre_attn_scalar=8 / 1.3**4)
    scaled = ModelConfig(**shape, rope_scaling={**YARN, "attention_factor": 1.3})
    unscaled = ModelConfig(**shape, rope_scaling={**YARN, "attention_factor": 1.0})
    tokens = jax.random.randint(jax.random.key(0), (2, 20), 0, 64)
    wanted, found, other = (Transformer(c, nnx.Rngs(0))(tokens) for c in (plain, scaled, unscaled))
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert np.abs(found - other).max() > 1e-3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**YARN, "low_freq_factor": 1.0}, "rope_type yarn has the keys .* remove low_freq_factor"),
        (
            {"rope_type": "linear", "factor": 2.0, "beta_fast": 32.0},
            "linear has the keys factor; remove beta_fast",
        ),
        ({"rope_type": "llama3", "factor": 2.0, "mscale": 1.0}, "remove mscale"),
        ({"rope_type": "yarn", "factor": 2.0}, "rope_type yarn needs original_max_position_embeddings"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 64}, "factor .*required"),
        ({**YARN, "beta_slow": 40.0}, r"beta_slow \(40.0\) must be at most beta_fast \(32.0\)"),
        ({**YARN, "rope_type": "ntk"}, "'linear', 'llama3'"),
    ],
)
def test_keys_of_another_type_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**settings)


LONG = dict(
    rope_type="longrope", factor=4.0, original_max_position_embeddings=16, short_factor=[1, 1.5], long_factor=[2.0, 8.0]
)  # fmt: skip


@pytest.mark.parametrize(("length", "divisors"), [(16, [1.0, 1.5]), (17, [2.0, 8.0]), (64, [2.0, 8.0])])
def test_the_models_length_chooses_the_list_of_longrope(length, divisors):
    model = build_component(
        ModelConfig,
        dict(
            head_dim=8, partial_rotary_factor=0.5, rope_theta=100.0, rope_scaling=LONG, max_position_embeddings=length
        ),
    )
    (rotation,) = model.rotations().values()
    np.testing.assert_allclose(rotation.frequencies(), np.array([1.0, 0.1]) / divisors)
    assert rotation.factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(16)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_position_embeddings": None}, "rope_type longrope needs max_position_embeddings"),
        ({"head_dim": 16}, r"each pair of channels that rotates \(4\); found 2 and 2"),
        ({"rope_scaling": {**LONG, "long_factor": None}}, "needs long_factor"),
        ({"rope_scaling": {**LONG, "long_factor": [1.0, 0.0]}}, "long_factor.1.*greater than 0"),
        ({"rope_scaling": {**LONG, "beta_fast": 32.0}}, "remove beta_fast"),
    ],
)
def test_what_longrope_needs_is_named(changes, message):
    settings = dict(head_dim=8, partial_rotary_factor=0.5, rope_scaling=LONG, max_position_embeddings=64)
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**settings, **changes})


def test_a_factor_below_one_does_not_scale_the_cosines():
    assert RopeScaling(**{**LONG, "factor": 0.5}).angle_factor == 1
    assert RopeScaling(**LONG, attention_factor=1.5).angle_factor == 1.5


def test_a_key_that_is_null_is_left_out():
    assert RopeScaling(**YARN, low_freq_factor=None) == RopeScaling(**YARN, beta_fast=32.0, beta_slow=1, truncate=True)
    with pytest.raises(ValueError, match="rope_theta above 1"):
        ModelConfig(rope_theta=1.0, rope_scaling=YARN)


def test_the_ramp_needs_a_range():
    with pytest.raises(ValueError, match="at most high_freq_factor"):
        RopeScaling(rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=3.0)
