"""The bias that balances experts: an optimizer group of its own, and what it does to the load."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.optim import AdamW, GroupRule, build_optimizer
from jaxstack.optim.build import gradient_norm, largest_overload
from tests.small_runs import make_trainer, run_steps, small_config

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


def test_norm_and_overload():
    gradients = {"router": {"kernel": jnp.full((2, 4), 0.5), "balance_bias": LOAD}}
    np.testing.assert_allclose(gradient_norm(gradients), np.sqrt(8 * 0.25))
    np.testing.assert_allclose(largest_overload(gradients), 1.5)
    assert largest_overload({"kernel": jnp.ones(3)}) is None


@pytest.mark.slow
def test_the_bias_evens_out_the_load():
    """Without any auxiliary loss, in a model whose other weights hardly learn."""
    overload = {}
    for rate in (0.0, 0.02):
        trainer = make_trainer(
            small_config(
                "model.moe={num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 16, scoring_func: sigmoid, "
                "balance_bias: true, router_aux_loss_coef: 0.0}",
                "model.num_layers=1", "optimizer.learning_rate=1e-6", f"optimizer.balance_rate={rate}",
                "train.global_batch_size=32", "train.steps=60",
            )
        )  # fmt: skip
        run_steps(trainer, 59)
        batches = trainer.batches(59)
        overload[rate] = float(trainer.train_step(next(batches)[0])["expert_overload"])
        batches.close()
    assert overload[0.02] < 0.5 * overload[0.0]
