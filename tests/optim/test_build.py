"""Optimizers built from configuration: their updates, groups by path, and the layout of their state."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxstack.errors import ConfigError
from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.attention import SoftmaxAttention
from jaxstack.optim.base import GroupRule, is_matrix
from jaxstack.optim.build import build_optimizer
from jaxstack.optim.optimizers import OPTIMIZERS, SGD, Adafactor, AdamW, Lion
from jaxstack.optim.schedules import SCHEDULES
from tests.small_runs import make_trainer, small_config

PARAMS = {
    "layers": {"kernel": jnp.linspace(-1, 1, 12).reshape(3, 4), "bias": jnp.ones(4), "scale": jnp.ones((2, 4))},
    "head": jnp.linspace(1, 2, 8).reshape(4, 2),
}


def gradients(step: int):
    random = np.random.default_rng(step)
    return jax.tree.map(lambda p: jnp.asarray(random.normal(size=p.shape), jnp.float32), PARAMS)


def train(transformation, steps: int = 5):
    update = jax.jit(transformation.update)
    params = PARAMS
    state = transformation.init(PARAMS)
    for step in range(steps):
        updates, state = update(gradients(step), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def close(a, b) -> None:
    chex.assert_trees_all_close(a, b, rtol=1e-5, atol=1e-6)


def rate(step):
    return 0.1 / (1 + jnp.asarray(step, jnp.float32))


MATRICES = {"layers": {"kernel": True, "bias": False, "scale": False}, "head": True}


def test_adamw_is_optax_adamw():
    ours, _ = train(build_optimizer(AdamW(weight_decay=0.2, b1=0.8, b2=0.9, eps=1e-6, clip_norm=None), rate, PARAMS))
    theirs, _ = train(optax.adamw(rate, 0.8, 0.9, 1e-6, weight_decay=0.2, mask=MATRICES))
    close(ours, theirs)


def test_lion_and_sgd_are_those_of_optax():
    ours, _ = train(build_optimizer(Lion(weight_decay=0.2, clip_norm=None), rate, PARAMS))
    theirs, _ = train(optax.lion(rate, 0.9, 0.99, weight_decay=0.2, mask=MATRICES))
    close(ours, theirs)
    ours, _ = train(build_optimizer(SGD(momentum=0.7, nesterov=True, clip_norm=None), rate, PARAMS))
    close(ours, train(optax.sgd(rate, 0.7, True))[0])


def test_adafactor_is_that_of_the_paper_as_optax_has_it():
    ours, _ = train(build_optimizer(Adafactor(clip_norm=None, min_dim_size_to_factor=2), rate, PARAMS))
    theirs, _ = train(optax.adafactor(rate, min_dim_size_to_factor=2, momentum=None))
    close(ours, theirs)


@pytest.mark.longer
def test_adafactor_bounds_the_update_of_each_layer_of_a_stack():
    """As of layers on their own; a row without a layer, as a pipeline's uneven stages have, changes nothing."""
    random = np.random.default_rng(0)
    stack = {"w": jnp.asarray(random.normal(size=(3, 4, 5)) * [[[0.1]], [[3.0]], [[0.0]]], jnp.float32)}
    moves = {"w": jnp.asarray(random.normal(size=(3, 4, 5)) * [[[5.0]], [[0.01]], [[0.0]]], jnp.float32)}
    layers, own = ({str(i): tree["w"][i] for i in range(3)} for tree in (stack, moves))
    settings = Adafactor(clip_norm=None, clipping_threshold=0.5)
    together = build_optimizer(settings, rate, stack, stacked={"w": True})
    apart = build_optimizer(settings, rate, layers)
    found, _ = together.update(moves, together.init(stack), stack)
    wanted, _ = apart.update(own, apart.init(layers), layers)
    close(found["w"], jnp.stack([wanted[str(i)] for i in range(3)]))
    assert float(jnp.abs(found["w"][0]).max()) != pytest.approx(float(jnp.abs(found["w"][1]).max()), rel=0.5)
    assert not found["w"][2].any()


def test_clipping_is_by_the_global_norm():
    large, _ = train(build_optimizer(SGD(momentum=0.0, clip_norm=0.5), lambda step: 1.0, PARAMS), 1)
    moved = optax.global_norm(jax.tree.map(jnp.subtract, large, PARAMS))
    assert float(moved) == pytest.approx(0.5, rel=1e-5)


def test_weight_decay_spares_vectors_unless_a_group_says_so():
    def decayed(*groups: GroupRule):
        optimizer = build_optimizer(SGD(momentum=0.0, weight_decay=0.5, groups=groups), lambda step: 0.1, PARAMS)
        zeros = jax.tree.map(jnp.zeros_like, PARAMS)
        updates, _ = optimizer.update(zeros, optimizer.init(PARAMS), PARAMS)
        return jax.tree.map(lambda u, p: float(jnp.max(jnp.abs(u / p))), updates, PARAMS)

    assert decayed()["layers"] == pytest.approx({"kernel": 0.05, "bias": 0, "scale": 0})
    found = decayed(GroupRule(path="bias|scale", weight_decay=1.0), GroupRule(path="head", weight_decay=0.0))
    assert found["layers"] == pytest.approx({"kernel": 0.05, "bias": 0.1, "scale": 0.1}) and found["head"] == 0


def test_attention_sinks_of_stacked_layers_have_no_weight_decay():
    """Unrolled they have one dim, and stacked two; training must not depend on that."""
    model = ModelConfig(
        vocab_size=16,
        hidden_size=8,
        num_layers=3,
        num_heads=2,
        attention=SoftmaxAttention(sinks=True),
        scan_layers=True,
    )
    shapes = nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: Transformer(model, nnx.Rngs(0))), nnx.Param))
    found = {"/".join(map(str, path)): leaf for path, leaf in shapes if path[-1] == "sinks"}
    assert [leaf.shape for leaf in found.values()] == [(3, 2)]
    assert not any(is_matrix(path, leaf) for path, leaf in found.items())


def test_a_frozen_group_stays_and_has_no_state():
    groups = (GroupRule(path="layers/kernel", frozen=True), GroupRule(path="layers", learning_rate_scale=0.5))
    frozen, state = train(build_optimizer(AdamW(groups=groups), rate, PARAMS))
    assert (frozen["layers"]["kernel"] == PARAMS["layers"]["kernel"]).all()
    assert float(jnp.abs(frozen["head"] - PARAMS["head"]).max()) > 0.01
    arrays = [x for x in jax.tree.leaves(state) if getattr(x, "ndim", 0)]
    trained = [PARAMS["layers"]["bias"], PARAMS["layers"]["scale"], PARAMS["head"]]
    assert sum(x.size for x in arrays) == 2 * sum(p.size for p in trained)


def test_frozen_gradients_do_not_count_in_the_norm():
    groups = (GroupRule(path="layers", frozen=True),)
    optimizer = build_optimizer(SGD(momentum=0.0, clip_norm=1.0, groups=groups), lambda step: 1.0, PARAMS)
    large = jax.tree.map(lambda p: jnp.full(p.shape, 1e6), PARAMS)
    large["head"] = jnp.full((4, 2), 0.1)
    updates, _ = optimizer.update(large, optimizer.init(PARAMS), PARAMS)
    np.testing.assert_allclose(updates["head"], -0.1, rtol=1e-5)


def test_learning_rate_scale():
    def moved(scale: float):
        groups = (GroupRule(path="head", learning_rate_scale=scale),)
        optimizer = AdamW(weight_decay=0.0, groups=groups, clip_norm=None)
        params, _ = train(build_optimizer(optimizer, lambda step: 0.01, PARAMS), 1)
        return params["head"] - PARAMS["head"]

    np.testing.assert_allclose(moved(0.25), 0.25 * moved(1.0), rtol=1e-3)
    assert float(jnp.abs(moved(0.0)).max()) == 0


def test_a_group_that_matches_nothing_is_refused():
    with pytest.raises(ConfigError, match="optimizer.groups: 'haed' matches no parameter"):
        build_optimizer(AdamW(groups=(GroupRule(path="haed", frozen=True),)), rate, PARAMS)


def every_pair():
    """All optimizers with all schedules; each schedule in the default tests, and each optimizer in the slow ones."""
    for kind in OPTIMIZERS:
        for schedule in SCHEDULES:
            other = pytest.mark.longer if schedule is SCHEDULES[0] else pytest.mark.exhaustive
            marks = () if kind is AdamW else other
            yield pytest.param(kind, schedule, marks=marks, id=f"{kind.__name__}-{schedule.__name__}")


@pytest.mark.parametrize("kind, schedule", every_pair())
def test_every_pair_lowers_a_quadratic(kind, schedule):
    """At the best of some learning rates, so that a new optimizer needs no entry here."""
    steps = 60
    optimizer = kind(weight_decay=0.0)
    multiplier = schedule(warmup_steps=5).make_multiplier(steps)

    def loss(params):
        return sum(jnp.sum((p - 0.3) ** 2) for p in jax.tree.leaves(params))

    def last_loss(peak):
        built = build_optimizer(optimizer, lambda step: peak * multiplier(step), PARAMS, total_steps=steps)

        def step(carry, _):
            params, state = carry
            gradients = jax.grad(loss)(params)
            extra = (
                {"curvature": jax.tree.map(jnp.square, gradients), "renewed": True} if built.sampled_gradient else {}
            )
            updates, state = built.update(gradients, state, params, **extra)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (PARAMS, built.init(PARAMS)), None, steps)
        return loss(params)

    losses = jax.jit(jax.vmap(last_loss))(jnp.asarray([0.03, 0.1, 0.3, 1.0]))
    assert float(jnp.nanmin(losses)) < 0.5 * float(loss(PARAMS))


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "sgd", "adafactor"])
def test_moments_lie_as_their_parameters(name):
    """Each device holds its part of the moments; factored ones are vectors, and whole."""
    extra = ["optimizer.min_dim_size_to_factor=8"] if name == "adafactor" else []
    trainer = make_trainer(small_config("parallel.fsdp=4", "parallel.tensor=2", f"optimizer.name={name}", *extra))
    held = parts = 0
    specs = {
        leaf.shape: sharding
        for leaf, sharding in zip(
            jax.tree.leaves(trainer.abstract_state.params), jax.tree.leaves(trainer.shardings.params), strict=True
        )
    }
    for leaf in jax.tree.leaves(trainer.abstract_state.optimizer):
        if leaf.shape in specs:
            assert leaf.sharding.is_equivalent_to(specs[leaf.shape], leaf.ndim)
            held += leaf.size
            parts += np.prod(leaf.sharding.shard_shape(leaf.shape))
        else:
            assert leaf.sharding.is_fully_replicated
    if name == "adafactor":
        moments = sum(leaf.size for leaf in jax.tree.leaves(trainer.abstract_state.optimizer))
        assert moments < trainer.count_parameters() / 3
    else:
        assert held > 0.99 * trainer.count_parameters() and parts < held / 6
