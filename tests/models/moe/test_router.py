"""Routing: who is chosen with what weight, capacity, and the losses against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxstack.models.moe.router import MoEConfig, balance_loss, capacity, drop_overflow, load_signal, route

B = 3
T = 20
E = 6
K = 2
LOGITS = np.random.default_rng(0).normal(size=(B, T, E)).astype(np.float32)


def config(**values) -> MoEConfig:
    return MoEConfig(**{"num_experts": E, "num_experts_per_tok": K, "router_aux_loss_coef": 0.0, **values})


def softmax(x):
    return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def chosen(ranked):
    return np.argsort(-ranked, axis=-1, kind="stable")[..., :K]


def test_softmax_over_all_with_and_without_normalisation():
    scores = softmax(LOGITS)
    experts = chosen(scores)
    kept = np.take_along_axis(scores, experts, -1)
    plain = route(config(norm_topk_prob=False), jnp.asarray(LOGITS), None)
    assert (plain.experts == experts).all()
    np.testing.assert_allclose(plain.weights, kept, rtol=1e-5)
    normalised = route(config(), jnp.asarray(LOGITS), None)
    # As Mixtral has it: the softmax over the chosen logits.
    np.testing.assert_allclose(normalised.weights, softmax(np.take_along_axis(LOGITS, experts, -1)), rtol=1e-5)


def test_sigmoid_scores_with_a_bias_that_only_chooses():
    bias = np.array([3.0, 0, 0, 0, 0, -3.0], np.float32)
    scores = 1 / (1 + np.exp(-LOGITS))
    experts = chosen(scores + bias)
    kept = np.take_along_axis(scores, experts, -1)
    found = route(config(scoring_func="sigmoid", routed_scaling_factor=2.5), jnp.asarray(LOGITS), jnp.asarray(bias))
    assert (found.experts == experts).all() and (found.experts[..., 0] == 0).mean() > 0.9
    np.testing.assert_allclose(found.weights, 2.5 * kept / kept.sum(-1, keepdims=True), rtol=1e-5)


def test_capacity_takes_the_first_tokens_of_each_sequence():
    limited = config(capacity_factor=1.0)
    room = capacity(limited, T)
    assert room == -(-T * K // E)
    assert capacity(config(capacity_factor=100.0), T) == T
    full = route(config(), jnp.asarray(LOGITS), None)
    found = route(limited, jnp.asarray(LOGITS), None)
    taken = np.zeros((B, E), int)
    for b in range(B):
        for t in range(T):
            for j in range(K):
                expert = int(full.experts[b, t, j])
                fits = taken[b, expert] < room
                taken[b, expert] += fits
                assert int(found.experts[b, t, j]) == (expert if fits else E)
                assert float(found.weights[b, t, j]) == (float(full.weights[b, t, j]) if fits else 0)
    assert (np.asarray(found.experts) == E).any()
    assert (route(limited, jnp.asarray(LOGITS), None, dropless=True).experts == full.experts).all()


def test_drop_overflow_of_an_expert_that_all_want():
    experts = jnp.zeros((2, 5, 1), jnp.int32)
    assert drop_overflow(experts, 4, 3)[:, :, 0].tolist() == [[0, 0, 0, 4, 4]] * 2


def test_balance_loss_is_that_of_switch_a_sequence():
    probabilities = softmax(LOGITS)
    experts = chosen(LOGITS)
    wanted = 0.0
    for b in range(B):
        share = np.bincount(experts[b].ravel(), minlength=E) / (T * K)
        wanted += E * (share * probabilities[b].mean(0)).sum() * T
    found = route(config(router_aux_loss_coef=0.5), jnp.asarray(LOGITS), None).sums.loss
    np.testing.assert_allclose(found, 0.5 * wanted, rtol=1e-5)


def test_balance_loss_of_an_even_load_is_one_a_token():
    even = balance_loss(jnp.full((B, T, E), 1 / E), jnp.full((B, E), T * K / E), K)
    np.testing.assert_allclose(even, B * T, rtol=1e-6)
    one = jnp.zeros((B, T, E)).at[..., 0].set(1.0)
    np.testing.assert_allclose(balance_loss(one, jnp.zeros((B, E)).at[:, 0].set(T), 1), B * T * E, rtol=1e-6)


@pytest.mark.longer
def test_balance_loss_does_not_depend_on_the_split_of_the_batch():
    whole = route(config(router_aux_loss_coef=1.0), jnp.asarray(LOGITS), None).sums.loss
    parts = [route(config(router_aux_loss_coef=1.0), jnp.asarray(LOGITS[b : b + 1]), None).sums.loss for b in range(B)]
    np.testing.assert_allclose(whole, sum(parts), rtol=1e-6)


def test_losses_of_a_sequence_on_two_devices_add_up():
    settings = config(router_aux_loss_coef=1.0, router_z_loss_coef=0.1)
    whole = jax.value_and_grad(lambda x: route(settings, x, None).sums.loss)
    mesh = Mesh(np.array(jax.devices()[:2]), ("context",))

    def parts(x):
        def share(x):
            return route(settings, x, None, sequence_axes=("context",)).sums.loss[None]

        spec = jax.P(None, "context")
        return jax.shard_map(share, mesh=mesh, in_specs=spec, out_specs=jax.P("context"), check_vma=False)(x).sum()

    for found, wanted in zip(jax.jit(jax.value_and_grad(parts))(LOGITS), whole(jnp.asarray(LOGITS)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)


def test_given_experts_get_their_scores_as_weights():
    """Gradients reach the scores of the given experts, and with normalised weights no other."""
    experts = jnp.broadcast_to(jnp.array([4, 1]), (B, T, K))

    def weight(logits):
        found = route(config(), logits, None, experts=experts)
        return found.weights[..., 0].sum(), found

    (_, found), gradient = jax.jit(jax.value_and_grad(weight, has_aux=True))(LOGITS)
    assert (found.experts == experts).all() and found.sums.load.tolist() == [0, B * T, 0, 0, B * T, 0]
    np.testing.assert_allclose(found.weights, softmax(LOGITS[..., [4, 1]]), rtol=1e-5)
    np.testing.assert_allclose(gradient[..., [4, 1]].sum(-1), 0, atol=1e-6)
    assert (np.abs(gradient[..., [4, 1]]) > 1e-4).all() and np.abs(gradient[..., [0, 2, 3, 5]]).max() < 1e-6


@pytest.mark.longer
def test_balance_of_layers_and_its_metrics():
    """Sums of parts of a batch add up; a model's layers without a router do not count."""
    limited = config(capacity_factor=0.5)
    parts = [route(limited, jnp.asarray(LOGITS[b : b + 1]), None).sums for b in range(B)]
    sums = parts[0]
    for part in parts[1:]:
        sums = jax.tree.map(jnp.add, sums, part)
    even = route(limited, jnp.zeros((B, T, E)), None).sums
    even = even._replace(load=jnp.full(E, B * T * K / E), dropped=jnp.zeros(()))
    both = jax.tree.map(jnp.add, sums.of_layers(jnp.int32(2), 4), even.of_layers(jnp.int32(0), 4))
    metrics = {name: float(x) for name, x in both.metrics("router").items()}
    probabilities = softmax(LOGITS)
    entropy = -(probabilities * np.log(probabilities)).sum(-1).mean()
    counts = np.bincount(chosen(LOGITS).ravel(), minlength=E)
    lost = np.mean(np.asarray(route(limited, jnp.asarray(LOGITS), None).experts) == E)
    fullest = counts.max() * E / (B * T * K)
    wanted = {
        "router_entropy": (entropy + np.log(E)) / 2,
        "router_dropped": lost / 2,
        "expert_load": (fullest + 1) / 2,
        "expert_overload": fullest - 1,
        "expert_overload_layer": 2,
    }
    assert metrics == pytest.approx(wanted, rel=1e-5) and lost > 0


def test_z_loss():
    found = route(config(router_z_loss_coef=0.1), jnp.asarray(LOGITS), None).sums.loss
    np.testing.assert_allclose(found, 0.1 * (np.log(np.exp(LOGITS).sum(-1)) ** 2).sum(), rtol=1e-5)


def test_the_gradient_of_the_bias_is_the_load():
    counts = jnp.array([4.0, 0.0, 1.0, 3.0])
    value, gradient = jax.value_and_grad(lambda bias: 2.0 * load_signal(bias, counts, 2))(jnp.array([1.0, 2, 3, 4]))
    assert value == 0 and gradient.tolist() == [2 * 4 / 2 * (c - 2.0) for c in counts.tolist()]


def test_more_experts_a_token_than_there_are():
    with pytest.raises(ValueError, match="num_experts_per_tok \\(7\\) must be at most num_experts \\(6\\)"):
        config(num_experts_per_tok=7)
