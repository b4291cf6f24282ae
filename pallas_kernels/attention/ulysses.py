"""Whole sequences for a part of the heads, by an all-to-all (DeepSpeed-Ulysses, Jacobs et al., arXiv:2309.14509)."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.attention.context_layout import chunk_order


def unsupported_heads(num_heads: int, devices: int) -> str | None:
    """Why these query heads of one device cannot be exchanged; None where they can."""
    if num_heads % devices == 0:
        return None
    fits = [d for d in range(1, num_heads + 1) if num_heads % d == 0]
    return (
        f"exchanges heads for parts of the sequence, so the {num_heads} query heads of a device must be divisible by "
        f"the {devices} devices of the axis; fitting: {', '.join(map(str, fits))}"
    )


def with_whole_sequences(
    function: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    *,
    axis_name: str,
    layout: str = "zigzag",
) -> jax.Array:
    """`function(q, k, v, segment_ids)` of whole sequences, in their order, for each device's part of the heads.

    Inside `shard_map`. Key heads that the devices do not divide are repeated until they do.

    Args:
        function: returns [B, T, N, ...] for the arrays that it gets.
        q: [B, T, N, H], k, v: [B, T, K, H], segment_ids: [B, T] or None: this device's part of the sequence.

    Returns:
        What `function` returns, for this device's part of the sequence and all N heads.

    Raises:
        ValueError: the devices of the axis do not divide N.
    """
    devices = lax.axis_size(axis_name)
    reason = unsupported_heads(q.shape[2], devices)
    if reason:
        raise ValueError(reason)
    repeats = devices // math.gcd(k.shape[2], devices)
    if repeats > 1:
        k, v = jnp.repeat(k, repeats, axis=2), jnp.repeat(v, repeats, axis=2)
    order = chunk_order(devices, layout)
    there = np.argsort(order)

    def gather(x: jax.Array) -> jax.Array:
        return _reorder(lax.all_to_all(x, axis_name, 2, 1, tiled=True), there)

    if segment_ids is not None:
        segment_ids = _reorder(lax.all_gather(segment_ids, axis_name, axis=1, tiled=True), there)
    out = function(gather(q), gather(k), gather(v), segment_ids)
    return lax.all_to_all(_reorder(out, np.asarray(order)), axis_name, 1, 2, tiled=True)


def _reorder(x: jax.Array, order: np.ndarray) -> jax.Array:
    """[B, T, ...] with its chunks in this order."""
    if (order == np.arange(order.size)).all():
        return x
    chunks = jnp.split(x, order.size, axis=1)
    return jnp.concatenate([chunks[i] for i in order], axis=1)
