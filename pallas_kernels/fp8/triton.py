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
from pallas_kernels.fp8.state import AmaxHistory
from pallas_kernels.fp8.state import state_gradient as plain_state_gradient
from pallas_kernels.target import automatic_axes, current_target

_LEAST_CAPABILITY = (8, 9)
_WARPS = 16
_BLOCKWISE_WARPS = {1: 8, 2: 16, 3: 16}
"""By the arrays that are read."""
_TILE_WARPS = 8
"""Of the kernels that go over the tiles first: SwiGLU of 32768 x 8192 kernel_applies 0.57 ms so on an H200, by 16 warps 0.78."""


def _padded(count: int) -> int:
    return 1 << (count - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class QuantizePlan:
    """The shape of an array, as the kernel reads it."""

    rows: int
    columns: int
    width: int = BLOCK
    """Columns of a tile."""
    limit: float = 0.0
    """The largest number of the format."""
    history_start: int = 0
    """Where in a state the magnitudes begin that a scale is made of."""
    history: int = 1
    """How many they are."""
    default_amax: float = 0.0
    """What is taken for them where they are zeros."""

    @property
    def column_tiles(self) -> int:
        return self.columns // self.width

    @property
    def programs(self) -> int:
        return self.rows // BLOCK * self.column_tiles

    @property
    def padded_history(self) -> int:
        return _padded(self.history)


@dataclasses.dataclass(frozen=True)
class MaximaPlan:
    """How many magnitudes each role has, and how many a state."""

    inputs: int
    weights: int
    gradients: int
    history: int
    programs: int = 3

    @property
    def padded_history(self) -> int:
        return _padded(self.history)


class QuantizedPair(NamedTuple):
    """An array x [M, K] in FP8 with one scale, both ways round."""

    values: Quantized
    """[M, K]"""
    transposed: Quantized
    """[K, M]"""
    maxima: jax.Array
    """Of parts of x [parts], float32; the largest is max |x|."""


def quantize_both(source: Source, arrays: Sequence[jax.Array]) -> list[tuple[Quantized, Quantized]]:
    """`blockwise.quantize_both`, by a kernel where it can."""
    if not kernel_applies(arrays[0]):
        return blockwise.quantize_both(source, arrays)
    rows, columns = shape = arrays[0].shape
    plan, count = QuantizePlan(rows, columns, limit=largest(E4M3)), len(jax.eval_shape(source.compute, *arrays))
    shapes: tuple[tuple[tuple[int, ...], Any], ...] = (
        (shape, E4M3),
        ((columns // BLOCK, rows), jnp.float32),
        (shape[::-1], E4M3),
        ((rows // BLOCK, columns), jnp.float32),
    )
    warps = _BLOCKWISE_WARPS[len(arrays)]
    results = iter(_launch(source.blocks_kernel, plan, shapes * count, *arrays, warps=warps))
    found = [Quantized(values, inverse) for values, inverse in zip(results, results, strict=True)]
    return list(zip(found[::2], found[1::2], strict=True))


def quantize_weight(weight: jax.Array) -> tuple[Quantized, jax.Array]:
    """`blockwise.quantize_weight`, by a kernel where it can."""
    if not kernel_applies(weight):
        return blockwise.quantize_weight_both(weight)
    rows, columns = weight.shape
    plan = QuantizePlan(rows, columns, limit=largest(E4M3))
    blocks = (rows // BLOCK, columns // BLOCK)
    shapes = ((weight.shape, E4M3), (weight.shape[::-1], E4M3), (blocks, jnp.float32))
    values, transposed, inverse = _launch("weight_kernel", plan, shapes, weight)
    return Quantized(values, inverse), transposed


def cast_both(
    source: Source, arrays: Sequence[jax.Array], dtype: Any, expected: Sequence[AmaxHistory | None]
) -> list[QuantizedPair]:
    """What the source makes of arrays, of which the first is [M, K], in an FP8 format, saturating; by a kernel where it
    can.

    Args:
        expected: what each result is scaled for; None: its own largest magnitude.
    """
    if not kernel_applies(arrays[0]):
        return [_cast_plainly(x, dtype, history) for x, history in zip(source.compute(*arrays), expected, strict=True)]
    if source.tiles_kernel is not None and all(history is None for history in expected):
        return _cast_by_tiles(source.tiles_kernel, source, arrays, dtype, len(expected))
    given = [history for history in expected if history is not None]
    histories = [history.state for history in given] or [
        absolute_maximum(x).reshape(1) for x in source.compute(*arrays)
    ]
    plan, shape = _plan(source, arrays[0], dtype, given), arrays[0].shape
    shapes = ((shape, dtype), (shape[::-1], dtype), ((plan.programs,), jnp.float32), ((), jnp.float32))
    results = _launch(source.kernel, plan, shapes * len(expected), *arrays, *histories)
    return [_both(*results[start : start + 4]) for start in range(0, len(results), 4)]


def _plan(source: Source, x: jax.Array, dtype: Any, given: Sequence[AmaxHistory]) -> QuantizePlan:
    rows, columns = x.shape
    plan = QuantizePlan(rows, columns, source.width, largest(dtype))
    if not given:
        return plan
    amax_history, length = given[0], given[0].state.shape[-1]
    return dataclasses.replace(
        plan,
        history_start=amax_history.role * length,
        history=length,
        default_amax=amax_history.default_amax,
    )


def _cast_by_tiles(
    kernel: str, source: Source, arrays: Sequence[jax.Array], dtype: Any, count: int
) -> list[QuantizedPair]:
    """First each tile with a scale of its own: to read those bytes again kernel_applies less than what they are computed of."""
    shape, plan = arrays[0].shape, _plan(source, arrays[0], dtype, ())
    tiles = _launch(kernel, plan, ((shape, dtype), ((plan.programs,), jnp.float32)) * count, *arrays, warps=_TILE_WARPS)
    found = []
    for x, maxima in zip(tiles[::2], tiles[1::2], strict=True):
        shapes = ((shape, dtype), (shape[::-1], dtype), ((), jnp.float32))
        history = maxima.max().reshape(1)
        values, transposed, inverse = _launch("recast_kernel", plan, shapes, x, maxima, history, warps=_TILE_WARPS)
        found.append(_both(values, transposed, history, inverse))
    return found


def _cast_plainly(x: jax.Array, dtype: Any, expected: AmaxHistory | None) -> QuantizedPair:
    amax = absolute_maximum(x)
    scale = power_of_two_scale(amax if expected is None else expected.amax, dtype)
    # Without a barrier XLA may drop the rounding together with the conversion back in front of a product.
    values = jax.lax.optimization_barrier(saturating_cast(x, scale, dtype))
    return _both(values, values.T, amax.reshape(1), 1.0 / scale)


def _both(values: jax.Array, transposed: jax.Array, maxima: jax.Array, inverse_scale: jax.Array) -> QuantizedPair:
    return QuantizedPair(Quantized(values, inverse_scale), Quantized(transposed, inverse_scale), maxima)


def state_gradient(state: jax.Array, maxima: Sequence[jax.Array]) -> jax.Array:
    """`state.state_gradient` of one-dimensional maxima, by a kernel where it can: XLA makes several of it."""
    if not _kernels_available():
        return plain_state_gradient(state, maxima)
    inputs, weights, gradients = maxima
    plan = MaximaPlan(inputs.size, weights.size, gradients.size, state.shape[-1])
    (found,) = _launch("maxima_kernel", plan, ((state.shape, jnp.float32),), *maxima)
    return found


def kernel_applies(x: jax.Array) -> bool:
    """Whether the kernels run here, and the shape is theirs."""
    return _kernels_available() and x.ndim == 2 and not any(n % BLOCK for n in x.shape)


def _kernels_available() -> bool:
    """Whether kernels are installed, and the target is their own; XLA cannot partition them."""
    capability = current_target().compute_capability
    installed = all(importlib.util.find_spec(name) for name in ("triton", "jax_triton"))
    return installed and capability is not None and capability >= _LEAST_CAPABILITY and not automatic_axes()


def _launch(
    kernel: str, plan: QuantizePlan | MaximaPlan, shapes: Any, *arrays: jax.Array, warps: int = _WARPS
) -> tuple[jax.Array, ...]:
    """Results of these shapes and dtypes."""
    import jax_triton

    from pallas_kernels.fp8 import triton_quantize

    major, minor = current_target().compute_capability or _LEAST_CAPABILITY
    return jax_triton.triton_call(
        *arrays,
        kernel=getattr(triton_quantize, kernel),
        out_shape=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes),
        grid=(plan.programs,),
        name=f"fp8_{kernel}",
        num_warps=warps,
        num_stages=1,
        compute_capability=10 * major + minor,
        plan=plan,
    )
