"""`flash_attention`: exact attention by the first backend of the table that can."""

from collections.abc import Callable

import jax

from pallas_kernels.attention import cudnn, mosaic, reference, triton, xla, xla_dense
from pallas_kernels.attention.masks import Mask, unsupported_unless_band
from pallas_kernels.attention.request import AttentionRequest, check_window, make_request
from pallas_kernels.dispatch import Backend, select


def _for_bands(
    unsupported_reason: Callable[[AttentionRequest], str | None],
) -> Callable[[AttentionRequest], str | None]:
    """The refusals of a backend that knows of no global tokens and no layout."""
    return lambda request: unsupported_unless_band(request.options.mask) or unsupported_reason(request)


BACKENDS = (
    Backend(
        "mosaic",
        "our Hopper kernels: every mask skips tiles, in the backward too",
        mosaic.unsupported_reason,
        mosaic.attend,
        mosaic.lower_priority_reason,
        opaque=True,
        gradients=mosaic.gradients,
    ),
    Backend(
        "cudnn",
        "the fastest before Hopper, and where ours yields, as far as its interface goes",
        cudnn.unsupported_reason,
        cudnn.attend,
    ),
    Backend(
        "triton",
        "one kernel that skips what any mask hides; short sequences too, as it launches less than `xla_dense`",
        _for_bands(triton.unsupported_reason),
        triton.attend,
        triton.lower_priority_reason,
        opaque=True,
        gradients=triton.gradients,
    ),
    Backend(
        "xla_dense",
        "the fastest for short sequences: one softmax, no rescaling",
        xla_dense.unsupported_reason,
        xla_dense.attend,
        xla_dense.lower_priority_reason,
        gradients=xla_dense.gradients,
    ),
    Backend(
        "xla",
        "everything on every device, memory linear in the length",
        xla.unsupported_reason,
        xla.attend,
        gradients=xla.gradients,
    ),
    Backend(
        "mosaic_deterministic",
        "as mosaic, with gradients that are bit-equal in every run, which costs time: only when asked for by name",
        mosaic.unsupported_reason,
        mosaic.attend_deterministic,
        lambda request: "runs only when asked for by name",
        opaque=True,
        gradients=mosaic.gradients_deterministic,
    ),
    Backend(
        "reference",
        "the contract, quadratic memory: only when asked for by name",
        lambda request: None,
        reference.attend,
        lambda request: "runs only when asked for by name",
    ),
)


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """softmax(scale * q k^T, over the visible keys) v, exactly, with its gradient.

    Query t stands at position t + S - T among the keys 0..S-1: the last query is aligned with the last key,
    as in FlashAttention-2 and as a decoder with a cache needs it. Where T = S this is the usual alignment.

    Key s is visible to a query at position p where all of these hold:
        not causal, or s <= p;
        window is None, or s > p - window (a window limits the left side only, with or without `causal`);
        segment_ids is None, or the segment of the query equals that of the key.
    A query without a visible key has the output 0, the log-sum-exp -inf and no gradient.

    Args:
        q: [B, T, N, H] in bfloat16, float16, float32 or float64.
        k, v: [B, S, K, H] of the same dtype, N a multiple of K: query head n reads key head n // (N // K).
        causal: whether keys after the query are hidden.
        window: how many keys up to its own position a query sees, itself included.
        segment_ids: integers, (query [B, T], key [B, S]), or one array for both where T = S.
        scale: a number, 1 / sqrt(H) by default.
        soft_cap: scores become soft_cap * tanh(score / soft_cap) before the mask, as in Gemma 2.
        return_lse: also return the log-sum-exp of the scores; its cotangent is honoured.
        implementation: a name of `BACKENDS`; None takes the first that supports the call. A named one never
            falls back.

    Returns:
        out [B, T, N, H] in the dtype of q; with `return_lse` also lse [B, N, T] in float32 (natural
        logarithm; float64 for float64 inputs).

    Raises:
        ValueError: an argument breaks a rule; `NotSupported` (a ValueError) where the named backend cannot.
    """
    request = make_request(
        q,
        k,
        v,
        mask=Mask(bool(causal), None if window is None else check_window(window)),
        segment_ids=segment_ids,
        scale=scale,
        soft_cap=soft_cap,
        return_lse=return_lse,
    )
    backend = select("flash_attention", BACKENDS, implementation, request)
    out, lse = backend.call(request)
    return (out, lse) if return_lse else out
