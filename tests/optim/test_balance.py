"""The bias that balances experts: an optimizer group of its own, and what it does to the load."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxstack.models.moe.router import MoEConfig, route
from jaxstack.optim.base import GroupRule
from jaxstack.optim.build import build_optimizer, gradient_norm
from jaxstack.optim.optimizers import AdamW
from tests.small_runs import make_trainer, small_config

PARAMS = {"router": {"kernel": jnp.ones((2, 4)), "balance_bias": jnp.zeros((3, 4))}}
LOAD = jnp.array([[1.5, -0.5, 0.0, -1.0]] * 3)


def test_the_bias_moves_against_the_sign_of_the_load():
    optimizer = AdamW(
        balance_rate=0.01, clip_norm=0.1, weight_decay=0.5, groups=(GroupRule(path="router", weight_decay=1.0),)
    )
    transformation = build_optimizer(optimizer, lambda step: 0.5, PARAMS)
    state = transformation.init(PARAMS)
    updates, state = transformation.update(
        {"router": {"kernel": PARAMS["router"]["kernel"], "balance_bias": LOAD}}, state, PARAMS
    )
    np.testing.assert_allclose(updates["router"]["balance_bias"], -0.01 * jnp.sign(LOAD))
    assert not any(leaf.shape == (3, 4) for leaf in jax.tree.leaves(state)), "no moments"


def test_the_load_does_not_reach_clipping():
    def kernel_update(load):
        transformation = build_optimizer(AdamW(clip_norm=1e-3, eps=1.0), lambda step: 0.5, PARAMS)
        gradients = {"router": {"kernel": jnp.ones((2, 4)), "balance_bias": load}}
        return transformation.update(gradients, transformation.init(PARAMS), PARAMS)[0]["router"]["kernel"]

    assert (kernel_update(LOAD) == kernel_update(1e6 * LOAD)).all()


def test_a_frozen_bias_stays():
    transformation = build_optimizer(AdamW(groups=(GroupRule(path="router", frozen=True),)), lambda step: 0.5, PARAMS)
    updates, _ = transformation.update(PARAMS, transformation.init(PARAMS), PARAMS)
    assert not np.any(updates["router"]["balance_bias"])


def test_the_norm_leaves_out_the_load():
    gradients = {"router": {"kernel": jnp.full((2, 4), 0.5), "balance_bias": LOAD}}
    np.testing.assert_allclose(gradient_norm(gradients), np.sqrt(8 * 0.25))


@pytest.mark.longer
def test_the_bias_evens_out_the_load():
    """Tokens that prefer some experts by far, a new batch each step, and no other weight that learns."""
    config = MoEConfig(
        num_experts=8, num_experts_per_tok=2, scoring_func="sigmoid", balance_bias=True, router_aux_loss_coef=0.0
    )
    preference = jnp.linspace(-2, 2, 8)
    params = {"router": {"balance_bias": jnp.zeros(8)}}
    transformation = build_optimizer(AdamW(balance_rate=0.01), lambda step: 0.5, params)

    @jax.jit
    def step(params, state, key):
        logits = preference + jax.random.normal(key, (4, 256, 8))

        def loss(params):
            sums = route(config, logits, params["router"]["balance_bias"]).sums
            return sums.loss, sums.of_layers(jnp.int32(0), 1).metrics("router")["expert_overload"]

        gradients, overload = jax.grad(loss, has_aux=True)(params)
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, overload

    state = transformation.init(params)
    overloads = []
    for key in jax.random.split(jax.random.key(0), 120):
        params, state, overload = step(params, state, key)
        overloads.append(float(overload))
    assert overloads[0] > 1.0, "the fullest expert has more than twice its share"
    assert np.mean(overloads[-10:]) < 0.2


def test_a_training_step_reports_the_load_and_moves_the_bias():
    moe = "{num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, balance_bias: true}"
    trainer = make_trainer(small_config(f"model.moe={moe}", "model.num_layers=1", "optimizer.balance_rate=0.02"))
    batches = trainer.batches(0)
    metrics = trainer.train_step(next(batches)[0])
    batches.close()
    bias = trainer.state.params["decoder"]["layers"]["0"]["mlp"]["router"]["balance_bias"]
    np.testing.assert_allclose(np.abs(bias), 0.02, rtol=1e-6)
    assert metrics["expert_overload"] > 0 and metrics["grad_norm"] < 10
