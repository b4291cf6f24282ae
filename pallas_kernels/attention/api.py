"""`flash_attention`: exact softmax attention, computed by the first of several backends that supports the call."""

from collections.abc import Callable

from jaxtyping import Array, Float

from pallas_kernels.array_types import AnyArray
from pallas_kernels.attention import cudnn, mosaic, reference, triton, xla, xla_dense
from pallas_kernels.attention.masks import Mask, unsupported_unless_band
from pallas_kernels.attention.request import AttentionRequest, SegmentIds, check_window, make_request
from pallas_kernels.dispatch import Backend, select


def _only_bands(
    unsupported_reason: Callable[[AttentionRequest], str | None],
) -> Callable[[AttentionRequest], str | None]:
    """Return a backend's `unsupported_reason`, extended to refuse global tokens and block-sparse patterns."""
    return lambda request: unsupported_unless_band(request.options.mask) or unsupported_reason(request)


def _with_equal_heads(attend: Callable[[AttentionRequest], tuple]) -> Callable[[AttentionRequest], tuple]:
    """Return a backend's `attend` that pads the values where they are narrower than keys; outputs are as wide."""
    return lambda request: attend(request.with_padded_values())


BACKENDS = (
    Backend(
        "mosaic",
        "our Hopper kernels: hidden tiles are skipped under every mask, forward and backward",
        mosaic.unsupported_reason,
        mosaic.attend,
        mosaic.lower_priority_reason,
        opaque=True,
        gradients=mosaic.gradients,
    ),
    Backend(
        "cudnn",
        "the fastest before Hopper and for wide heads, within the limits of its interface",
        cudnn.unsupported_reason,
        _with_equal_heads(cudnn.attend),
    ),
    Backend(
        "triton",
        "skips hidden tiles; preferred for short sequences too, with fewer launches than `xla_dense`",
        _only_bands(triton.unsupported_reason),
        _with_equal_heads(triton.attend),
        triton.lower_priority_reason,
        opaque=True,
        gradients=triton.gradients,
    ),
    Backend(
        "xla_dense",
        "the fastest for short sequences: one softmax, no rescaling",
        xla_dense.unsupported_reason,
        _with_equal_heads(xla_dense.attend),
        xla_dense.lower_priority_reason,
        gradients=xla_dense.gradients,
    ),
    Backend(
        "xla",
        "every call on every device, memory linear in the length",
        xla.unsupported_reason,
        _with_equal_heads(xla.attend),
        gradients=xla.gradients,
    ),
    Backend(
        "mosaic_deterministic",
        "like mosaic, with slower gradients that are bit-equal in every run: only if asked for by name",
        mosaic.unsupported_reason,
        mosaic.attend_deterministic,
        lambda request: "runs only when asked for by name",
        opaque=True,
        gradients=mosaic.gradients_deterministic,
    ),
    Backend(
        "reference",
        "the definition that backends are tested against, quadratic memory: only if asked for by name",
        lambda request: None,
        _with_equal_heads(reference.attend),
        lambda request: "runs only when asked for by name",
    ),
)


def flash_attention(  # noqa: PLR0913
    q: Float[AnyArray, "B T N H"],
    k: Float[AnyArray, "B S K H"],
    v: Float[AnyArray, "B S K V"],
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids: SegmentIds | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[AnyArray, " N"] | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], Float[Array, "B N T"]]:
    """Compute softmax(scale * q k^T) v over the visible keys, exactly and differentiably.

    Query t has position t + S - T among the keys 0..S-1: the last query is aligned with the last key, as in
    FlashAttention-2 and as a decoder with a cache needs it. With T = S this is the usual alignment.

    Key s is visible to a query at position p if all of these hold:
        not causal, or s <= p;
        window is None, or s > p - window (a window limits the left side only, with or without `causal`);
        segment_ids is None, or the segment of the query equals that of the key.
    A query without a visible key has the output 0, the log-sum-exp -inf (with a sink: the sink) and no gradient.

    Args:
        q: queries [B, T, N, H] in bfloat16, float16, float32 or float64.
        k, v: keys [B, S, K, H] and values [B, S, K, V] of the same dtype, V at most H. N is a multiple of K: query head
            n reads key head n // (N // K).
        causal: True to hide keys after the query.
        window: number of keys up to its own position that a query sees, itself included; None for no limit.
        segment_ids: integers, (query [B, T], key [B, S]), or one array for both if T = S.
        scale: factor of the scores; default 1 / sqrt(H).
        soft_cap: scores become soft_cap * tanh(score / soft_cap) before the mask, as in Gemma 2.
        sinks: attention sinks [N], one more score of every query of a head, which is neither scaled nor capped and has
            no value: exp(sink) is added to the softmax's denominator (gpt-oss, arXiv:2508.10925). None: there are none.
        return_lse: True to return the log-sum-exp of the scores too, with those of the sinks; its cotangent is
            honoured.
        implementation: name of a backend in `BACKENDS`; None takes the first that supports the call. A named backend
            never falls back.

    Returns:
        out [B, T, N, V] in the dtype of q; with `return_lse` also lse [B, N, T] in float32 (natural logarithm; float64
        for float64 inputs).

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
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
        sinks=sinks,
    )
    backend = select("flash_attention", BACKENDS, implementation, request)
    out, lse = backend.call(request)
    out = out[..., : request.value_dim]
    return (out, lse) if return_lse else out
