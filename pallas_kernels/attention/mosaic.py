"""Attention backend for Hopper GPUs: kernels that skip the tiles of the score matrix that the mask hides."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.attention import cudnn, mosaic_call
from pallas_kernels.attention.balance import fewer_warpgroups_help
from pallas_kernels.attention.request import AttentionRequest
from pallas_kernels.attention.tilings import Tiling, choose_tiling, mask_kind
from pallas_kernels.hopper.target import unsupported_target

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
NARROW_VALUES = ((192, 128),)
"""Widths of keys and values that the kernels compute without padding the values (DeepSeek's latent attention)."""
_LARGEST_BLOCK = 128
_FEWER_WARPGROUPS = {"forward_warpgroups": 2, "forward_keys": 128, "forward_stages": 4}
"""The fastest forward with two computing warpgroups at head dim 64."""
# Tests set this to run the kernels on a CPU.
INTERPRET = False


def unsupported_reason(request: AttentionRequest) -> str | None:
    """Return the first reason why the Hopper kernels cannot compute this attention call, or None if they can."""
    reason = unsupported_target(request.target, INTERPRET)
    if reason is not None:
        return reason
    if request.q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {request.q.dtype}"
    if request.head_dim not in HEAD_DIMS:
        return f"the head dim must be one of {', '.join(map(str, HEAD_DIMS))}, got {request.head_dim}"
    return _unsupported_mask(request)


def _unsupported_mask(request: AttentionRequest) -> str | None:
    mask = request.options.mask
    shift = request.key_length - request.query_length
    if mask.layout is not None and (mask.layout.block_size % _LARGEST_BLOCK or shift % _LARGEST_BLOCK):
        return (
            f"no border of a layout's blocks may go through a tile: block size and S - T must be multiples of "
            f"{_LARGEST_BLOCK}, got {mask.layout.block_size} and {shift}"
        )
    return None


def lower_priority_reason(request: AttentionRequest) -> str | None:
    """Return why cuDNN is preferred for this call (its causal backward is faster at head dim 256), or None."""
    mask = request.options.mask
    if request.head_dim != 256 or not mask.causal or mask.window is not None or cudnn.unsupported_reason(request):
        return None
    return f"cuDNN was measured faster at head dim {request.head_dim} under a causal mask without a window"


def attend_deterministic(request: AttentionRequest) -> tuple[jax.Array, jax.Array]:
    """Compute attention whose gradients are bitwise reproducible: a separate kernel computes dQ."""
    request = request.with_padded_values()
    return attend(request, dataclasses.replace(_tiling(request), fused_queries=0))


def attend(request: AttentionRequest, tiling: Tiling | None = None) -> tuple[jax.Array, jax.Array]:
    """Compute attention with the Hopper kernels: return out [B, T, N, H] and the log-sum-exp [B, N, T].

    `tiling` sets the block sizes (default: from the tables). Where the values are padded, so are the outputs.
    """
    if (request.head_dim, request.value_dim) not in NARROW_VALUES:
        request = request.with_padded_values()
    return mosaic_call.attend(_plan(request, tiling), request.q, request.k, request.v, request.segments, request.sinks)


def gradients(request: AttentionRequest, *rows: jax.Array, tiling: Tiling | None = None) -> tuple:
    """Compute dQ, dK and dV of attention to a part of the keys, given the log-sum-exp over all keys.

    `rows` are d_out, the log-sum-exp, and delta (`scores.row_delta`), the last two over all keys.
    """
    plan = _plan(request, tiling)
    return mosaic_call.gradients(plan, request.q, request.k, request.v, request.segments, rows)


def gradients_deterministic(request: AttentionRequest, *rows: jax.Array) -> tuple:
    """Compute the same as `gradients`, but bitwise reproducibly: a separate kernel computes dQ."""
    return gradients(request, *rows, tiling=dataclasses.replace(_tiling(request), fused_queries=0))


def _plan(request: AttentionRequest, tiling: Tiling | None) -> mosaic_call.AttentionPlan:
    tiling = tiling or _tiling(request)
    return mosaic_call.AttentionPlan(request.options, request.query_length, request.key_length, tiling, INTERPRET)


def _tiling(request: AttentionRequest) -> Tiling:
    mask = request.options.mask
    width = (request.head_dim + request.value_dim) // 2  # what a tile of keys and values takes
    tiling = choose_tiling(width, mask_kind(mask, request.segments is not None), request.key_length)
    if mask.layout is not None:
        # `_unsupported_mask` makes sure that no border goes through a tile.
        keys = tiling.forward_keys if _LARGEST_BLOCK % tiling.forward_keys == 0 else 64
        return dataclasses.replace(tiling, forward_warpgroups=2, forward_keys=keys)
    # With segments the work of a block is not known while tracing.
    if tiling.forward_warpgroups == 2 or request.head_dim > 64 or request.segments is not None:
        return tiling
    fewer = dataclasses.replace(tiling, **_FEWER_WARPGROUPS)
    three, two = (_plan(request, each).forward_config() for each in (tiling, fewer))
    return fewer if fewer_warpgroups_help(three, two, request.q.shape[0] * request.q.shape[2]) else tiling
