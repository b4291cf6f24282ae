"""Attention by our own Hopper kernels: every mask skips tiles, in the forward and in the backward."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp

from pallas_kernels.attention import cudnn
from pallas_kernels.attention.request import Request
from pallas_kernels.attention.tilings import Tiling, choose_tiling, mask_kind

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
_LEAST_JAX = (0, 11)
_LARGEST_BLOCK = 128
# Tests set this to run the kernels on a CPU.
INTERPRET = False


def refuses(request: Request) -> str | None:
    """The first rule that the request breaks."""
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < _LEAST_JAX:
        return f"needs jax 0.11 or newer (Python 3.12 or newer), installed is {jax.__version__}"
    if importlib.util.find_spec("jax.experimental.pallas.mosaic_gpu") is None:
        return "this jax has no Mosaic GPU"
    if not INTERPRET and (request.target.platform != "cuda" or request.target.compute_capability != (9, 0)):
        return f"is written for Hopper (compute capability 9.0), lowered for {request.target}"
    if request.q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {request.q.dtype}"
    if request.head_dim not in HEAD_DIMS:
        return f"the head dim must be one of {', '.join(map(str, HEAD_DIMS))}, got {request.head_dim}"
    return _refuses_mask(request)


def _refuses_mask(request: Request) -> str | None:
    mask = request.options.mask
    shift = request.key_length - request.query_length
    if mask.layout is not None and (mask.layout.block_size % _LARGEST_BLOCK or shift % _LARGEST_BLOCK):
        return (
            f"no border of a layout's blocks may go through a tile: block size and S - T must be multiples of "
            f"{_LARGEST_BLOCK}, got {mask.layout.block_size} and {shift}"
        )
    return None


def yields(request: Request) -> str | None:
    """cuDNN is faster for some shapes, where it can compute them (docs/performance.md)."""
    mask = request.options.mask
    without_mask = mask.is_band and not mask.causal and mask.window is None
    if not (request.head_dim == 256 or (without_mask and request.head_dim == 128)) or cudnn.refuses(request):
        return None
    return f"cuDNN was measured faster at head dim {request.head_dim}{' without a mask' if without_mask else ''}"


def attend_deterministic(request: Request) -> tuple[jax.Array, jax.Array]:
    """`attend` with the backward in two kernels, whose gradients are bit-equal in every run."""
    return attend(request, dataclasses.replace(_tiling(request), fused_queries=0))


def attend(request: Request, tiling: Tiling | None = None) -> tuple[jax.Array, jax.Array]:
    """out [B, T, N, H] and lse [B, N, T], in blocks of `tiling` (default: what the tables say)."""
    # Older releases of jax, on which `refuses` answers, cannot import the kernels.
    from pallas_kernels.attention import mosaic_call

    tiling = tiling or _tiling(request)
    plan = mosaic_call.Plan(request.options, request.query_length, request.key_length, tiling, INTERPRET)
    return mosaic_call.attend(plan, request.q, request.k, request.v, request.segments)


def gradients(request: Request, *rows: jax.Array, tiling: Tiling | None = None) -> tuple:
    """dQ, dK and dV from d_out, and lse and delta of all keys (see `dispatch.Backend.gradients`)."""
    from pallas_kernels.attention import mosaic_call

    tiling = tiling or _tiling(request)
    plan = mosaic_call.Plan(request.options, request.query_length, request.key_length, tiling, INTERPRET)
    return mosaic_call.gradients(plan, request.q, request.k, request.v, request.segments, rows)


def gradients_deterministic(request: Request, *rows: jax.Array) -> tuple:
    """`gradients` that are bit-equal in every run."""
    return gradients(request, *rows, tiling=dataclasses.replace(_tiling(request), fused_queries=0))


def _tiling(request: Request) -> Tiling:
    kind = mask_kind(request.options.mask, request.segments is not None)
    return choose_tiling(request.head_dim, kind, request.key_length)
