"""The global norm: equal to Optax's, in few kernels on a GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxstack.optim.build import clip_by_global_norm, global_norm
from tests.hopper import compile_for_hopper


def make_tree(dtype=jnp.float32):
    """Arrays of all kinds: small, large, large with an odd number of elements, scalar."""
    shapes = {"bias": (768,), "kernel": (768, 3, 256), "odd": (257, 511), "scale": ()}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {name: jax.random.normal(key, shapes[name], dtype) for name, key in zip(shapes, keys, strict=True)}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_is_that_of_optax_in_float32(dtype):
    tree = make_tree(dtype)
    wanted = optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), tree))
    found = jax.jit(global_norm)(tree)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.longer
@pytest.mark.parametrize("limit", [1.0, 1e6])
def test_clipping_is_that_of_optax(limit):
    tree = make_tree()
    ours, theirs = (
        make(limit).update(tree, optax.EmptyState())[0] for make in (clip_by_global_norm, optax.clip_by_global_norm)
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), ours, theirs)


def test_the_mesh_in_context_does_not_change_it(devices=8):
    tree = make_tree()
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.device_put(tree, jax.NamedSharding(mesh, jax.P()))
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(global_norm)(placed), global_norm(tree), rtol=1e-6)


def test_small_arrays_take_no_kernels_of_their_own():
    tree = [jax.ShapeDtypeStruct((768,), jnp.bfloat16)] * 50 + [jax.ShapeDtypeStruct((768, 768), jnp.bfloat16)] * 4

    def count(norm):
        text = compile_for_hopper(norm, tree).as_text()
        return len(re.findall(r" fusion\(", text[text.index("ENTRY") :]))

    assert count(global_norm) <= 8 < count(optax.tree.norm) // 5
