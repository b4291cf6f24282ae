"""A layer's backward in two halves gives the gradients of one, and does nothing twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.parallel.pipeline.layer_vjp import split_backward, split_layer
from tests.compilation import run_jitted
from tests.marks import longer

B = 4
T = 32
D = 64
F = 256


def layer(weights, x, shared, index):
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weights["norm"]
    h = jax.nn.silu(h @ weights["gate"]) * (h @ weights["up"]) * shared
    return x + (h @ weights["down"]) * (1 + index), jnp.sum(h * h)


def arguments():
    keys = jax.random.split(jax.random.key(0), 6)

    def normal(i, *shape):
        return jax.random.normal(keys[i], shape) / shape[0] ** 0.5

    weights = {"norm": 1 + normal(0, D), "gate": normal(1, D, F), "up": normal(2, D, F), "down": normal(3, F, D)}
    return weights, jax.random.normal(keys[4], (B, T, D)), jnp.float32(0.5), jnp.int32(1), normal(5, B, T, D)


def flops(function, *args):
    return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


@pytest.mark.longer
@pytest.mark.parametrize("remat", [False, *longer(True)])
def test_both_halves_together_are_the_whole(remat):
    weights, x, shared, index, gradient = arguments()
    body = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable) if remat else layer
    split = split_layer(body, weights, x, shared, index)
    late = split_backward(split, weights, x, shared, index)
    assert split.own.shape == ()

    def forward(weights, x):
        y, loss = body(weights, x, shared, index)
        return jnp.sum(y * gradient) + loss

    wanted_weights, wanted_x = jax.grad(forward, (0, 1))(weights, x)
    _, _, saved = split.forward(weights, x, shared, index)
    assert len(saved) == (1 if remat else len(split.saved))
    dx, found = split.backward(saved, gradient, weights, shared, index)

    def close(a, b):
        return np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)

    close(dx, wanted_x)
    jax.tree.map(close, found, wanted_weights)

    dx, early, kept = late.backward(saved, gradient, weights, shared, index)
    rest = late.weights(kept)
    close(dx, wanted_x)
    assert early["gate"] is None and rest["norm"] is None
    jax.tree.map(close, {**rest, "norm": early["norm"]}, wanted_weights)
    # Operands of three matmuls: h (shared by two), the product, and a cotangent each.
    assert sum(k.size for k in kept) == B * T * (2 * D + 3 * F)

    whole = flops(split.backward, saved, gradient, weights, shared, index)
    first = flops(late.backward, saved, gradient, weights, shared, index)
    second = flops(late.weights, kept)
    assert first + second <= 1.02 * whole
    assert second > 0.3 * whole if remat else second > 0.45 * whole


@pytest.mark.longer
def test_weights_and_what_is_shared_are_not_saved():
    weights, x, shared, index, _ = arguments()
    split = split_layer(layer, weights, x, shared, index)
    assert all(s.shape[0] == B for s in split.saved if np.prod(s.shape) >= D * D), "activations only"


@pytest.mark.parametrize("jitted", [True, *longer(False)])
def test_views_of_weights_are_not_kept_for_each_microbatch(jitted):
    heads = 4
    random = np.random.default_rng(0)
    weights = {"q": random.normal(size=(D, heads, D // heads)).astype(np.float32)}
    x = random.normal(size=(B, T, D)).astype(np.float32)

    def project(weights, x):
        return jnp.tanh(x @ weights["q"].astype(jnp.bfloat16).reshape(D, D)).astype(x.dtype)

    def layer(weights, x, shared, index):
        return x + (jax.jit(project) if jitted else project)(weights, x), None

    split = split_layer(layer, weights, x, (), jnp.int32(0))
    assert all(s.size == x.size for s in split.saved) and split.saved

    def run(weights, x):
        saved = split.forward(weights, x, (), jnp.int32(0))[2]
        found = split.backward(saved, jnp.ones_like(x), weights, (), jnp.int32(0))
        return found, jax.grad(lambda x, w: jnp.sum(layer(w, x, (), 0)[0]), (0, 1))(x, weights)

    found, wanted = run_jitted(run, weights, x)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.longer
def test_a_value_and_its_views_are_saved_once():
    def projected(weights, x, shared, index):
        flat = [x.reshape(-1, D) @ weights[name] for name in ("q", "k")]  # each with a view of its own
        mixed = jnp.sin(flat[0] * flat[1]).reshape(B, T, D)
        return x + (mixed.reshape(-1, D) @ weights["o"]).reshape(x.shape) * jnp.cos(mixed) * shared, None

    keys = jax.random.split(jax.random.key(1), 5)
    weights = {name: jax.random.normal(key, (D, D)) / 8 for name, key in zip("qko", keys, strict=False)}
    x, gradient = (jax.random.normal(key, (B, T, D)) for key in keys[3:])
    others = jnp.float32(0.5), jnp.int32(0)
    split = split_layer(projected, weights, x, *others)
    _, _, saved = split.forward(weights, x, *others)
    shapes = [s.shape for s in saved]
    assert len(saved) == len(split.saved) and shapes.count((B * T, D)) + shapes.count((B, T, D)) == len(saved)
    flat = [s.ravel() for s in saved]
    assert not any(jnp.array_equal(a, b) for i, a in enumerate(flat) for b in flat[:i])
    wanted = jax.grad(lambda weights, x: jnp.sum(projected(weights, x, *others)[0] * gradient), (0, 1))(weights, x)
    dx, found = split.backward(saved, gradient, weights, *others)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), (found, dx), wanted)
