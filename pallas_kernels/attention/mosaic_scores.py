"""Scores of attention inside the Hopper kernels: scaled for a softmax with exp2, soft-capped and masked.

The kernels work in powers of two: exp(x) is exp2(x * log2(e)), and that factor is folded into the scale.
"""

import functools
import math
import operator

import jax
import jax.numpy as jnp

from pallas_kernels.attention.mosaic_config import KernelConfig
from pallas_kernels.mosaic_api import Index, plgpu

LOG2E = math.log2(math.e)


def base2_factor(config: KernelConfig) -> float:
    """Return the factor f for which exp2(f * q.k), or exp2(f * tanh(...)) with a soft cap, is the softmax numerator."""
    cap = config.options.soft_cap
    return (config.options.scale if cap is None else cap) * LOG2E


def cap(config: KernelConfig, products: jax.Array) -> jax.Array:
    """Apply the soft cap to the raw products q.k: return tanh(products * scale / soft_cap); unchanged without a cap."""
    if config.options.soft_cap is None:
        return products
    return jnp.tanh(products * (config.options.scale / config.options.soft_cap))


def late_factor(config: KernelConfig) -> float:
    """Return the factor applied to scores after taking the row maximum: `base2_factor`, or 1 if that is not positive.

    A negative or zero one is applied to the scores at once, as it does not commute with the maximum of a row.
    """
    return base2_factor(config) if base2_factor(config) > 0 else 1.0


def fill(config: KernelConfig) -> float:
    """Return the large negative value that replaces masked scores: multiplied by `late_factor` it is about -1e30.

    It is a power of two, so that the product is exact: rows that see nothing of a tile subtract it from itself.
    """
    return -(2.0 ** min(math.floor(math.log2(1e30 / late_factor(config))), 126))


def empty_row_threshold(config: KernelConfig) -> float:
    """Return the threshold (in base 2) for a row's maximum score, below which the query has no visible key."""
    return 0.5 * fill(config) * late_factor(config)


def mask_tile(
    config: KernelConfig,
    values: jax.Array,
    hidden: float,
    first_query: Index,
    first_key: Index,
    ids: tuple[jax.Array, jax.Array] | None,
    keys_are_rows: bool = False,
) -> jax.Array:
    """Replace entries of a tile of scores or softmax weights by `hidden` where the mask hides the key from the query.

    A block layout hides whole tiles, never a part of one, and so has no part in this.

    Args:
        config: Static description of the kernel.
        values: [queries, keys], or [keys, queries] with `keys_are_rows`.
        hidden: Value of entries that are not visible.
        first_query: Position of the tile's first query, counted from the start of q.
        first_key: Position of the tile's first key, counted from the start of k.
        ids: Segment numbers of the tile's queries and keys, broadcast to its shape; None without segments. If the mask
            has global tokens, these are twice the numbers, plus one for global tokens.
        keys_are_rows: True if the rows of the tile are keys.
    """
    mask = config.options.mask
    query_dim, key_dim = (1, 0) if keys_are_rows else (0, 1)

    def positions(dim: int, first: Index) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, values.shape, dim, layout=plgpu.Layout.WGMMA) + first

    offset = config.key_length - config.length
    if config.key_length % config.key_block:
        values = jnp.where(positions(key_dim, first_key) < config.key_length, values, hidden)
    distance = positions(query_dim, first_query - first_key + offset) - positions(key_dim, 0)
    if mask.causal:
        values = jnp.where(distance >= 0, values, hidden)
    near = [] if mask.window is None else [distance < mask.window]
    near += [] if mask.window_after is None else [distance > -mask.window_after]
    if near:
        seen = functools.reduce(operator.and_, near)
        if mask.global_tokens and ids is not None:
            seen = seen | (((ids[0] | ids[1]) & 1) == 1)
        elif mask.global_tokens:
            seen = seen | (positions(query_dim, first_query + offset) < mask.global_tokens)
            seen = seen | (positions(key_dim, first_key) < mask.global_tokens)
        values = jnp.where(seen, values, hidden)
    if ids is not None:
        shift = 1 if mask.global_tokens else 0
        values = jnp.where((ids[0] >> shift) == (ids[1] >> shift), values, hidden)
    return values


def score_gradient(weights: jax.Array, d_weights: jax.Array, delta: jax.Array, capped: jax.Array | None) -> jax.Array:
    """Return the gradient of the products q.k, divided by `Options.scale`, from the softmax weights' gradient.

    Args:
        weights: Softmax weights.
        d_weights: Their gradient.
        delta: Row sums of out * d_out, broadcast to the shape of the weights.
        capped: tanh of the scaled products; None without a soft cap.
    """
    gradient = weights * (d_weights - delta)
    if capped is not None:
        gradient = gradient * (1.0 - capped * capped)
    return gradient
