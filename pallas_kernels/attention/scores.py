"""Building blocks of the XLA attention backends: grouped heads, scores and their gradient, the online softmax.

Heads are grouped: q [B, T, K, G, H] with G = N // K query heads per key head, scores [B, K, G, T, S], so that keys and
values are never repeated. Row statistics (maximum, sum, log-sum-exp) are [B, K, G, T].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention.request import Options


def group_heads(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """Group the query heads that share a key head: reshape [B, T, N, ...] to [B, T, K, N // K, ...]."""
    return x.reshape(*x.shape[:2], num_kv_heads, x.shape[2] // num_kv_heads, *x.shape[3:])


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype to accumulate sums in: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def raw_scores(q: jax.Array, k: jax.Array, options: Options) -> jax.Array:
    """Compute scaled and soft-capped attention scores [B, K, G, T, S], not masked, in float32 or float64."""
    dtype = accumulator_dtype(q.dtype)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=dtype) * options.scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    return scores


def score_gradient(
    weights: jax.Array, d_weights: jax.Array, delta: jax.Array, scores: jax.Array | None, options: Options
) -> jax.Array:
    """Return the gradient of the products q.k, from the gradient of the softmax weights.

    Args:
        weights, d_weights, scores: [B, K, G, T, S]; `scores` (masked) is only read with a soft cap.
        delta: [B, K, G, T], the row sums of weights * d_weights minus the gradient of the log-sum-exp.
        options: scale and soft cap.
    """
    gradient = weights * (d_weights - delta[..., None]) * options.scale
    if options.soft_cap is not None and scores is not None:
        # Masked scores are -inf with weight 0; the replacement prevents 0 * inf = nan.
        capped = jnp.where(weights == 0.0, 0.0, scores / options.soft_cap)
        gradient = gradient * (1.0 - jnp.square(capped))
    return gradient


def row_delta(out: jax.Array, d_out: jax.Array, d_lse: jax.Array) -> jax.Array:
    """Return delta [B, N, T] of the softmax gradient: row sums of out * d_out minus the log-sum-exp's gradient.

    Args:
        out, d_out: [B, T, N, H].
        d_lse: [B, N, T].
    """
    dtype = accumulator_dtype(out.dtype)
    return jnp.einsum("btnh,btnh->bnt", out.astype(dtype), d_out.astype(dtype), precision="highest") - d_lse


def needs_delta_correction(dtype: jnp.dtype) -> bool:
    """Return True if the backward must correct rounding errors of delta, the row sums in the softmax gradient.

    That is so for float32 and float64 inputs.

    If a row sees few more keys than one, its weights' gradients minus their mean nearly cancel, and `row_delta`,
    rounded in another order, would be off by more than the difference. So the remaining mean is subtracted as well,
    with weights that sum to exactly 1. With 16-bit inputs the rounding of the inputs outweighs all of that.
    """
    return dtype == accumulator_dtype(dtype)


def weighted_sum_of_values(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Multiply softmax weights [B, K, G, T, S] with values [B, S, K, H]: [B, T, K, G, H] in float32 or float64."""
    return jnp.einsum(
        "bkgts,bskh->btkgh", weights.astype(v.dtype), v, preferred_element_type=accumulator_dtype(v.dtype)
    )


def sum_over_queries(gradient: jax.Array, x: jax.Array) -> jax.Array:
    """Sum weights or gradients [B, K, G, T, S] times x [B, T, K, G, H] over queries: dV or dK [B, S, K, H]."""
    return jnp.einsum(
        "bkgts,btkgh->bskh", gradient.astype(x.dtype), x, preferred_element_type=accumulator_dtype(x.dtype)
    )


def per_query(statistic: jax.Array) -> jax.Array:
    """Reshape values of queries, such as their log-sum-exp, from [B, K, G, T] to [B, T, K, G, 1], to scale outputs."""
    return jnp.moveaxis(statistic, -1, 1)[..., None]


def one_if_zero(total: jax.Array) -> jax.Array:
    """Replace a softmax denominator of 0, that of a query without a visible key, by 1."""
    return jnp.where(total == 0.0, 1.0, total)


def finite_or_zero(row_maximum: jax.Array) -> jax.Array:
    """Replace -inf, the maximum score of a query without a visible key, by 0.

    The maximum of a row without a visible key is -inf; with 0 in its place exp(-inf - 0) = 0 instead of nan.
    """
    return jnp.where(row_maximum == -jnp.inf, 0.0, row_maximum)


def with_sinks(
    out: Float[Array, "B T N H"], lse: Float[Array, "B N T"], sinks: Float[Array, " N"] | None
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Add an attention sink to each query's softmax: a score without a value (gpt-oss, arXiv:2508.10925).

    The sink only enlarges the denominator, which the log-sum-exp knows: the output is multiplied by
    sigmoid(lse - sink). Differentiable in all arrays. `sinks` None returns the arguments.

    Returns:
      The output, and the log-sum-exp over the keys and the sink.
    """
    if sinks is None:
        return out, lse
    sinks = sinks.astype(lse.dtype)[:, None]
    share = jnp.moveaxis(jax.nn.sigmoid(lse - sinks), 1, 2)[..., None]
    return (out * share).astype(out.dtype), jnp.logaddexp(lse, sinks)


def sink_gradient(
    sinks: Float[Array, " N"], lse: Float[Array, "B N T"], delta: Float[Array, "B N T"]
) -> Float[Array, " N"]:
    """Return the gradient of attention sinks, each a score whose value is 0.

    Args:
        lse: the log-sum-exp over the keys and the sink.
        delta: `row_delta` of the output with sinks.
    """
    return -(jnp.exp(sinks[:, None] - lse) * delta).sum(axis=(0, 2))


class SoftmaxState(NamedTuple):
    """State of the online softmax over the keys seen so far (Milakov and Gimelshein, arXiv:1805.02867)."""

    out: jax.Array  # [B, T, K, G, H], weighted by exp(score - maximum), not normalised
    maximum: jax.Array  # [B, K, G, T]
    total: jax.Array  # [B, K, G, T], the sum of exp(score - maximum)


def absorb(state: SoftmaxState, scores: jax.Array, v: jax.Array) -> SoftmaxState:
    """Update the online softmax with further keys: their masked scores [B, K, G, T, S] and values v [B, S, K, H]."""
    maximum = jnp.maximum(state.maximum, scores.max(axis=-1))
    shift = finite_or_zero(maximum)
    weights = jnp.exp(scores - shift[..., None])
    shrink = jnp.exp(state.maximum - shift)
    out = state.out * per_query(shrink) + weighted_sum_of_values(weights, v)
    return SoftmaxState(out, maximum, state.total * shrink + weights.sum(axis=-1))


def finish(state: SoftmaxState) -> tuple[jax.Array, jax.Array]:
    """Return the result of the online softmax: out [B, T, K, G, H] and the log-sum-exp [B, K, G, T].

    They are 0 and -inf for rows that saw no key.
    """
    total = one_if_zero(state.total)
    out = state.out / per_query(total)
    lse = jnp.where(state.total == 0.0, -jnp.inf, finite_or_zero(state.maximum) + jnp.log(total))
    return out, lse


def merge(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Combine attention to two disjoint sets of keys, each given as (out [B, T, N, H], log-sum-exp [B, N, T]).

    Differentiable in all four arrays. Rows that saw no key in either set give 0 and -inf.
    """
    (out_a, lse_a), (out_b, lse_b) = first, second
    maximum = jax.lax.stop_gradient(finite_or_zero(jnp.maximum(lse_a, lse_b)))
    weight_a = jnp.exp(lse_a - maximum)
    weight_b = jnp.exp(lse_b - maximum)
    total = weight_a + weight_b
    empty = total == 0.0
    safe_total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, maximum + jnp.log(safe_total))

    def share(weight: jax.Array) -> jax.Array:
        return jnp.moveaxis(weight / safe_total, 1, 2)[..., None]

    return share(weight_a) * out_a + share(weight_b) * out_b, lse
