"""Rounding to FP8 with blockwise scales in one pass over memory, by a Triton kernel: both orders at once.

As XLA fusions it is three reads of the array: for the maxima along rows, for those along columns, for the rounding.
"""

import dataclasses
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.fp8 import blockwise
from pallas_kernels.fp8.blockwise import BLOCK
from pallas_kernels.fp8.formats import E4M3, Quantized
from pallas_kernels.target import current_target

_LEAST_CAPABILITY = (8, 9)
_WARPS = 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """The shape of an array, as the kernel reads it."""

    rows: int
    columns: int

    @property
    def column_tiles(self) -> int:
        return self.columns // BLOCK


def quantize_both(x: jax.Array) -> tuple[Quantized, Quantized]:
    """`blockwise.quantize_both`, by the kernel where it is installed and the target and the shape are its own."""
    capability = current_target().compute_capability
    installed = all(importlib.util.find_spec(name) for name in ("triton", "jax_triton"))
    if not installed or capability is None or capability < _LEAST_CAPABILITY or any(n % BLOCK for n in x.shape):
        return blockwise.quantize_both(x)
    return _launch(x, 10 * capability[0] + capability[1])


def _launch(x: jax.Array, capability: int) -> tuple[Quantized, Quantized]:
    import jax_triton

    from pallas_kernels.fp8.triton_quantize import quantize_kernel

    plan = Plan(*x.shape)
    shapes: tuple[tuple[tuple[int, ...], Any], ...] = (
        (x.shape, E4M3),
        ((plan.columns // BLOCK, plan.rows), jnp.float32),
        ((plan.columns, plan.rows), E4M3),
        ((plan.rows // BLOCK, plan.columns), jnp.float32),
    )
    values, inverse, turned_values, turned_inverse = jax_triton.triton_call(
        x,
        kernel=quantize_kernel,
        out_shape=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes),
        grid=(plan.rows // BLOCK * plan.column_tiles,),
        name="fp8_quantize_both",
        num_warps=_WARPS,
        num_stages=1,
        compute_capability=capability,
        plan=plan,
    )
    return Quantized(values, inverse), Quantized(turned_values, turned_inverse)
