"""The comparison of optimizers: which runs it makes, and what it reports."""

import math

import jax
import jax.numpy as jnp
import pytest

from benchmarks.tuning.optimizers import COARSE, next_run, set_rate, summarize, with_rate_as_value
from jaxstack.optim.build import build_optimizer
from jaxstack.optim.optimizers import OPTIMIZERS


def runs_until_done(loss_of, seeds=2):
    losses = {}
    while (key := next_run(losses, seeds)) is not None:
        assert key not in losses
        losses[key] = loss_of(*key)
    return list(losses)


def test_every_optimizer_has_the_same_number_of_runs():
    found = runs_until_done(lambda power, seed: abs(power - 2))
    assert found == [*((power, 0) for power in COARSE), (0, 0), (2, 0), (2, 1), (2, 2)]
    at_the_edge = runs_until_done(lambda power, seed: -power)
    assert at_the_edge[4:] == [(2, 0), (4, 0), (4, 1), (4, 2)]
    assert len(runs_until_done(lambda power, seed: math.inf)) == len(found), "also if all of them diverge"


def row_of(name, seed, losses, power=0):
    curve = [[10 * k + 1, 100 * k, 0.5 * k, loss] for k, loss in enumerate(losses)]
    return {
        "optimizer": name, "power": power, "seed": seed, "rate": 0.1, "final_loss": losses[-1], "eval_loss": losses[-1],
        "milliseconds": 50.0, "state_bytes": 8, "parameters": 1, "tokens": curve[-1][1], "curve": curve,
        "work": "w", "device": "cpu", "commit": "c", "date": "d",
    }  # fmt: skip


def test_steps_to_the_loss_are_those_of_the_mean_curve():
    slow = [6.0 - 0.2 * k for k in range(21)]
    fast = [6.0 - 0.4 * min(k, 10) for k in range(21)]
    rows = [row_of("adamw", seed, [x + seed for x in slow]) for seed in (1, 2)]
    rows += [row_of("muon", seed, [x + seed for x in fast]) for seed in (1, 2)]
    rows += [row_of("sgd", 1, [7.0] * 21), row_of("adamw", 0, slow)]
    base, first, last = summarize(rows)
    assert (base["optimizer"], first["optimizer"], last["optimizer"]) == ("adamw", "muon", "sgd")
    assert base["steps_to_loss"] == base["steps"] == 201 and base["final_loss"] == pytest.approx(3.6)
    assert first["steps_to_loss"] == 111 and first["seconds_to_loss"] == 5.5
    assert last["steps_to_loss"] is None and last["seconds_to_loss"] is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.model_fields["name"].default)
def test_a_rate_as_a_value_is_the_rate_of_the_schedule(kind):
    params = {"layer": {"kernel": jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)}}
    gradients = [jax.tree.map(lambda p, s=s: jnp.cos(3.0 * p + s), params) for s in (1.0, 2.0)]

    def steps(optimizer, prepare=lambda state: state):
        state = prepare(optimizer.init(params))
        p = params
        extra = {"curvature": gradients[0], "renewed": True} if optimizer.sampled_gradient else {}
        for gradient in gradients:
            updates, state = optimizer.update(gradient, state, p, **extra)
            p = jax.tree.map(jnp.add, p, updates)
        return p

    def schedule(step):
        return jnp.float32(1.0) - 0.1 * step

    plain = build_optimizer(kind(weight_decay=0.1), lambda step: 0.01 * schedule(step), params, total_steps=2)
    scaled = build_optimizer(with_rate_as_value(kind(weight_decay=0.1)), schedule, params, total_steps=2)
    wanted = steps(plain)
    found = steps(scaled, lambda state: set_rate(state, 0.01))
    assert jnp.allclose(wanted["layer"]["kernel"], found["layer"]["kernel"], atol=1e-6)
