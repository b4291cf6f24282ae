"""Scales moved between layers change no output, and are only moved where that holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxstack.compress.after_training.calibrate import replace_weights, weights_by_path
from jaxstack.compress.solvers.awq import apply_fold, candidate_scales, find_folds
from jaxstack.models import ModelConfig
from jaxstack.models.block import Block
from jaxstack.models.layer import Context
from jaxstack.models.rope import rope_cos_sin, rope_frequencies

PLAIN = dict.fromkeys(["mlp/up_proj/kernel", "mlp/down_proj/kernel"])
GATED = {**PLAIN, "mlp/gate_proj/kernel": None}
SHAPE = {"vocab_size": 64, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 24}


def test_folds_by_the_kind_of_model():
    def sources(**changes: object) -> list[str]:
        config = ModelConfig(**{**SHAPE, **changes})
        return [fold.source for fold in find_folds(config, GATED if config.mlp == "gated" else PLAIN)]

    assert sources() == ["attention_norm", "attention/v_proj", "mlp_norm", "mlp/up_proj"]
    assert sources(num_kv_heads=1) == ["attention_norm", "mlp_norm", "mlp/up_proj"]
    assert sources(qk_norm=True) == ["attention/v_proj", "mlp_norm", "mlp/up_proj"]
    assert sources(mlp="plain") == ["attention_norm", "attention/v_proj", "mlp_norm"]


@pytest.mark.longer
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"norm": "rms_norm_unit_offset", "post_norms": True}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"norm": "layer_norm", "mlp": "plain", "qkv_bias": True, "mlp_bias": True}, marks=pytest.mark.exhaustive
        ),
    ],
)
def test_folds_change_no_output(changes: dict):
    config = ModelConfig(**{**SHAPE, **changes})
    graphdef, state = nnx.split(Block(config, config.layers()[0], nnx.Rngs(0)))
    random = np.random.default_rng(0)
    state = jax.tree.map(lambda x: x + 0.1 * jnp.asarray(random.normal(size=x.shape), jnp.float32), state)
    x = jnp.asarray(random.normal(size=(2, 5, 16)), jnp.float32)
    positions = jnp.arange(5)[None]
    angles = rope_cos_sin(positions, rope_frequencies(8, 10000.0, None))
    context = Context(positions, {"global": angles}, None, None)

    @jax.jit
    def run(state):
        return nnx.merge(graphdef, state)(x, context)[0]

    before = run(state)
    weights = weights_by_path(state)
    for fold in find_folds(config, weights):
        inputs = 24 if fold.targets == ("mlp/down_proj",) else 16
        weights |= apply_fold(weights, fold, jnp.exp(jnp.asarray(random.normal(size=inputs), jnp.float32)), config.norm)
    changed = replace_weights(state, weights)
    assert not np.allclose(weights["mlp/up_proj/kernel"], weights_by_path(state)["mlp/up_proj/kernel"])
    np.testing.assert_allclose(run(changed), before, rtol=1e-4, atol=1e-5)


def test_candidates_end_with_plain_rounding_and_grow_with_activations():
    random = np.random.default_rng(0)
    mean_abs = jnp.asarray(np.linspace(0.1, 4, 16), jnp.float32)
    w = jnp.asarray(random.choice([-1.0, 1.0], size=(8, 16)), jnp.float32)  # all weights are equally large
    candidates = np.asarray(candidate_scales(mean_abs, [w[:5], w[5:]], 8))
    assert candidates.shape == (21, 16) and (candidates[-1] == 1).all()
    np.testing.assert_allclose(candidates[:-1].max(1) * candidates[:-1].min(1), 1, rtol=1e-5)
    np.testing.assert_allclose(candidates[19] / candidates[19, 0], mean_abs / mean_abs[0], rtol=1e-5)  # r = 1
    np.testing.assert_allclose(candidates[0], 1, rtol=1e-5)  # r = 0
