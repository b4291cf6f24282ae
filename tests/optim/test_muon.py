"""Muon: its iteration against singular values, which dims are a matrix, and who else is moved by AdamW."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.linear import Linear
from jaxstack.optim.base import MatrixShapeRule
from jaxstack.optim.build import build_optimizer
from jaxstack.optim.optimizers import AdamW, Muon
from jaxstack.optim.optimizers.muon import orthogonalise
from tests.small_runs import make_trainer, run_steps, small_config


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def update_of(path: str, gradient: jax.Array, **settings) -> np.ndarray:
    """The first update, of one parameter, with a learning rate of -1."""
    optimizer = build_optimizer(Muon(clip_norm=None, weight_decay=0.0, **settings), lambda step: -1.0, {path: gradient})
    updates, _ = optimizer.update({path: gradient}, optimizer.init({path: gradient}), {path: gradient})
    return np.asarray(updates[path])


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_singular_values_become_equal_and_singular_vectors_stay(shape):
    x = normal(*shape)
    u, _, v = np.linalg.svd(x, full_matrices=False)
    found = u.T @ np.asarray(orthogonalise(x)) @ v.T
    values = np.diag(found)
    assert values.min() > 0.65 and values.max() < 1.25
    np.testing.assert_allclose(found, np.diag(values), atol=2e-4)


@pytest.mark.longer
def test_the_iteration_is_that_of_optax():
    tree = {"x": normal(3, 16, 24)}
    dims = {"x": optax.contrib.MuonDimensionNumbers(1, 2)}
    theirs = optax.contrib.scale_by_muon(nesterov=False, weight_dimension_numbers=dims)
    wanted = theirs.update(tree, theirs.init(tree))[0]["x"]
    np.testing.assert_allclose(orthogonalise(tree["x"]), wanted, atol=1e-5)
    rounded = orthogonalise(tree["x"], dtype=jnp.bfloat16)
    assert 1e-4 < float(jnp.linalg.norm(rounded - wanted) / jnp.linalg.norm(wanted)) < 0.05


def test_an_update_is_as_large_as_asked_and_does_not_depend_on_the_gradients_size():
    gradient = normal(64, 256)
    update = update_of("kernel", gradient)
    assert float(np.sqrt(np.mean(update**2))) == pytest.approx(0.2, rel=0.15)
    np.testing.assert_allclose(update_of("kernel", 1000 * gradient), update, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(update_of("kernel", gradient, rms=0.1), update / 2, rtol=1e-5)
    assert not update_of("kernel", jnp.zeros((4, 8))).any()


def test_momentum_is_nesterovs():
    params = {"kernel": jnp.zeros((8, 16))}
    optimizer = build_optimizer(Muon(clip_norm=None, momentum=0.5, weight_decay=0.0), lambda step: -1.0, params)
    first = normal(8, 16, seed=1)
    second = normal(8, 16, seed=2)
    _, state = optimizer.update({"kernel": first}, optimizer.init(params), params)
    updates, _ = optimizer.update({"kernel": second}, state, params)
    wanted = orthogonalise(second + 0.5 * (second + 0.5 * first)) * 0.2 * 4
    np.testing.assert_allclose(updates["kernel"], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.longer
def test_heads_are_one_side_and_layers_and_experts_count_matrices():
    stacked = normal(3, 8, 4, 2)
    found = update_of("attention/q_proj/kernel", stacked)
    for layer in range(3):
        alone = update_of("up/kernel", stacked[layer].reshape(8, 8)).reshape(8, 4, 2)
        np.testing.assert_allclose(found[layer], alone, rtol=1e-4, atol=1e-5)
    out = update_of("attention/o_proj/kernel", normal(4, 2, 8))
    np.testing.assert_allclose(
        out, update_of("up/kernel", normal(4, 2, 8).reshape(8, 8)).reshape(4, 2, 8), rtol=1e-4, atol=1e-5
    )
    experts = normal(2, 3, 8, 16)
    np.testing.assert_allclose(
        update_of("mlp/up_proj/kernel", experts)[1, 2], update_of("kernel", experts[1, 2]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    "mixer",
    [
        {"attention": {"name": "latent", "q_lora_rank": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 8}, "head_dim": 72},
        {"layer_types": ("ssd",)},
    ],
    ids=["latent", "ssd"],
)
def test_the_sides_of_a_matrix_are_the_dims_of_its_layer(mixer):
    config = ModelConfig(vocab_size=16, hidden_size=32, num_layers=1, num_heads=4, **mixer)
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    layers = {"/".join(map(str, path)): x for path, x in nnx.iter_modules(model) if isinstance(x, Linear)}
    rules = {path: Muon().rule(f"{path}/kernel") for path in layers}
    sides = {path: (rule.inputs, rule.outputs) for path, rule in rules.items()}
    assert sides == {path: (x.contracted, x.kernel.ndim - x.contracted) for path, x in layers.items()}


@pytest.mark.longer
def test_embeddings_head_and_vectors_are_moved_by_adamw_and_what_rules_say():
    params = {
        "embedding": {"table": normal(8, 4)},
        "head": normal(4, 8),
        "kernel": normal(4, 6),
        "bias": normal(2, 4),
        "filter": normal(2, 3, 4, 5),
    }
    rules = (MatrixShapeRule(path="filter", inputs=3),)
    settings = {"clip_norm": None, "weight_decay": 0.0}

    def step(optimizer):
        built = build_optimizer(optimizer, lambda step: -1.0, params)
        return built.update(params, built.init(params), params)[0]

    adamw = step(AdamW(**settings))
    found = step(Muon(matrices=rules, **settings))
    for name in ("embedding", "head", "bias"):
        chex.assert_trees_all_equal(found[name], adamw[name])
    assert float(jnp.abs(found["kernel"] - adamw["kernel"]).max()) > 0.1
    flat = update_of("kernel", params["filter"].reshape(24, 5)).reshape(2, 3, 4, 5)
    np.testing.assert_allclose(found["filter"], flat, rtol=1e-4, atol=1e-5)
    everything = step(Muon(matrices=(MatrixShapeRule(path=".*", adamw=True),), **settings))
    chex.assert_trees_all_equal(everything, adamw)


@pytest.mark.parametrize(
    "rule, said",
    [
        (MatrixShapeRule(path="kernal"), "optimizer.matrices: 'kernal' matches no parameter"),
        (
            MatrixShapeRule(path="kernel", outputs=2),
            r"1 \+ 2 dims for a matrix, but kernel has the shape \(4, 6\); lower",
        ),
    ],
)
def test_rules_that_do_not_fit_are_refused(rule, said):
    with pytest.raises(ConfigError, match=said):
        build_optimizer(Muon(matrices=(rule,)), lambda step: 1.0, {"kernel": jnp.zeros((4, 6))})


def test_a_language_model_learns_and_state_is_one_moment_a_hidden_weight():
    trainer = make_trainer(small_config("optimizer={name: muon, learning_rate: 0.01}", "train.global_batch_size=16"))
    losses = run_steps(trainer, 10)
    assert losses[-1] < losses[0] - 0.3
    held = sum(x.size for x in jax.tree.leaves(trainer.abstract_state.optimizer))
    hidden = sum(x.size for x in jax.tree.leaves(trainer.abstract_state.params["decoder"]))
    assert hidden < held < 1.1 * (2 * trainer.count_parameters() - hidden)


def test_an_iteration_sums_the_gram_matrices_and_gathers_nothing():
    """Also of matrices whose shorter side is in parts as they are stored."""
    trainer = make_trainer(
        small_config("optimizer.name=muon", "parallel.fsdp=4", "parallel.tensor=2", "train.global_batch_size=8")
    )
    program = trainer.compile(trainer.peek_batch()).as_text()
    bodies = re.findall(r"^%\S*region\S* \(.*?^}", program, re.M | re.S)
    collectives = [re.findall(r" (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(", body) for body in bodies]
    iterations = [found for found, body in zip(collectives, bodies, strict=True) if "newton_schulz" in body and found]
    assert len(iterations) >= 7 and all(found == ["all-reduce"] for found in iterations), iterations
