"""Attention under jit, vmap, scan, jax.checkpoint and shard_map, and the pieces that others build on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import flash_attention, save_attention
from pallas_kernels.attention.scores import merge
from tests.compilation import fully_optimized, run_jitted

BACKENDS = ("xla_dense", "xla")


def arrays(*leading):
    random = np.random.default_rng(1)
    return [random.normal(size=(*leading, 24, heads, 8)).astype(np.float32) for heads in (4, 2, 2)]


def loss(q, k, v, implementation, **options):
    return (flash_attention(q, k, v, implementation=implementation, **options) ** 2).sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_is_a_further_batch_dim(backend):
    q, k, v = arrays(3, 2)
    attend = functools.partial(flash_attention, window=9, implementation=backend)
    together = run_jitted(jax.vmap(attend), q, k, v)
    alone = run_jitted(attend, *(x.reshape(6, *x.shape[2:]) for x in (q, k, v)))
    np.testing.assert_allclose(together, alone.reshape(q.shape), atol=1e-6)


@pytest.mark.longer
@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_of_the_gradient(backend):
    q, k, v = arrays(3, 2)
    gradient = jax.grad(lambda *x: loss(*x, backend, window=9), argnums=(0, 1, 2))
    together = run_jitted(jax.vmap(gradient), q, k, v)
    for index in (0, 2):
        alone = run_jitted(gradient, q[index], k[index], v[index])
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_allclose(a[index], b, atol=1e-5)


@pytest.mark.longer
@pytest.mark.parametrize("backend", BACKENDS)
def test_scan_over_layers(backend):
    q, k, v = arrays(1)

    def layers(q):
        def layer(x, _):
            return x + flash_attention(x, k, v, implementation=backend), None

        return (jax.lax.scan(jax.checkpoint(layer, policy=save_attention), q, None, length=3)[0] ** 2).sum()

    def unrolled(q):
        for _ in range(3):
            q = q + flash_attention(q, k, v, implementation="reference")
        return (q**2).sum()

    np.testing.assert_allclose(run_jitted(jax.grad(layers), q), run_jitted(jax.grad(unrolled), q), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoint_can_keep_output_and_log_sum_exp(backend):
    """With both named arrays kept the backward computes no forward again."""
    q, k, v = arrays(1)

    def count_dots(policy):
        function = jax.checkpoint(lambda q, k, v: loss(q, k, v, backend), policy=policy)
        return str(jax.make_jaxpr(jax.grad(function, argnums=(0, 1, 2)))(q, k, v)).count("dot_general")

    nothing = count_dots(jax.checkpoint_policies.nothing_saveable)
    kept = count_dots(save_attention)
    by_name = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_lse")
    assert kept < nothing
    assert count_dots(by_name) == kept


@pytest.mark.parametrize("backend", BACKENDS)
def test_shard_map_over_batch_and_heads(backend):
    q, k, v = arrays(4)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = P("data", None, "tensor", None)
    function = jax.shard_map(
        lambda *x: flash_attention(*x, implementation=backend),
        mesh=mesh,
        in_specs=(spec,) * 3,
        out_specs=spec,
        check_vma=False,
    )
    sharded = run_jitted(jax.grad(lambda q: (function(q, k, v) ** 2).sum()), q)
    np.testing.assert_allclose(sharded, run_jitted(jax.grad(lambda q: loss(q, k, v, "reference")), q), atol=1e-4)


@pytest.mark.longer
@fully_optimized()
def test_temporary_memory_is_linear_in_the_length():
    def temporary(length):
        x = jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32)
        gradient = jax.grad(lambda q, k, v: loss(q, k, v, "xla", window=100), argnums=(0, 1, 2))
        return jax.jit(gradient).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    first = temporary(8192)
    second = temporary(16384)
    assert second < 2.1 * first
    assert second < 16384 * 16384


def merged(q, k, v):
    parts = [
        flash_attention(q, k[:, part], v[:, part], causal=False, return_lse=True, implementation="xla_dense")
        for part in (slice(0, 10), slice(10, 24))
    ]
    return merge(*parts)


def test_merge_of_two_sets_of_keys_is_attention_over_both():
    whole = functools.partial(flash_attention, causal=False, return_lse=True, implementation="reference")
    found, wanted = run_jitted(lambda *x: (merged(*x), whole(*x)), *arrays(1))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), found, wanted)


@pytest.mark.longer
def test_gradient_of_the_merge():
    q, k, v = arrays(1)
    found = run_jitted(jax.grad(lambda *x: (merged(*x)[0] ** 2).sum(), argnums=(0, 1, 2)), q, k, v)
    expected = run_jitted(jax.grad(lambda *x: loss(*x, "reference", causal=False), argnums=(0, 1, 2)), q, k, v)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
