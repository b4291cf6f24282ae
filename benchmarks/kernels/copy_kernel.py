"""A Triton kernel that copies an array by one load and one store of 16 bytes a thread, as XLA's kernels do."""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.triton_support import triton_call

ELEMENTS = 512
"""32-bit elements of a program: four for each thread of four warps."""


@triton.jit
def copy_kernel(source, target, elements: tl.constexpr):
    """Copy `elements` values, which caches are told to evict first."""
    place = tl.program_id(0).to(tl.int64) * elements + tl.arange(0, elements)
    tl.store(target + place, tl.load(source + place, eviction_policy="evict_first"), cache_modifier=".cs")


def copy(x: jax.Array) -> jax.Array:
    """Return a copy of x, made by a kernel whose programs each copy `ELEMENTS` neighbouring elements.

    On an H200 no other number of elements or warps was faster, nor were copies by TMA.

    Args:
        x: float32 [n], n a multiple of `ELEMENTS`.

    Raises:
        ValueError: x has another dtype, rank or size.
    """
    if x.ndim != 1 or x.size % ELEMENTS or x.dtype != jnp.float32:
        raise ValueError(f"the copy takes float32 [n] with n a multiple of {ELEMENTS}; got {x.dtype} {list(x.shape)}.")
    kernel: Any = copy_kernel
    return triton_call(
        x,
        kernel=kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.size // ELEMENTS,),
        name="copy",
        num_warps=4,
        num_stages=1,
        compute_capability=90,
        elements=ELEMENTS,
    )
