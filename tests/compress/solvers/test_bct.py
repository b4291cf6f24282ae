"""BCT: tiles that share a power of two, their bytes, and exact integer products."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.compress.base import InputStatistics
from jaxstack.compress.config import choose_methods, load_recipe
from jaxstack.compress.matrix import compressible_weights
from jaxstack.compress.solvers.bct import Bct, BctGptq, round_tiles
from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, count_parameters, preset_config
from pallas_kernels import PackedWeight
from pallas_kernels.weight_only.formats import powers_of_two
from tests.compilation import run_jitted


def test_a_tile_takes_the_power_of_two_with_the_least_error():
    w = (np.random.default_rng(0).normal(size=(16, 24)) * np.repeat([1.0, 30.0], 8)[:, None]).astype(np.float32)
    q, exponents = run_jitted(lambda w: round_tiles(w, 4, 8), w)
    assert q.shape == w.shape and exponents.shape == (2, 3) and np.abs(q).max() <= 8
    tiles = w.reshape(2, 8, 3, 8).transpose(0, 2, 1, 3)
    for tile, exponent in zip(tiles.reshape(6, 8, 8), np.asarray(exponents).ravel(), strict=True):
        errors = {
            e: ((np.clip(np.round(tile / 2.0**e), -8, 7) * 2.0**e - tile) ** 2).sum()
            for e in range(exponent - 3, exponent + 4)
        }
        assert min(errors, key=lambda e: errors[e]) == exponent


@pytest.mark.longer
def test_the_packed_weight_has_the_values_of_the_integers():
    w = jax.random.normal(jax.random.key(1), (128, 64))
    q, exponents = round_tiles(w, 4, 64)
    packed = Bct(path=".*").compress(w, None)
    wanted = q * jnp.repeat(powers_of_two(exponents), 64, axis=0)
    np.testing.assert_array_equal(packed.matrix(), wanted)
    assert packed.stored_bytes == 128 * 64 // 2 + 2
    rows = packed.format.dense(packed.format.take_rows(packed.arrays, jnp.array([3, 100])))
    np.testing.assert_array_equal(rows, wanted[jnp.array([3, 100])])


@pytest.mark.longer
def test_tiles_need_not_be_square():
    w = jax.random.normal(jax.random.key(1), (64, 128)) * jnp.exp(jax.random.normal(jax.random.key(2), (64, 1)))
    errors = []
    for rows in (64, 8):
        packed = Bct(path=".*", tile_size=64, tile_outputs=rows).compress(w, None)
        assert isinstance(packed, PackedWeight)
        assert packed.stored_bytes == 64 * 128 // 2 + 2 * 64 // rows
        errors.append(jnp.square(packed.matrix() - w).sum())
    assert errors[1] < 0.8 * errors[0]
    method = Bct(path=".*", tile_size=64, tile_outputs=8)
    assert method.unsupported_reason(20, 128) == "tile_outputs 8 does not divide its 20 outputs; 4 does"
    assert method.unsupported_reason(8, 96) == "tile_size 64 does not divide its 96 inputs; 48 does"


@pytest.mark.longer
def test_the_sweep_lowers_the_error_of_outputs_on_the_same_tiles():
    x = jax.random.normal(jax.random.key(3), (512, 64)) @ jax.random.normal(jax.random.key(4), (64, 64))
    w = jax.random.normal(jax.random.key(5), (64, 64))
    statistics = InputStatistics(len(x), hessian=2 / len(x) * x.T @ x)
    nearest = Bct(path=".").compress(w, None)
    swept = BctGptq(path=".").compress(w, statistics)
    assert isinstance(nearest, PackedWeight) and isinstance(swept, PackedWeight)
    np.testing.assert_array_equal(swept.arrays["exponents"], nearest.arrays["exponents"])
    errors = [jnp.square(x @ (packed.matrix() - w).T).sum() for packed in (nearest, swept)]
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.longer
def test_llama3_1b_takes_less_than_an_eighth_of_its_float32_bytes():
    """Arithmetic over its shapes: 32 bits are 7.98 of ours, vectors in 8 bits included."""
    config = preset_config("llama3-1b", vocab_size=128256)
    methods = choose_methods(load_recipe("bct"), compressible_weights(config))
    weights = sum(int(np.prod(layout.size)) for layout in compressible_weights(config).values())
    assert len(methods) == len(compressible_weights(config))
    vectors = count_parameters(config).total - weights
    tiles = sum(
        int(np.prod(layout.size)) // math.prod(methods[path].format.tile)
        for path, layout in compressible_weights(config).items()
    )
    stored = 4 * weights + 8 * tiles + (8 + 8 / 64) * vectors
    assert vectors > 0
    assert 7.98 < 32 * (weights + vectors) / stored < 8


def test_tiles_that_do_not_fit_are_refused_with_the_size_that_does():
    config = ModelConfig(vocab_size=96, hidden_size=96, num_layers=1, num_heads=2, intermediate_size=160)
    with pytest.raises(ConfigError, match="tile_size 64 does not divide its 96 inputs; 48 does"):
        choose_methods(load_recipe("bct"), compressible_weights(config))
