"""Ulysses: all-to-all between sequence shards and heads (DeepSpeed-Ulysses, Jacobs et al., arXiv:2309.14509)."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.attention.context_layout import chunk_order


def unsupported_heads(num_heads: int, devices: int) -> str | None:
    """Return why `num_heads` query heads cannot be split over the devices by an all-to-all, or None."""
    if num_heads % devices == 0:
        return None
    fits = [d for d in range(1, num_heads + 1) if num_heads % d == 0]
    return (
        f"exchanges heads for shards of the sequence, so the {num_heads} query heads of a device must be divisible by "
        f"the {devices} devices of the axis; possible: {', '.join(map(str, fits))}"
    )


def with_whole_sequences(
    function: Callable[..., jax.Array],
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K V"],
    segment_ids: Int[Array, "B T"] | None,
    *,
    axis_name: str,
    layout: str = "zigzag",
) -> Shaped[Array, "B T N ..."]:
    """Call `function(q, k, v, segment_ids)` on every device, with whole sequences but only a part of the heads.

    An all-to-all exchanges the shards of the sequence for heads, and a second one reverses it for the result.

    Must be called inside `jax.shard_map`. If the number of devices does not divide K, key heads are repeated until it
    does.

    Args:
        function: returns [B, T, N, ...] for the whole sequences, in their natural order, that it is given.
        q: queries [B, T, N, H] of this device's shard of the sequence.
        k, v: keys and values [B, T, K, ...] of the shard, of any widths that `function` takes.
        segment_ids: integers [B, T] of the shard, or None.
        axis_name: mesh axis that the sequence is sharded over.
        layout: "zigzag" or "contiguous", the order in which devices hold the sequence.

    Returns:
        The result of `function` for this device's shard of the sequence and all N heads.

    Raises:
        ValueError: N is not divisible by the number of devices.
    """
    devices = lax.axis_size(axis_name)
    reason = unsupported_heads(q.shape[2], devices)
    if reason:
        raise ValueError(reason)
    repeats = devices // math.gcd(k.shape[2], devices)
    if repeats > 1:
        k = jnp.repeat(k, repeats, axis=2)
        v = jnp.repeat(v, repeats, axis=2)
    order = chunk_order(devices, layout)
    sequence_order = np.argsort(order)

    def gather(x: jax.Array) -> jax.Array:
        return _reorder(lax.all_to_all(x, axis_name, 2, 1, tiled=True), sequence_order)

    if segment_ids is not None:
        segment_ids = _reorder(lax.all_gather(segment_ids, axis_name, axis=1, tiled=True), sequence_order)
    out = function(gather(q), gather(k), gather(v), segment_ids)
    return lax.all_to_all(_reorder(out, np.asarray(order)), axis_name, 1, 2, tiled=True)


def _reorder(x: jax.Array, order: np.ndarray) -> jax.Array:
    """Return x [B, T, ...] with the chunks of its sequence in the given order."""
    if (order == np.arange(order.size)).all():
        return x
    chunks = jnp.split(x, order.size, axis=1)
    return jnp.concatenate([chunks[i] for i in order], axis=1)
