"""Rounding to FP8 in one pass over memory, by a Triton kernel: both orders at once.

As XLA fusions blockwise scales are three reads of the array: for the maxima along rows, for those along columns, for
the rounding. With one scale XLA reads it once too, but writes the transpose at less than half of the memory's rate.
"""

import dataclasses
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.fp8 import blockwise
from pallas_kernels.fp8.blockwise import BLOCK
from pallas_kernels.fp8.formats import E4M3, Quantized, absolute_maximum, saturating_cast
from pallas_kernels.fp8.sources import Source
from pallas_kernels.target import automatic_axes, current_target

_LEAST_CAPABILITY = (8, 9)
_WARPS = 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """The shape of an array, as the kernel reads it."""

    rows: int
    columns: int
    width: int = BLOCK
    """Columns of a tile."""

    @property
    def column_tiles(self) -> int:
        return self.columns // self.width


class Cast(NamedTuple):
    """An array x [M, K] times a scale, in FP8, saturating."""

    values: jax.Array
    """[M, K]"""
    turned: jax.Array
    """[K, M]"""
    amax: jax.Array
    """max |x| [], float32."""


def quantize_both(x: jax.Array) -> tuple[Quantized, Quantized]:
    """`blockwise.quantize_both`, by the kernel where it can."""
    if not _takes(x):
        return blockwise.quantize_both(x)
    plan = Plan(*x.shape)
    shapes: tuple[tuple[tuple[int, ...], Any], ...] = (
        (x.shape, E4M3),
        ((plan.columns // BLOCK, plan.rows), jnp.float32),
        ((plan.columns, plan.rows), E4M3),
        ((plan.rows // BLOCK, plan.columns), jnp.float32),
    )
    values, inverse, turned_values, turned_inverse = _launch("quantize_kernel", plan, shapes, x)
    return Quantized(values, inverse), Quantized(turned_values, turned_inverse)


def cast_both(source: Source, arrays: Sequence[jax.Array], scales: Sequence[jax.Array], dtype: Any) -> tuple[Cast, ...]:
    """What the source makes of arrays [M, K], each times its scale [] in an FP8 format, by the kernel where it can."""
    if not _takes(arrays[0]):
        return tuple(_plain_cast(x, scale, dtype) for x, scale in zip(source.compute(*arrays), scales, strict=True))
    shape = arrays[0].shape
    plan = Plan(*shape, source.width)
    shapes = ((shape, dtype), (shape[::-1], dtype), ((_tiles(plan),), jnp.float32)) * len(scales)
    results = _launch(source.kernel, plan, shapes, *arrays, *scales)
    return tuple(Cast(*results[first : first + 2], results[first + 2].max()) for first in range(0, len(results), 3))


def _plain_cast(x: jax.Array, scale: jax.Array, dtype: Any) -> Cast:
    # Without a barrier XLA may drop the rounding together with the conversion back in front of a product.
    values = jax.lax.optimization_barrier(saturating_cast(x, scale, dtype))
    return Cast(values, values.T, absolute_maximum(x))


def _takes(x: jax.Array) -> bool:
    """Whether a kernel is installed, and the target and the shape are its own; XLA cannot partition it."""
    capability = current_target().compute_capability
    installed = all(importlib.util.find_spec(name) for name in ("triton", "jax_triton"))
    fits = x.ndim == 2 and not any(n % BLOCK for n in x.shape) and not automatic_axes()
    return installed and fits and capability is not None and capability >= _LEAST_CAPABILITY


def _tiles(plan: Plan) -> int:
    return plan.rows // BLOCK * plan.column_tiles


def _launch(kernel: str, plan: Plan, shapes: Any, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Results of these shapes and dtypes, from one program a tile."""
    import jax_triton

    from pallas_kernels.fp8 import triton_quantize

    major, minor = current_target().compute_capability or _LEAST_CAPABILITY
    return jax_triton.triton_call(
        *arrays,
        kernel=getattr(triton_quantize, kernel),
        out_shape=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes),
        grid=(_tiles(plan),),
        name=f"fp8_{kernel}",
        num_warps=_WARPS,
        num_stages=1,
        compute_capability=10 * major + minor,
        plan=plan,
    )
