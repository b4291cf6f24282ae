"""Attention to a part of the keys, whose outputs and gradients can be combined over all parts.

In the forward each part gives its output and log-sum-exp (`scores.merge` combines two). In the backward it takes the
log-sum-exp over all keys, and `delta` of the output over all keys: its gradients are then those of the whole softmax,
and only have to be summed.
"""

import dataclasses

import jax

from pallas_kernels.attention.api import BACKENDS
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.request import AttentionRequest, make_request
from pallas_kernels.dispatch import Backend, select


@dataclasses.dataclass(frozen=True)
class PartOptions:
    """Attention options (scale, soft cap, backend) that all parts of the keys share."""

    scale: float | None = None
    soft_cap: float | None = None
    implementation: str | None = None


def _require_gradients(backend: Backend) -> Backend:
    if backend.gradients is not None:
        return backend
    reason = "it cannot compute the gradients for a part of the keys from the log-sum-exp of all keys"
    return dataclasses.replace(backend, unsupported_reason=lambda request: reason)


_PART_BACKENDS = tuple(_require_gradients(backend) for backend in BACKENDS)


QKV = tuple[jax.Array, jax.Array, jax.Array]
"""Arrays q [B, T, N, H], k and v [B, S, K, H]."""
SegmentPair = tuple[jax.Array, jax.Array] | None
"""Segment ids of queries [B, T] and keys [B, S], or None."""


def _request(options: PartOptions, mask: Mask, arrays: QKV, ids: SegmentPair) -> AttentionRequest:
    return make_request(
        *arrays, mask=mask, segment_ids=ids, scale=options.scale, soft_cap=options.soft_cap, return_lse=True
    )


def attend_part(options: PartOptions, mask: Mask, arrays: QKV, ids: SegmentPair) -> tuple[jax.Array, jax.Array]:
    """Attend to one part of the keys: return out [B, T, N, H] in the dtype of q and lse [B, N, T] in float32."""
    request = _request(options, mask, arrays, ids)
    return select("flash_attention", _PART_BACKENDS, options.implementation, request).call(request)


def part_gradients(options: PartOptions, mask: Mask, arrays: QKV, ids: SegmentPair, rows: QKV) -> QKV:
    """Compute dQ, dK and dV of attention to one part of the keys, given the log-sum-exp and delta over all keys.

    `rows` are d_out [B, T, N, H], and lse and delta [B, N, T] over all keys.
    """
    request = _request(options, mask, arrays, ids)
    backend = select("flash_attention", _PART_BACKENDS, options.implementation, request, record=False)
    assert backend.gradients is not None
    return backend.gradients(request, *rows)
