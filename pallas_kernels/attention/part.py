"""Attention to a part of the keys, by the backends of `flash_attention`: parts can be merged and differentiated.

Forward each part gives its output and log-sum-exp. Backward it takes the log-sum-exp of all keys, and `delta` of all
keys' output: then its gradients are those of the whole softmax, and only have to be added up.
"""

import dataclasses

import jax

from pallas_kernels.attention.api import BACKENDS
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.request import AttentionRequest, make_request
from pallas_kernels.dispatch import Backend, select


@dataclasses.dataclass(frozen=True)
class PartOptions:
    """What all parts of one call have in common."""

    scale: float | None = None
    soft_cap: float | None = None
    implementation: str | None = None


def _require_gradients(backend: Backend) -> Backend:
    if backend.gradients is not None:
        return backend
    reason = "its gradients cannot be taken of a part of the keys, with the log-sum-exp of all"
    return dataclasses.replace(backend, unsupported_reason=lambda request: reason)


_PART_BACKENDS = tuple(_require_gradients(backend) for backend in BACKENDS)


QKV = tuple[jax.Array, jax.Array, jax.Array]
"""q [B, T, N, H]; k and v [B, S, K, H]."""
SegmentIds = tuple[jax.Array, jax.Array] | None
"""Segment ids of queries [B, T] and keys [B, S]."""


def _request(options: PartOptions, mask: Mask, arrays: QKV, ids: SegmentIds) -> AttentionRequest:
    return make_request(
        *arrays, mask=mask, segment_ids=ids, scale=options.scale, soft_cap=options.soft_cap, return_lse=True
    )


def attend_part(options: PartOptions, mask: Mask, arrays: QKV, ids: SegmentIds) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, H] in the dtype of q and lse [B, N, T] float32, of these keys alone."""
    request = _request(options, mask, arrays, ids)
    return select("flash_attention", _PART_BACKENDS, options.implementation, request).call(request)


def part_gradients(options: PartOptions, mask: Mask, arrays: QKV, ids: SegmentIds, rows: QKV) -> QKV:
    """dQ, dK and dV of these keys from `rows`: d_out [B, T, N, H], and lse and delta [B, N, T] of all keys."""
    request = _request(options, mask, arrays, ids)
    backend = select("flash_attention", _PART_BACKENDS, options.implementation, request, record=False)
    assert backend.gradients is not None
    return backend.gradients(request, *rows)
