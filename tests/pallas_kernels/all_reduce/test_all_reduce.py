"""Sums over simulated devices, and the kernel interpreted on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels import NotSupported, all_reduce, all_reduce_rms_norm, lowering_platform, record_choices, rms_norm
from pallas_kernels.all_reduce import mosaic
from tests.compilation import run_jitted

NEEDS_MOSAIC = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")


def summed(operation, devices, parts, *whole, **options):
    """The operation on device i's `parts[i]`, with the other arguments whole on every device."""
    mesh = jax.make_mesh((devices,), ("tensor",), axis_types=(AxisType.Auto,))

    def local(parts, *whole):
        return operation(parts[0], *whole, axis_name="tensor", **options)

    specs = (P("tensor"), *(P() for _ in whole))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(parts, *whole)


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize("devices", [2, 3])
def test_sums_and_their_gradients(devices):
    parts = normal(devices, 5, 12)
    worth = normal(5, 12, seed=1)

    def total(parts):
        out = summed(all_reduce, devices, parts)
        return (out * worth).sum(), out

    (_, out), gradient = run_jitted(jax.value_and_grad(total, has_aux=True), parts)
    np.testing.assert_allclose(out, parts.sum(0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, jnp.broadcast_to(worth, parts.shape), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_sum_added_to_the_residual_stream_and_normalized(offset):
    parts = normal(2, 3, 16)
    residual = normal(3, 16, seed=1)
    weight = normal(16, seed=2)
    run = functools.partial(summed, all_reduce_rms_norm, 2, weight_offset=offset, epsilon=1e-3)
    normalized, total = run_jitted(run, parts, residual, weight)
    expected = rms_norm(parts.sum(0), weight, residual=residual, weight_offset=offset, epsilon=1e-3)
    np.testing.assert_allclose(normalized, expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(total, expected[1], rtol=1e-5, atol=1e-5)


@NEEDS_MOSAIC
@pytest.mark.parametrize("shape", [(1, 1024), (5, 2048)])
def test_the_kernel_on_one_device(monkeypatch, shape):
    monkeypatch.setattr(mosaic, "INTERPRET", True)
    parts = normal(1, *shape, dtype=jnp.bfloat16)
    residual = normal(*shape, seed=1, dtype=jnp.bfloat16)
    weight = normal(shape[1], seed=2)
    found = run_jitted(functools.partial(summed, all_reduce, 1, implementation="mosaic"), parts)
    np.testing.assert_array_equal(found, parts[0])
    run = functools.partial(summed, all_reduce_rms_norm, 1)
    found = run_jitted(functools.partial(run, implementation="mosaic"), parts, residual, weight)
    expected = run_jitted(functools.partial(run, implementation="xla"), parts, residual, weight)
    np.testing.assert_allclose(*(np.asarray(x[0], np.float32) for x in (found, expected)), rtol=0.01, atol=0.01)
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize(
    ("shape", "dtype", "norm", "reason"),
    [
        ((4, 1024), jnp.float32, False, "takes bfloat16 and float16, got float32"),
        ((3, 500), jnp.bfloat16, False, "takes a multiple of 1024 values, got 1500"),
        ((8, 1000), jnp.bfloat16, True, "at most 8192 values, got 1000"),
        ((2, 16384), jnp.bfloat16, True, "at most 8192 values, got 16384"),
    ],
)
@NEEDS_MOSAIC
def test_what_the_kernel_refuses(shape, dtype, norm, reason):
    arguments = [jnp.zeros((2, *shape), dtype)]
    if norm:
        arguments += [jnp.zeros(shape, dtype), jnp.zeros(shape[1])]
    run = functools.partial(summed, all_reduce_rms_norm if norm else all_reduce, 2, implementation="mosaic")
    with lowering_platform("cuda"), pytest.raises(NotSupported, match=reason):
        jax.eval_shape(run, *arguments)


@NEEDS_MOSAIC
@pytest.mark.parametrize(("rows", "backend"), [(1, "mosaic"), (256, "mosaic"), (512, "mosaic"), (1024, "xla")])
def test_large_sums_are_left_to_xla(rows, backend):
    with lowering_platform("cuda"), record_choices() as choices:
        jax.eval_shape(functools.partial(summed, all_reduce, 2), jnp.zeros((2, rows, 4096), jnp.bfloat16))
    assert [choice.backend for choice in choices] == [backend]


def test_wrong_shapes_and_places_are_explained():
    x = jnp.zeros((2, 8))
    with pytest.raises(ValueError, match=r"got \[2, 8\] float32, \[3, 8\] float32 and \[8\]"):
        all_reduce_rms_norm(x, jnp.zeros((3, 8)), jnp.zeros(8), axis_name="tensor")
    with pytest.raises(ValueError, match="call it inside jax.shard_map over the axis 'tensor'"):
        all_reduce(x, axis_name="tensor")
