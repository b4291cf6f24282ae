"""Mosaic GPU backend of blockwise FP8 matmuls on Hopper: which calls its kernel supports, and its launch."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.fp8 import mosaic_product, triton
from pallas_kernels.fp8.blockwise import BLOCK, Operations, dense
from pallas_kernels.fp8.formats import Quantized
from pallas_kernels.hopper.target import unsupported_target
from pallas_kernels.target import Target, multiprocessors

# Tests set this to run the kernels on a CPU.
INTERPRET = False
CLUSTER = 2
"""Number of programs of a cluster, if it divides the columns of tiles and the kernel is not interpreted."""


def unsupported_reason(target: Target, dtypes: tuple[DTypeLike, ...], sizes: list[tuple[int, int, int]]) -> str | None:
    """Return why the kernel cannot compute FP8 matmuls of these (rows, contracted, outputs) `sizes`, or None."""
    reason = unsupported_target(target, INTERPRET)
    if reason is not None:
        return reason
    if any(jnp.dtype(dtype) != jnp.bfloat16 for dtype in dtypes):
        return f"takes and returns bfloat16, got {', '.join(map(str, dtypes))}"
    uneven = [size for size in sizes if any(n % BLOCK for n in size)]
    if uneven:
        shown = " x ".join(map(str, uneven[0]))
        return f"rows, summed and output dims must be multiples of {BLOCK}, got {shown}"
    return None


def product(pairs: Sequence[tuple[Quantized, Quantized]], dtype: DTypeLike) -> jax.Array:
    """Sum products of block-scaled FP8 matrices, each a [M, K] with the transpose of b [N, K]; the result has `dtype`.

    Scales of 128 x 128 values must be those of b in all pairs, or of the a of a single pair.
    """
    a, b = pairs[0]
    transposed = a.inverse_scale.shape[1] != len(a.values)
    if transposed:
        # Each row of the kernel's left operand has its own scales, so the kernel computes the transpose of the result.
        a, b = b, a
        pairs = [(a, b)]
    rows = len(a.values)
    columns = len(b.values)
    programs = 2 if INTERPRET else multiprocessors()
    # Where tall tiles would leave half of the multiprocessors idle, tiles of half the height take half the time.
    half = mosaic_product.HALF_ROWS
    tall = rows % (2 * half) == 0 and rows // half * (columns // BLOCK) > programs
    spec = mosaic_product.ScaledProduct(
        rows,
        columns,
        tuple(a.values.shape[1] for a, _ in pairs),
        halves=2 if tall else 1,
        columns_scaled=b.inverse_scale.shape[1] == columns,
        transposed=transposed,
        output=jnp.dtype(dtype).name,
        programs=programs,
        cluster=1 if INTERPRET or columns // BLOCK % CLUSTER else CLUSTER,
        interpret=INTERPRET,
    )
    return mosaic_product.product(spec, *pairs)


MOSAIC = Operations(triton.quantize_both, triton.quantize_weight, *dense(product))
