"""Schedule-free AdamW against Optax's: our parameters are what its evaluation parameters are."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxstack.optim.base import GroupRule
from jaxstack.optim.build import build_optimizer
from jaxstack.optim.optimizers import ScheduleFreeAdamW
from tests.compilation import run_jitted
from tests.small_runs import make_trainer, run_steps, small_config

START = {"kernel": jnp.linspace(-1, 1, 12).reshape(3, 4), "bias": jnp.ones(4)}


def gradient_of(params):
    return jax.tree.map(lambda p: jnp.sin(3 * p) + 0.3, params)


def test_parameters_are_the_averages_of_optax():
    def rate(step):
        return 0.01 * jnp.minimum((step + 1) / 4, 1.0)

    settings = ScheduleFreeAdamW(weight_decay=0.1, clip_norm=None)
    ours = build_optimizer(settings, rate, START)
    assert ours.gradient_point is not None
    inner = optax.chain(
        optax.scale_by_rms(0.95, 1e-8, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(0.1, {"kernel": True, "bias": False}),
        optax.scale_by_learning_rate(rate),
    )
    # Optax reads the rate one step late.
    theirs = optax.contrib.schedule_free(inner, lambda step: rate(step - 1), 0.9)

    def step(carry, _):
        x, state, y, their_state = carry
        point = ours.gradient_point(x, state)
        updates, state = ours.update(gradient_of(point), state, x)
        x = optax.apply_updates(x, updates)
        theirs_updates, their_state = theirs.update(gradient_of(y), their_state, y)
        moved = optax.apply_updates(y, theirs_updates)
        averaged = optax.contrib.schedule_free_eval_params(their_state, moved)
        return (x, state, moved, their_state), ((point, x), (y, averaged))

    start = (START, ours.init(START), START, theirs.init(START))
    found, wanted = run_jitted(lambda start: jax.lax.scan(step, start, length=12)[1], start)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, wanted)


def test_frozen_parameters_stay():
    settings = ScheduleFreeAdamW(groups=(GroupRule(path="bias", frozen=True),))
    optimizer = build_optimizer(settings, lambda step: 0.1, START)
    state = optimizer.init(START)
    assert optimizer.gradient_point is not None
    point = optimizer.gradient_point(START, state)
    updates, _ = optimizer.update(gradient_of(point), state, START)
    assert not updates["bias"].any() and (point["bias"] == START["bias"]).all() and updates["kernel"].any()


def test_evaluation_uses_the_averages_and_a_resumed_run_goes_on_exactly():
    settings = small_config(
        "optimizer={name: schedule_free_adamw, learning_rate: 0.02}", "schedule.name=constant", "model.num_layers=1"
    )
    trainer = make_trainer(settings)
    run_steps(trainer, 4)
    stored = jax.device_get(trainer.stored_state)
    own = [s for s in jax.tree.leaves(stored.optimizer, is_leaf=lambda s: hasattr(s, "weight_sum")) if hasattr(s, "z")]
    z = own[0].z["head"]
    x = stored.params["head"]
    assert float(np.abs(z - x).max()) > 1e-3, "the average is not the last iterate"
    again = make_trainer(settings)
    again.stored_state = jax.device_put(stored, jax.tree.map(lambda s: s.sharding, again.abstract_stored_state))
    assert run_steps(again, 3, start=4) == run_steps(trainer, 3, start=4)
