"""A Triton kernel that copies an array by vector loads and stores, a contiguous part for each program."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.triton_support import triton_call


@dataclasses.dataclass(frozen=True)
class CopyParts:
    """Division of the copy among programs.

    Attributes:
        elements: 32-bit elements that a program copies.
        warps: Warps of a program; with 128 elements a warp a thread has one load and one store of 16 bytes.
        streams: True to mark what is read and written as used only once, so that caches evict it first.
    """

    elements: int = 512
    warps: int = 4
    streams: bool = False


@triton.jit
def _copy_part(source, target, elements: tl.constexpr, streams: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * elements + tl.arange(0, elements)
    if streams:
        tl.store(target + place, tl.load(source + place, eviction_policy="evict_first"), cache_modifier=".cs")
    else:
        tl.store(target + place, tl.load(source + place))


def copy(x: jax.Array, *, parts: CopyParts | None = None) -> jax.Array:
    """Return a copy of x, made by a kernel whose programs each copy neighbouring elements.

    Args:
        x: float32 [n], n a multiple of the elements of a program.
        parts: How the work is divided; default: `CopyParts()`.

    Raises:
        ValueError: x has another dtype, rank or size.
    """
    cut = parts or CopyParts()
    if x.ndim != 1 or x.size % cut.elements or x.dtype != jnp.float32:
        raise ValueError(
            f"the copy takes float32 [n] with n a multiple of {cut.elements}; got {x.dtype} {list(x.shape)}."
        )
    kernel: Any = _copy_part
    return triton_call(
        x,
        kernel=kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.size // cut.elements,),
        name="copy",
        num_warps=cut.warps,
        num_stages=1,
        compute_capability=90,
        elements=cut.elements,
        streams=cut.streams,
    )
