"""`linear_attention` and `performer_attention`: attention in time linear in the length, by the first backend that can.

Both compute out_t = sum_s sim(q_t, k_s) v_s / sum_s sim(q_t, k_s) with sim(q, k) = phi(q) . phi(k).
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention.remat import OUT_NAME
from pallas_kernels.dispatch import Backend, select
from pallas_kernels.linear_time_attention import reference, xla
from pallas_kernels.linear_time_attention.favor import Favor
from pallas_kernels.linear_time_attention.features import FEATURE_MAPS, Elementwise
from pallas_kernels.linear_time_attention.request import LinearAttentionRequest, make_request
from pallas_kernels.linear_time_attention.state import LinearState

BACKENDS = (
    Backend(
        "xla", "everything on every device, time and memory linear in the length", xla.unsupported_reason, xla.attend
    ),
    Backend(
        "reference",
        "the contract, quadratic memory: only when asked for by name",
        lambda request: None,
        reference.attend,
        lambda request: "runs only when asked for by name",
    ),
)


def linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = True,
    feature_map: str | Callable[[jax.Array], jax.Array] = "elu",
    segment_ids: jax.Array | None = None,
    state: LinearState | None = None,
    chunk: int | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, LinearState]:
    """Attention whose similarity is a product of features (Katharopoulos et al., arXiv:2006.16236), exactly.

    A query whose similarities sum to 0 has the output 0. Inside of a chunk scores are computed as matmuls; between
    chunks a state of F x H numbers a head is carried, so that time and memory are linear in the length.

    Args:
        q: [B, T, N, H] in bfloat16, float16, float32 or float64.
        k, v: [B, S, K, H] of the same dtype, N a multiple of K: query head n reads key head n // (N // K). T = S with
            `causal` or `segment_ids`.
        causal: whether keys after the query are hidden.
        feature_map: "elu" (elu(x) + 1) or "relu", or a function of float32 [..., H] that returns [..., F], none of
            it negative.
        segment_ids: integers [B, T]; tokens of other documents are hidden. The tokens of a document are neighbours: the
            same number further on is another document. Negative numbers mark padding, which no query sees.
        state: what came before the first token, from the call before or `empty_linear_state`; it belongs to the first
            token's document. With one, the state after the last token is returned too. Needs `causal`.
        chunk: tokens of a chunk; None chooses by F and H.
        implementation: a name of `BACKENDS`; None takes the first that supports the call.

    Returns:
        out [B, T, N, H] in the dtype of q; with `state` also the next `LinearState`.

    Raises:
        ValueError: an argument breaks a rule; `NotSupported` (a ValueError) where the named backend cannot.
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
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    projection: jax.Array | np.ndarray,
    causal: bool = True,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    state: LinearState | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, LinearState]:
    """An estimate of softmax attention by positive random features: FAVOR+ (Choromanski et al., arXiv:2009.14794).

    The similarity is an unbiased estimate of exp(scale q . k), whose error falls with the square root of the number of
    features. Exponents are scaled by the largest that a query may see, so nothing overflows and later tokens leave
    earlier outputs as they are. The projection has no gradient.

    Args:
        projection: [F, H], from `random_projection(F, H, seed=...)`; a new one now and then makes the errors of a
            training run independent.
        scale: a number greater than 0, 1 / sqrt(H) by default.
        q, k, v, causal, segment_ids, state, implementation: as in `linear_attention`.

    Returns:
        out [B, T, N, H] in the dtype of q; with `state` also the next `LinearState`.

    Raises:
        ValueError: an argument breaks a rule; `NotSupported` (a ValueError) where the named backend cannot.
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


def _run(operation: str, implementation: str | None, request: LinearAttentionRequest) -> Any:
    out, last = select(operation, BACKENDS, implementation, request).call(request)
    out = checkpoint_name(out, OUT_NAME)
    return out if request.state is None else (out, last)
