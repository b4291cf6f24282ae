"""Triton backend of `copy_newest`: programs of slots far before the first token of their row end at once."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.page_copies.request import BLOCK, PageCopyRequest
from pallas_kernels.triton_support import triton_call, unsupported_target

_LEAST_CAPABILITY = (8, 0)
_LEAST_CAPABILITY_OF_FP8 = (8, 9)
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn)
_SLOTS = 16
"""Slots of a program."""
_PIECE = 512
"""Numbers of a token that a program copies at a time."""
_WARPS = 4


@dataclasses.dataclass(frozen=True)
class PageCopyPlan:
    """Compile-time constants of the Triton kernel for `copy_newest`.

    Attributes:
        width: slots of a row of the copies.
        pages: pages of a row of the table.
        page_size: tokens of a page.
        key_elements, value_elements: numbers of a token's keys, and of its values.
        margin: slots before a first token that are written.
        slots: slots of a program, a power of two.
        piece: numbers of a token that are copied at a time, a power of two.
    """

    width: int
    pages: int
    page_size: int
    key_elements: int
    value_elements: int
    margin: int
    slots: int = _SLOTS
    piece: int = _PIECE


def unsupported_reason(request: PageCopyRequest) -> str | None:
    """Return the first reason why the Triton kernel cannot compute this call, or None if it can."""
    fp8 = request.keys.dtype == jnp.float8_e4m3fn
    if reason := unsupported_target(request.target, _LEAST_CAPABILITY_OF_FP8 if fp8 else _LEAST_CAPABILITY):
        return reason
    if request.keys.dtype not in _DTYPES or request.dtype not in _DTYPES[:3]:
        return (
            f"copies bfloat16, float16, float32 or float8_e4m3fn to one of the first three; got {request.keys.dtype} "
            f"and {request.dtype}"
        )
    return None


def make_plan(request: PageCopyRequest) -> PageCopyPlan:
    """Return the compile-time constants of the kernel for a call."""
    return PageCopyPlan(
        request.width,
        request.table.shape[1],
        request.page_size,
        request.elements(request.keys),
        request.elements(request.values),
        BLOCK,
    )


def copy(request: PageCopyRequest) -> tuple[jax.Array, jax.Array]:
    """Compute `copy_newest` with the Triton kernel."""
    from pallas_kernels.page_copies.triton_kernel import copy_kernel

    plan = make_plan(request)
    major, minor = request.target.compute_capability or (0, 0)
    rows = request.table.shape[0]
    key_copies, value_copies = triton_call(
        request.keys,
        request.values,
        request.table,
        request.lengths,
        kernel=copy_kernel,
        out_shape=tuple(
            jax.ShapeDtypeStruct((rows, plan.width, *x.shape[2:]), request.dtype)
            for x in (request.keys, request.values)
        ),
        grid=(-(-plan.width // plan.slots), rows),
        name="copy_newest",
        num_warps=_WARPS,
        num_stages=1,
        compute_capability=10 * major + minor,
        plan=plan,
    )
    return key_copies, value_copies
