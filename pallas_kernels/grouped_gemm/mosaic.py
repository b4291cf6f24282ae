"""Grouped matmul backend for Hopper GPUs: one kernel launch for all groups, of any sizes."""

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_gemm import gradients
from pallas_kernels.grouped_gemm.mosaic_kernels import Kernels
from pallas_kernels.grouped_gemm.request import GroupedMatmulRequest
from pallas_kernels.hopper import target as hopper
from pallas_kernels.target import Target, current_target, multiprocessors
from pallas_kernels.weight_only.packed import is_packed

TILE_ROWS = 128
# Tests set this to run the kernels on a CPU.
INTERPRET = False


def unsupported_target(target: Target | None = None) -> str | None:
    """Return why the Hopper kernels do not run on a device at all, or None if they do."""
    return hopper.unsupported_target(target or current_target(), INTERPRET)


def unsupported_reason(request: GroupedMatmulRequest) -> str | None:
    """Return the first reason why the Hopper kernels cannot compute this grouped matmul, or None if they can."""
    reason = unsupported_target(request.target)
    if reason is not None:
        return reason
    if is_packed(request.weights):
        return "takes plain matrices; these are packed in few bits"
    if request.x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {request.x.dtype}"
    _, width, columns = request.weights.shape
    if width % 64 or columns % 64:
        return f"D and F must be multiples of 64, got {width} and {columns}"
    return None


def multiply(request: GroupedMatmulRequest) -> jax.Array:
    """Multiply the rows of each group with its matrix by the Hopper kernels: [R, F] in the dtype of x."""
    programs = 2 if INTERPRET else multiprocessors()
    return gradients.multiply(Kernels(TILE_ROWS, programs, INTERPRET), request)
