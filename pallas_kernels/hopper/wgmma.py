"""Matrix products on Hopper's tensor cores: operands in shared memory, float32 accumulators in registers.

`wgmma` multiplies a [64, k] left operand in shared memory or registers with a [k, n] right operand in shared memory and
adds the product to an accumulator in registers, asynchronously: a warpgroup does other work until it loads the
accumulator. Kernels add to an `Accumulator`, and need not know that the interpreter computes some products differently
from the hardware: that is decided here and nowhere else.
"""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.mosaic_api import Ref, ScratchType, pl, plgpu

ROWS = 64
"""Rows of the result of one wgmma: each warpgroup owns this many rows of a tile."""
TILE_ROWS = 8
"""Rows of a tile of `tiled_smem`: arrays in global memory that TMA copies to and from it have a multiple of these."""

Result = TypeVar("Result")
First = TypeVar("First")


def tiled_smem(shape: tuple[int, ...], dtype: DTypeLike, largest_swizzle: int = 128) -> ScratchType:
    """Return the type of a shared-memory buffer [..., rows, columns], tiled and swizzled for wgmma and TMA.

    Args:
        shape: Shape of the buffer; the last dim is contiguous.
        dtype: Element type.
        largest_swizzle: Upper limit of the swizzle in bytes, for buffers that are also read in narrower slices.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = min(plgpu.find_swizzle(shape[-1] * itemsize * 8), largest_swizzle)
    transforms = (plgpu.TilingTransform((TILE_ROWS, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


# --- values in the layout of an accumulator ----------------------------------------------------------------------


def zeros(rows: int, columns: int) -> jax.Array:
    """Return float32 zeros [rows, columns] in the register layout of a tensor-core accumulator."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA)


def filled_rows(value: float, rows: int) -> jax.Array:
    """Return float32 [rows] filled with `value`, in the register layout of one value for each row of an accumulator."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def load_rows(ref: Ref, optimized: bool = True) -> jax.Array:
    """Load a vector [rows] from memory, in the register layout of one value for each row of an accumulator."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=optimized)


def load_columns(ref: Ref, optimized: bool = True) -> jax.Array:
    """Load a vector [columns] from memory, in the register layout of one value for each column of an accumulator."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=optimized)


def broadcast_row_values(values: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcast one value per row, [rows], over the columns of `like` [rows, columns]."""
    return lax.broadcast_in_dim(values, like.shape, [0])


def broadcast_column_values(values: jax.Array, like: jax.Array) -> jax.Array:
    """Broadcast one value per column, [columns], over the rows of `like` [rows, columns]."""
    return lax.broadcast_in_dim(values, like.shape, [1])


# --- products ----------------------------------------------------------------------------------------------------


class Accumulator(Protocol):
    """Float32 accumulator, in registers, of asynchronous tensor-core products (wgmma)."""

    def add(self, left: Ref | jax.Array, right: Ref) -> None:
        """Start adding left @ right to the sum; `left` is in shared memory or registers, `right` in shared memory."""
        ...

    def load(self, pending: int = 0) -> jax.Array:
        """Wait until at most `pending` products of this warpgroup are still running, and return this sum."""
        ...


class _HardwareAccumulator:
    def __init__(self, ref: Ref):
        self._ref = ref

    def add(self, left: Ref | jax.Array, right: Ref) -> None:
        plgpu.wgmma(self._ref, left, right)

    def load(self, pending: int = 0) -> jax.Array:
        return plgpu.wgmma_accumulator_load(self._ref, wait_n=pending)


class _InterpretedAccumulator:
    """Accumulator for interpret mode on a CPU, which computes each product at once with `jnp.dot`."""

    def __init__(self, start: tuple[int, int] | jax.Array):
        self._sum = jnp.zeros(start, jnp.float32) if isinstance(start, tuple) else start

    def add(self, left: Ref | jax.Array, right: Ref) -> None:
        self._sum = self._sum + jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)

    def load(self, pending: int = 0) -> jax.Array:
        del pending
        return self._sum


def accumulate(body: Callable[..., Result], *starts: tuple[int, int] | jax.Array, interpret: bool = False) -> Result:
    """Return body(*accumulators), with one accumulator of tensor-core products for each entry of `starts`.

    Args:
        body: Takes as many `Accumulator`s as there are starts; they live in registers until it returns.
        starts: Shape [rows, columns] of an accumulator that starts from zero, or the float32 value that it starts from.
        interpret: True if the kernel runs in interpret mode, which has no wgmma with a left operand in registers and no
            accumulator that starts from a value: products are then computed with `jnp.dot`. Without such operands it
            may stay False, and wgmma itself is interpreted.
    """
    if interpret:
        return body(*map(_InterpretedAccumulator, starts))

    def scoped(*refs: Ref) -> Result:
        for ref, start in zip(refs, starts, strict=True):
            if not isinstance(start, tuple):
                ref[...] = start
        return body(*map(_HardwareAccumulator, refs))

    shapes = (start if isinstance(start, tuple) else start.shape for start in starts)
    return pl.run_scoped(scoped, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def add_products(
    sums: tuple[jax.Array, ...], *operands: tuple[Callable[[], jax.Array], Ref], interpret: bool
) -> tuple[jax.Array, ...]:
    """Return each sum plus a tensor-core product whose left operand a function computes in registers.

    Each left operand is computed while the product before it runs; all products are waited for at the end. Accumulators
    that are initialized, instead of stored to as in `accumulate`, need one fence and a few registers less; their
    values cannot be read before the end.
    """

    def start(accumulators: Iterable[Accumulator]) -> None:
        for accumulator, (left, right) in zip(accumulators, operands, strict=True):
            accumulator.add(left(), right)

    if interpret:
        accumulators = [_InterpretedAccumulator(value) for value in sums]
        start(accumulators)
        return tuple(accumulator.load() for accumulator in accumulators)
    run = pl.run_state(lambda refs: start(map(_HardwareAccumulator, refs)))
    return run(tuple(plgpu.ACC.init(value) for value in sums))


def multiply(shape: tuple[int, int], start: Callable[[Accumulator], None]) -> jax.Array:
    """Return the float32 sum of the tensor-core products that `start` adds to a new accumulator of this shape."""

    def body(accumulator: Accumulator) -> jax.Array:
        start(accumulator)
        return accumulator.load()

    return accumulate(body, shape)


def multiply_two(
    shape: tuple[int, int], start: Callable[[Accumulator, Accumulator], None], first: Callable[[jax.Array], First]
) -> tuple[First, jax.Array]:
    """Return (first(a), b) for two tensor-core products a and b; `first` runs while b is still being computed.

    Args:
        shape: Shape of both products.
        start: Starts exactly one product into each of the two accumulators.
        first: Called with the value of the first product.
    """

    def body(one: Accumulator, other: Accumulator) -> tuple[First, jax.Array]:
        start(one, other)
        result = first(one.load(pending=1))
        return result, other.load()

    return accumulate(body, shape, shape)
