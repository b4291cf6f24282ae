"""Checked arguments of `rotate_into_cache`.

Dims: B rows, T new tokens, N query heads, K key heads, S slots, H head dim.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.target import Target, current_target


@dataclass(frozen=True)
class CacheUpdateRequest:
    """Checked arguments of one call of `rotate_into_cache`: new heads, their rotations, and the cache.

    Attributes:
        joined: heads of queries, keys and values [B, T, N + 2 K, H], in this order.
        cos, sin: float32 [B, T, H / 2], or [1, T, H / 2] for all rows.
        keys, values: the cache [B, K, S, H] (`slot_axis` 2) or [B, S, K, H] (`slot_axis` 1).
        slots: int32 [B, T].
        num_heads: N.
        slot_axis: the dim of the slots in the cache.
        target: the device that the call is lowered for.
    """

    joined: jax.Array
    cos: jax.Array
    sin: jax.Array
    keys: jax.Array
    values: jax.Array
    slots: jax.Array
    num_heads: int
    slot_axis: int
    target: Target

    @property
    def key_heads(self) -> int:
        """Number of heads of the keys, and of the values, K."""
        return self.keys.shape[3 - self.slot_axis]

    @property
    def fp8(self) -> bool:
        """True if the cache is in FP8 (e4m3), as `Fp8Codec` stores keys and values."""
        return self.keys.dtype == jnp.float8_e4m3fn

    def __str__(self) -> str:
        joined = self.joined
        keys = self.keys
        return (
            f"joined {list(joined.shape)} {joined.dtype.name} with {self.num_heads} query heads, "
            f"cache {list(keys.shape)} {keys.dtype.name} on {self.target}"
        )


def make_request(
    joined: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    slots: jax.Array,
    *,
    num_heads: int,
    slot_axis: int,
) -> CacheUpdateRequest:
    """Check the arguments of a call of `rotate_into_cache`, and return them in one object.

    Raises:
        ValueError: an argument breaks a rule; the message gives the rule and the values.
    """
    if slot_axis not in (1, 2):
        raise ValueError(f"slot_axis must be 1 for a cache [B, S, K, H], or 2 for [B, K, S, H]; got {slot_axis}")
    shapes = f"got joined {list(joined.shape)}, keys {list(keys.shape)} and values {list(values.shape)}"
    if joined.ndim != 4 or keys.ndim != 4 or keys.shape != values.shape or keys.dtype != values.dtype:
        raise ValueError(f"joined must be [B, T, N + 2 K, H], keys and values [B, K, S, H] of one dtype; {shapes}")
    if joined.shape[0] != keys.shape[0] or joined.shape[3] != keys.shape[3]:
        raise ValueError(f"joined and the cache must have the same B rows and head dim H; {shapes}")
    key_heads = keys.shape[3 - slot_axis]
    if joined.shape[2] != num_heads + 2 * key_heads:
        raise ValueError(
            f"joined must have N + 2 K heads, {num_heads} + 2 x {key_heads} by num_heads and slot_axis {slot_axis}; "
            f"{shapes}"
        )
    batch, length, _, width = joined.shape
    if cos.shape != sin.shape or cos.shape not in ((batch, length, width // 2), (1, length, width // 2)) or width % 2:
        raise ValueError(
            f"cos and sin must be [B, T, H / 2] or [1, T, H / 2]; got {list(cos.shape)} and {list(sin.shape)} for "
            f"joined {list(joined.shape)}"
        )
    if slots.shape != (batch, length) or not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ValueError(
            f"slots must be integers [B, T], here {[batch, length]}; got {slots.dtype} {list(slots.shape)}"
        )
    return CacheUpdateRequest(
        joined,
        cos.astype(jnp.float32),
        sin.astype(jnp.float32),
        keys,
        values,
        slots.astype(jnp.int32),
        num_heads,
        slot_axis,
        current_target(),
    )
