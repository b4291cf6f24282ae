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
from pallas_kernels.fp8.formats import (
    E4M3,
    Quantized,
    absolute_maximum,
    largest,
    power_of_two_scale,
    saturating_cast,
)
from pallas_kernels.fp8.sources import Source
from pallas_kernels.target import automatic_axes, current_target

_LEAST_CAPABILITY = (8, 9)
_WARPS = 16
_BLOCKWISE_WARPS = 8
_TILE_WARPS = 8
"""Of the kernels that go over the tiles first: SwiGLU of 32768 x 8192 takes 0.57 ms so on an H200, by 16 warps 0.78."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The shape of an array, as the kernel reads it."""

    rows: int
    columns: int
    width: int = BLOCK
    """Columns of a tile."""
    limit: float = 0.0
    """The largest number of the format, where the kernel makes scales."""

    @property
    def column_tiles(self) -> int:
        return self.columns // self.width


class Both(NamedTuple):
    """An array x [M, K] in FP8 with one scale, both ways round."""

    values: Quantized
    """[M, K]"""
    turned: Quantized
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
    values, inverse, turned_values, turned_inverse = _launch("quantize_kernel", plan, shapes, x, warps=_BLOCKWISE_WARPS)
    return Quantized(values, inverse), Quantized(turned_values, turned_inverse)


def cast_both(
    source: Source, arrays: Sequence[jax.Array], dtype: Any, expected: Sequence[jax.Array | None]
) -> list[Both]:
    """What the source makes of arrays [M, K], in an FP8 format, saturating; by a kernel where it can.

    Args:
        expected: the largest magnitude [] that each result is scaled for; None: its own.
    """
    if not _takes(arrays[0]):
        return [_cast_plainly(x, dtype, amax) for x, amax in zip(source.compute(*arrays), expected, strict=True)]
    if source.tiles_kernel is not None and all(amax is None for amax in expected):
        return _cast_by_tiles(source.tiles_kernel, source, arrays, dtype, len(expected))
    known = [
        absolute_maximum(x) if amax is None else amax for x, amax in zip(source.compute(*arrays), expected, strict=True)
    ]
    shape, scales = arrays[0].shape, [power_of_two_scale(amax, dtype) for amax in known]
    plan = Plan(*shape, width=source.width)
    shapes = ((shape, dtype), (shape[::-1], dtype), ((_tiles(plan),), jnp.float32)) * len(scales)
    results = _launch(source.kernel, plan, shapes, *arrays, *scales)
    values, turned, maxima = results[::3], results[1::3], results[2::3]
    return [_both(*one) for one in zip(values, turned, scales, [x.max() for x in maxima], strict=True)]


def _cast_by_tiles(kernel: str, source: Source, arrays: Sequence[jax.Array], dtype: Any, count: int) -> list[Both]:
    """First each tile with a scale of its own: to read those bytes again takes less than what they are computed of."""
    shape = arrays[0].shape
    plan = Plan(*shape, width=source.width, limit=largest(dtype))
    tiles = _launch(kernel, plan, ((shape, dtype), ((_tiles(plan),), jnp.float32)) * count, *arrays, warps=_TILE_WARPS)
    found = []
    for x, maxima in zip(tiles[::2], tiles[1::2], strict=True):
        amax = maxima.max()
        scale = power_of_two_scale(amax, dtype)
        shapes = ((shape, dtype), (shape[::-1], dtype))
        values, turned = _launch("recast_kernel", plan, shapes, x, maxima, scale, warps=_TILE_WARPS)
        found.append(_both(values, turned, scale, amax))
    return found


def _cast_plainly(x: jax.Array, dtype: Any, expected: jax.Array | None) -> Both:
    amax = absolute_maximum(x)
    scale = power_of_two_scale(amax if expected is None else expected, dtype)
    # Without a barrier XLA may drop the rounding together with the conversion back in front of a product.
    values = jax.lax.optimization_barrier(saturating_cast(x, scale, dtype))
    return _both(values, values.T, scale, amax)


def _both(values: jax.Array, turned: jax.Array, scale: jax.Array, amax: jax.Array) -> Both:
    return Both(Quantized(values, 1.0 / scale), Quantized(turned, 1.0 / scale), amax)


def _takes(x: jax.Array) -> bool:
    """Whether a kernel is installed, and the target and the shape are its own; XLA cannot partition it."""
    capability = current_target().compute_capability
    installed = all(importlib.util.find_spec(name) for name in ("triton", "jax_triton"))
    fits = x.ndim == 2 and not any(n % BLOCK for n in x.shape) and not automatic_axes()
    return installed and fits and capability is not None and capability >= _LEAST_CAPABILITY


def _tiles(plan: Plan) -> int:
    return plan.rows // BLOCK * plan.column_tiles


def _launch(kernel: str, plan: Plan, shapes: Any, *arrays: jax.Array, warps: int = _WARPS) -> tuple[jax.Array, ...]:
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
        num_warps=warps,
        num_stages=1,
        compute_capability=10 * major + minor,
        plan=plan,
    )
