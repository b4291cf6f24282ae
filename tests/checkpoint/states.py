"""A small state with every usual kind of leaf, and its comparison bit by bit."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax


def make_state(seed: int = 0) -> dict:
    """Parameters, Adam's state, keys, counters: about 10 kB in 12 leaves."""
    key = jax.random.key(seed)
    params = {
        "layers": {"kernel": jax.random.normal(key, (8, 16)), "bias": jnp.arange(16, dtype=jnp.bfloat16)},
        "embedding": jax.random.normal(jax.random.fold_in(key, 1), (32, 8)),
    }
    return {
        "params": params,
        "optimizer": optax.adamw(1e-3).init(params),
        "rng": jax.random.fold_in(key, 2),
        "host": np.arange(seed, seed + 6),
        "step": seed,
    }


def raw(leaf) -> bytes:
    """The bits of a leaf, keys included."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).tobytes() if hasattr(leaf, "dtype") else repr(leaf).encode()


def assert_same(found, expected) -> None:
    """The same structure, types, dtypes, shapes and bits."""
    chex.assert_trees_all_equal_structs(found, expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert getattr(one, "dtype", type(one)) == getattr(other, "dtype", type(other))
        assert np.shape(one) == np.shape(other)
        assert raw(one) == raw(other)
