"""`linear_attention` and `performer_attention`: attention in time linear in the length, by feature maps of q and k.

Both compute out_t = sum_s sim(q_t, k_s) v_s / sum_s sim(q_t, k_s) with sim(q, k) = phi(q) . phi(k), by the first
backend of a table that supports the call.
"""

from collections.abc import Callable

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from pallas_kernels.array_types import AnyArray
from pallas_kernels.attention.remat import OUT_NAME
from pallas_kernels.dispatch import Backend, select
from pallas_kernels.linear_time_attention import reference, xla
from pallas_kernels.linear_time_attention.favor import Favor
from pallas_kernels.linear_time_attention.features import FEATURE_MAPS, Elementwise
from pallas_kernels.linear_time_attention.request import LinearAttentionRequest, make_request
from pallas_kernels.linear_time_attention.state import LinearState

BACKENDS = (
    Backend(
        "xla", "every call on every device, time and memory linear in the length", xla.unsupported_reason, xla.attend
    ),
    Backend(
        "reference",
        "the definition that backends are tested against, quadratic memory: only if asked for by name",
        lambda request: None,
        reference.attend,
        lambda request: "runs only if asked for by name",
    ),
)


def linear_attention(
    q: Float[AnyArray, "B T N H"],
    k: Float[AnyArray, "B S K H"],
    v: Float[AnyArray, "B S K H"],
    *,
    causal: bool = True,
    feature_map: str | Callable[[jax.Array], jax.Array] = "elu",
    segment_ids: Int[AnyArray, "B T"] | None = None,
    state: LinearState | None = None,
    chunk: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], LinearState]:
    """Compute linear attention, with similarities phi(q) . phi(k) (Katharopoulos et al., arXiv:2006.16236).

    A query whose similarities sum to 0 has the output 0. Within a chunk scores are computed as matmuls; between chunks
    a state of F x H numbers per head is carried, so time and memory are linear in the length.

    Args:
        q: queries [B, T, N, H] in bfloat16, float16, float32 or float64.
        k, v: keys and values [B, S, K, H] of the same dtype. N is a multiple of K: query head n reads key head
            n // (N // K). `causal` and `segment_ids` require T = S.
        causal: True to hide keys after the query.
        feature_map: "elu" (elu(x) + 1), "relu", or a function of float32 [..., H] that returns features [..., F] that
            are not negative.
        segment_ids: integers [B, T]; tokens of other documents are hidden. The tokens of a document are contiguous: the
            same number after another one is a new document. Negative numbers mark padding, which no query sees.
        state: sums over the tokens before the first one, from the previous call or `empty_linear_state`; they belong to
            the document of the first token that is not padding. With a state, the state after the last token is
            returned too. Needs `causal`.
        chunk: number of tokens per chunk; None chooses by F and H.
        implementation: name of a backend in `BACKENDS`; None takes the first that supports the call.

    Returns:
        out [B, T, N, H] in the dtype of q; with `state` also the next `LinearState`.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    if isinstance(feature_map, str):
        if feature_map not in FEATURE_MAPS:
            known = ", ".join(map(repr, FEATURE_MAPS))
            raise ValueError(f"feature_map {feature_map!r} is unknown: give one of {known}, or a function")
        feature_map = FEATURE_MAPS[feature_map]
    request = make_request(
        q,
        k,
        v,
        feature_map=Elementwise(feature_map),
        causal=causal,
        segment_ids=segment_ids,
        state=state,
        chunk=chunk,
    )
    return _run("linear_attention", implementation, request)


def performer_attention(
    q: Float[AnyArray, "B T N H"],
    k: Float[AnyArray, "B S K H"],
    v: Float[AnyArray, "B S K H"],
    *,
    projection: Float[Array | np.ndarray, "F H"],
    causal: bool = True,
    segment_ids: Int[AnyArray, "B T"] | None = None,
    scale: float | None = None,
    state: LinearState | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], LinearState]:
    """Estimate softmax attention by positive random features, FAVOR+ (Choromanski et al., arXiv:2009.14794).

    The similarity is an unbiased estimate of exp(scale q . k), with an error in proportion to 1 / sqrt(F). Exponents
    are scaled by the largest that a query may see, so nothing overflows and later tokens do not change earlier outputs.
    The projection has no gradient.

    Args:
        q, k, v, causal, segment_ids, state, implementation: as in `linear_attention`.
        projection: random directions [F, H], from `random_projection(F, H, seed=...)`. Renewed from time to time, it
            makes the errors within a training run independent.
        scale: factor of the scores, greater than 0; default 1 / sqrt(H).

    Returns:
        out [B, T, N, H] in the dtype of q; with `state` also the next `LinearState`.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    if getattr(projection, "ndim", None) != 2 or projection.shape[1] != q.shape[-1]:
        raise ValueError(
            f"projection must be [features, head dim {q.shape[-1]}]; got {getattr(projection, 'shape', projection)}; "
            f"make one with random_projection(features, {q.shape[-1]})"
        )
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if factor <= 0:
        raise ValueError(f"scale must be greater than 0: features are those of sqrt(scale) q; got {factor}")
    favor = Favor(jax.lax.stop_gradient(projection), factor)
    request = make_request(q, k, v, feature_map=favor, causal=causal, segment_ids=segment_ids, state=state, chunk=None)
    return _run("performer_attention", implementation, request)


def _run(
    operation: str, implementation: str | None, request: LinearAttentionRequest
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], LinearState]:
    out, last = select(operation, BACKENDS, implementation, request).call(request)
    out = checkpoint_name(out, OUT_NAME)
    return out if request.state is None else (out, last)
