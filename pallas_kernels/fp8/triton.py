"""FP8 quantization by Triton kernels, which read an array once and write it and its transpose.

As XLA fusions, blockwise scales take three reads of the array: for the maxima along rows, for those along columns, and
for the rounding. With one scale XLA reads it only once too, but writes the transpose at less than half of the memory
bandwidth.
"""

import dataclasses
import importlib.util
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

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
from pallas_kernels.target import automatic_axes, current_target, multiprocessors
from pallas_kernels.triton_support import triton_call

_LEAST_CAPABILITY = (8, 9)
_WARPS = 16
_BLOCKWISE_TUNING = {1: (8, 1, 0), 2: (16, 1, 0), 3: (16, 3, 1)}
"""Warps per program, stages, and programs on a multiprocessor (0: one per tile), by number of input arrays."""
_TILE_COLUMNS_TOGETHER = 8
"""Columns of tiles that are taken together, so that what is written of an array and of its transpose lies close by."""
_TILE_WARPS = 8
"""Warps per program of the kernels with a scale per tile.

With 8, SwiGLU of 32768 x 8192 takes 0.57 ms on an H200; with 16, 0.78 ms.
"""


def _padded(count: int) -> int:
    """Return the smallest power of two not below `count`."""
    return 1 << (count - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class QuantizePlan:
    """Compile-time constants of a Triton kernel that quantizes an array to FP8.

    Attributes:
        rows, columns: shape of the array.
        width: number of columns of a tile.
        limit: largest number of the format.
        history_start: offset in the state of the magnitudes that determine the scale.
        history: number of these magnitudes.
        default_amax: amax used if they are all zero.
    """

    rows: int
    columns: int
    width: int = BLOCK
    limit: float = 0.0
    history_start: int = 0
    history: int = 1
    default_amax: float = 0.0

    @property
    def column_tiles(self) -> int:
        """Number of tiles along the columns."""
        return self.columns // self.width

    @property
    def programs(self) -> int:
        """Number of Triton programs, one for each tile of the array."""
        return self.rows // BLOCK * self.column_tiles

    @property
    def padded_history(self) -> int:
        """Length of the history of magnitudes, rounded up to a power of two."""
        return _padded(self.history)


@dataclasses.dataclass(frozen=True)
class BlocksPlan:
    """Compile-time constants of a Triton kernel of blockwise FP8.

    Attributes:
        rows, columns: shape of the array.
        shared: True if the 128 x 128 values of a tile of the transpose share a scale, False for one per 128 values.
        programs: number of programs, which take the tiles in turn.
        stages: tiles of a program that are in flight: one is computed while the others are loaded.
        together: columns of tiles that are taken together, a divisor of their number.
    """

    rows: int
    columns: int
    shared: bool
    programs: int
    stages: int
    together: int = 1

    @property
    def row_tiles(self) -> int:
        """Number of tiles along the rows."""
        return self.rows // BLOCK

    @property
    def column_tiles(self) -> int:
        """Number of tiles along the columns."""
        return self.columns // BLOCK

    @property
    def tiles(self) -> int:
        """Number of tiles of 128 x 128 values."""
        return self.row_tiles * self.column_tiles


@dataclasses.dataclass(frozen=True)
class MaximaPlan:
    """Compile-time constants of the kernel that gathers a step's largest magnitudes for delayed scaling.

    Attributes:
        inputs, weights, gradients: number of magnitudes of each role.
        history: number of magnitudes per role in a state.
        programs: number of roles.
    """

    inputs: int
    weights: int
    gradients: int
    history: int
    programs: int = 3

    @property
    def padded_history(self) -> int:
        """Length of the history of magnitudes, rounded up to a power of two."""
        return _padded(self.history)


class QuantizedWithTranspose(NamedTuple):
    """An array x [M, K] in FP8 with one scale, and its transpose."""

    values: Quantized
    """x [M, K]."""
    transposed: Quantized
    """Transpose of x [K, M]."""
    maxima: jax.Array
    """Maxima of |x| over parts of x, float32 [parts]."""


def quantize_both(source: Source, arrays: Sequence[jax.Array], shared: bool) -> list[tuple[Quantized, Quantized]]:
    """Quantize each array x that `source` computes, and its transpose, as `blockwise.quantize_both` does."""
    if not kernel_applies(arrays[0]):
        return blockwise.quantize_both(source, arrays, shared)
    warps, stages, parallel = _BLOCKWISE_TUNING[sum(x.ndim == 2 for x in arrays)]
    rows, columns = shape = arrays[0].shape
    tiles = rows // BLOCK * (columns // BLOCK)
    together = math.gcd(_TILE_COLUMNS_TOGETHER, columns // BLOCK)
    plan = BlocksPlan(rows, columns, shared, min(parallel * multiprocessors() or tiles, tiles), stages, together)
    shapes: tuple[tuple[tuple[int, ...], DTypeLike], ...] = (
        (shape, E4M3),
        ((columns // BLOCK, rows), jnp.float32),
        (shape[::-1], E4M3),
        ((rows // BLOCK, columns // BLOCK if shared else columns), jnp.float32),
    )
    shapes *= len(jax.eval_shape(source.compute, *arrays))
    results = iter(launch(source.blocks_kernel, plan, shapes, *arrays, warps=warps, stages=stages))
    found = [Quantized(values, inverse) for values, inverse in zip(results, results, strict=True)]
    return list(zip(found[::2], found[1::2], strict=True))


def quantize_weight(weight: jax.Array) -> tuple[Quantized, jax.Array]:
    """Return a weight [K, N] in FP8 with a scale per 128 x 128 values, and its FP8 values transposed, [N, K].

    One kernel computes both, if it runs on the target device and supports the shape.
    """
    if not kernel_applies(weight):
        return blockwise.quantize_weight_both(weight)
    rows, columns = weight.shape
    plan = QuantizePlan(rows, columns, limit=largest(E4M3))
    blocks = (rows // BLOCK, columns // BLOCK)
    shapes = ((weight.shape, E4M3), (weight.shape[::-1], E4M3), (blocks, jnp.float32))
    values, transposed, inverse = launch("weight_kernel", plan, shapes, weight)
    return Quantized(values, inverse), transposed


def cast_both(
    source: Source, arrays: Sequence[jax.Array], dtype: DTypeLike, expected: Sequence[AmaxHistory | None]
) -> list[QuantizedWithTranspose]:
    """Quantize each array that `source` computes, and its transpose, with one scale per tensor.

    Args:
        source: function from the arrays to the operands.
        arrays: inputs of the source, of which the first is [M, K].
        dtype: FP8 format; the cast saturates.
        expected: for each operand the magnitudes that determine its scale; None to use its own amax.
    """
    if not kernel_applies(arrays[0]):
        return [_cast_plainly(x, dtype, history) for x, history in zip(source.compute(*arrays), expected, strict=True)]
    if source.tiles_kernel is not None and all(history is None for history in expected):
        return _cast_by_tiles(source.tiles_kernel, source, arrays, dtype, len(expected))
    given = [history for history in expected if history is not None]
    histories = [history.state for history in given] or [
        absolute_maximum(x).reshape(1) for x in source.compute(*arrays)
    ]
    plan = _plan(source, arrays[0], dtype, given)
    shape = arrays[0].shape
    shapes = ((shape, dtype), (shape[::-1], dtype), ((plan.programs,), jnp.float32), ((), jnp.float32))
    results = launch(source.kernel, plan, shapes * len(expected), *arrays, *histories)
    return [_both(*results[start : start + 4]) for start in range(0, len(results), 4)]


def _plan(source: Source, x: jax.Array, dtype: DTypeLike, given: Sequence[AmaxHistory]) -> QuantizePlan:
    rows, columns = x.shape
    plan = QuantizePlan(rows, columns, source.width, largest(dtype))
    if not given:
        return plan
    amax_history = given[0]
    length = given[0].state.shape[-1]
    return dataclasses.replace(
        plan,
        history_start=amax_history.role * length,
        history=length,
        default_amax=amax_history.default_amax,
    )


def _cast_by_tiles(
    kernel: str, source: Source, arrays: Sequence[jax.Array], dtype: DTypeLike, count: int
) -> list[QuantizedWithTranspose]:
    """Quantize arrays in two passes: each tile with its own scale, then again with one scale for the whole array.

    Reading the FP8 tiles again moves fewer bytes than computing the operands twice.
    """
    shape = arrays[0].shape
    plan = _plan(source, arrays[0], dtype, ())
    tiles = launch(kernel, plan, ((shape, dtype), ((plan.programs,), jnp.float32)) * count, *arrays, warps=_TILE_WARPS)
    found = []
    for x, maxima in zip(tiles[::2], tiles[1::2], strict=True):
        shapes = ((shape, dtype), (shape[::-1], dtype), ((), jnp.float32))
        history = maxima.max().reshape(1)
        values, transposed, inverse = launch("recast_kernel", plan, shapes, x, maxima, history, warps=_TILE_WARPS)
        found.append(_both(values, transposed, history, inverse))
    return found


def _cast_plainly(x: jax.Array, dtype: DTypeLike, expected: AmaxHistory | None) -> QuantizedWithTranspose:
    amax = absolute_maximum(x)
    scale = power_of_two_scale(amax if expected is None else expected.amax, dtype)
    # Without the barrier XLA may cancel the rounding against the conversion back in front of a matmul.
    values = jax.lax.optimization_barrier(saturating_cast(x, scale, dtype))
    return _both(values, values.T, amax.reshape(1), 1.0 / scale)


def _both(
    values: jax.Array, transposed: jax.Array, maxima: jax.Array, inverse_scale: jax.Array
) -> QuantizedWithTranspose:
    return QuantizedWithTranspose(Quantized(values, inverse_scale), Quantized(transposed, inverse_scale), maxima)


def state_gradient(state: jax.Array, maxima: Sequence[jax.Array]) -> jax.Array:
    """Return the gradient that carries new maxima for FP8 scaling: they fill column 0, and the rest is zero.

    The magnitudes are one-dimensional arrays. XLA needs several kernels.
    """
    if not _kernels_available():
        return plain_state_gradient(state, maxima)
    inputs, weights, gradients = maxima
    plan = MaximaPlan(inputs.size, weights.size, gradients.size, state.shape[-1])
    (found,) = launch("maxima_kernel", plan, ((state.shape, jnp.float32),), *maxima)
    return found


def kernel_applies(x: jax.Array) -> bool:
    """Return True if the quantization kernels run on the target device and support the shape of x."""
    return _kernels_available() and x.ndim == 2 and not any(n % BLOCK for n in x.shape)


def _kernels_available() -> bool:
    """Return True if Triton kernels can run on the target device, with no mesh axes that XLA partitions over."""
    capability = current_target().compute_capability
    installed = all(importlib.util.find_spec(name) for name in ("triton", "jax_triton"))
    return installed and capability is not None and capability >= _LEAST_CAPABILITY and not automatic_axes()


def launch(
    kernel: str,
    plan: QuantizePlan | BlocksPlan | MaximaPlan,
    shapes: Sequence[tuple[tuple[int, ...], DTypeLike]],
    *arrays: jax.Array,
    warps: int = _WARPS,
    stages: int = 1,
) -> tuple[jax.Array, ...]:
    """Run a quantization kernel, given by name, on arrays; `shapes` are the (shape, dtype) of its results."""
    from pallas_kernels.fp8 import triton_quantize, triton_quantize_blocks

    major, minor = current_target().compute_capability or _LEAST_CAPABILITY
    return triton_call(
        *arrays,
        kernel=getattr(triton_quantize_blocks if isinstance(plan, BlocksPlan) else triton_quantize, kernel),
        out_shape=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes),
        grid=(plan.programs,),
        name=f"fp8_{kernel}",
        num_warps=warps,
        num_stages=stages,
        compute_capability=10 * major + minor,
        plan=plan,
    )
