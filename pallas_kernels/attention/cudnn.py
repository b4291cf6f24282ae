"""Attention backend that calls cuDNN through jax's public API, for calls that this API can compute exactly."""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from pallas_kernels.attention.remat import OUT_NAME
from pallas_kernels.attention.request import AttentionRequest
from pallas_kernels.mosaic_api import assume_cudnn, cudnn_problem


def unsupported_reason(request: AttentionRequest) -> str | None:
    """Return the first reason why jax's cuDNN attention cannot compute this call exactly, or None if it can."""
    if request.target.platform != "cuda":
        return f"runs on NVIDIA GPUs, lowered for {request.target}"
    if request.q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {request.q.dtype}"
    capability = request.target.compute_capability or (0, 0)
    if capability < (8, 0):
        return f"needs compute capability 8.0, lowered for {request.target}"
    largest = 256 if capability >= (9, 0) else 128
    if request.head_dim % 8 or request.head_dim > largest:
        return f"the head dim must be a multiple of 8 and at most {largest} on {request.target}, got {request.head_dim}"
    return _unsupported_options(request) or _unsupported_installation(request)


def _unsupported_options(request: AttentionRequest) -> str | None:
    mask = request.options.mask
    if request.segments is not None:
        return "jax's public API passes no segment ids to cuDNN"
    if request.options.soft_cap is not None:
        return "has no soft cap"
    if request.sinks is not None:
        return "has no attention sinks"
    if request.return_lse:
        return "jax rounds its log-sum-exp to the input's dtype and drops the cotangent"
    if not mask.is_band:
        return f"has no windows on both sides, global tokens or block layouts, got: {mask}"
    if mask.window is not None and not mask.causal:
        return "has a window only together with causal=True"
    if mask.causal and request.query_length != request.key_length:
        return (
            "aligns the first query with the first key, but this call aligns the last with the last: "
            f"T {request.query_length} must equal S {request.key_length}"
        )
    return None


def _unsupported_installation(request: AttentionRequest) -> str | None:
    if request.target.declared:
        return None
    problem = cudnn_problem()
    if problem is not None:
        return f"cuDNN is not installed where jax looks for it ({problem}): pip install 'jax[cuda13]'"
    return None


def attend(request: AttentionRequest) -> tuple[Float[Array, "B T N H"], None]:
    """Compute attention with cuDNN: return out [B, T, N, H], and None in place of the log-sum-exp."""
    mask = request.options.mask
    with _assume_target(request):
        out = jax.nn.dot_product_attention(
            request.q,
            request.k,
            request.v,
            scale=request.options.scale,
            is_causal=mask.causal,
            local_window_size=None if mask.window is None else (mask.window - 1, 0),
            implementation="cudnn",
        )
    return checkpoint_name(out, OUT_NAME), None


@contextlib.contextmanager
def _assume_target(request: AttentionRequest) -> Iterator[None]:
    """Context manager that lets a machine without a GPU trace cuDNN attention for the call's target GPU.

    jax asks the machine that it runs on for cuDNN's version and the GPU's compute capability, even if it only compiles
    for another machine.
    """
    if not request.target.declared:
        yield
        return
    with assume_cudnn(request.target.compute_capability or (0, 0)):
        yield
