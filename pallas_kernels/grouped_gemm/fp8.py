"""Backends of the grouped matmul in FP8: quantization and gradients of `fp8.blockwise` with products of groups.

Groups of rows start at multiples of 128 rows, so that no block of 128 values has rows of two groups.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Backend
from pallas_kernels.fp8 import blockwise, triton
from pallas_kernels.fp8.blockwise import BLOCK, Groups, Operations, dequantize_blocks
from pallas_kernels.fp8.formats import Quantized
from pallas_kernels.fp8.options import Fp8Options
from pallas_kernels.grouped_gemm import mosaic
from pallas_kernels.grouped_gemm.mosaic_fp8 import Fp8Kernels
from pallas_kernels.grouped_gemm.xla import Tiles
from pallas_kernels.target import Target, current_target, multiprocessors


@dataclass(frozen=True)
class Fp8GroupedRequest:
    """Checked arguments of one grouped matmul in FP8, whose dims are multiples of 128.

    Attributes:
        x: rows [R, D].
        weights: matrices that x is multiplied with, each [G, D, F].
        group_sizes: int32 [G]; groups start at multiples of 128 rows.
        target: the device that the call is lowered for.
    """

    x: jax.Array
    weights: tuple[jax.Array, ...]
    group_sizes: jax.Array
    target: Target = field(default_factory=current_target)

    def __str__(self) -> str:
        shapes = " and ".join(str(list(weight.shape)) for weight in self.weights)
        return f"x {list(self.x.shape)} {self.x.dtype.name} weights {shapes} on {self.target}"


def _unsupported_by_mosaic(request: Fp8GroupedRequest) -> str | None:
    reason = mosaic.unsupported_target(request.target)
    if reason is not None:
        return reason
    return None if request.x.dtype == jnp.bfloat16 else f"takes bfloat16, got {request.x.dtype}"


def _multiply(operations: Operations, request: Fp8GroupedRequest) -> tuple[jax.Array, ...]:
    options = Fp8Options(1, request.x.dtype.name, request.x.dtype.name, "e4m3")
    none = (None,) * len(request.weights)
    return blockwise.multiply(operations, options, request.x, (), request.weights, none, groups=request.group_sizes)


def _kernels(dtype: DTypeLike) -> Fp8Kernels:
    return Fp8Kernels(jnp.dtype(dtype).name, 2 if mosaic.INTERPRET else multiprocessors(), mosaic.INTERPRET)


def _mosaic_rows(pairs: Sequence[tuple[Quantized, Quantized]], dtype: DTypeLike, groups: Groups) -> jax.Array:
    assert groups is not None
    return _kernels(dtype).rows(groups, *pairs)


def _mosaic_weights(a: Quantized, b: Quantized, dtype: DTypeLike, groups: Groups) -> jax.Array:
    assert groups is not None
    return _kernels(dtype).matrices(groups, a, b)


def _xla_rows(pairs: Sequence[tuple[Quantized, Quantized]], dtype: DTypeLike, groups: Groups) -> jax.Array:
    assert groups is not None
    count = groups.shape[0]

    def product(a: Quantized, b: Quantized) -> jax.Array:
        depth = a.values.shape[1]
        matrices = dequantize_blocks(b, dtype)
        side_by_side = matrices.shape[1] != depth
        if side_by_side:
            matrices = matrices.reshape(-1, count, depth).transpose(1, 2, 0)
        else:
            matrices = matrices.reshape(count, -1, depth)
        return Tiles(BLOCK).rows(dequantize_blocks(a, dtype), matrices, groups, not side_by_side)

    return functools.reduce(jnp.add, (product(a, b).astype(jnp.float32) for a, b in pairs)).astype(dtype)


def _xla_weights(a: Quantized, b: Quantized, dtype: DTypeLike, groups: Groups) -> jax.Array:
    assert groups is not None
    found = Tiles(BLOCK).matrices(dequantize_blocks(a, dtype).T, dequantize_blocks(b, dtype).T, groups)
    return found.reshape(-1, found.shape[2])


FP8_BACKENDS: tuple[Backend[Fp8GroupedRequest], ...] = (
    Backend(
        "mosaic",
        "our Hopper kernels, one launch for all groups",
        _unsupported_by_mosaic,
        functools.partial(
            _multiply, Operations(triton.quantize_both, triton.quantize_weight, _mosaic_rows, _mosaic_weights)
        ),
        opaque=True,
    ),
    Backend(
        "xla",
        "the same quantized numbers, multiplied in the dtype of x by a loop over tiles of rows",
        lambda request: None,
        functools.partial(
            _multiply,
            Operations(blockwise.quantize_both, blockwise.quantize_weight_both, _xla_rows, _xla_weights),
        ),
    ),
)
