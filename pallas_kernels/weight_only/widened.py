"""Matmul of many rows with a packed weight: a kernel writes the weight in the dtype of x, and XLA multiplies with it.

With many rows a product is limited by the tensor cores, and writing the weight takes a small part of its time. XLA too
writes weights of lookup tables and with 2:4 sparsity, but slowly, and its matmuls of integers take longer than those of
bfloat16.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.target import Target
from pallas_kernels.triton_support import triton_call
from pallas_kernels.weight_only import triton, xla
from pallas_kernels.weight_only.formats import (
    Float8Format,
    IntegerFormat,
    RoundedInputFloat8Format,
    RoundedInputFormat,
    TwoOfFourFormat,
)
from pallas_kernels.weight_only.packed import PackedWeight
from pallas_kernels.weight_only.request import PackedMatmulRequest
from pallas_kernels.weight_only.triton import ProductPlan, Tile, kernel_arrays, make_plan, pair_bytes

_WARPS = 4
_MOST_STEPS = 8
_ROWS_TO_WRITE = 512
"""Rows from which on writing integers and FP8 pays.

With 512 rows XLA computed the prompts of an 8B in 1.29 (4 bits) and 1.46 (8 bits) of the time of bfloat16, with 8,192
rows in 1.10 and 1.13. Writing the weights takes as long as moving 18 and 21 GB: 0.27 and 0.32 of that time with 512
rows, 0.03 with 8,192. With fewer rows that would be most of the time.
"""


def unsupported_format(weight: PackedWeight) -> str | None:
    """Return why no kernel writes a packed weight for products of many rows, or None if one does."""
    if isinstance(weight.format, RoundedInputFormat | RoundedInputFloat8Format):
        return f"is for weights whose products take inputs as they are; the weight is {weight.format}"
    return triton.unsupported_format(weight)


def unsupported_reason(request: PackedMatmulRequest) -> str | None:
    """Return why this backend cannot compute a matmul with a packed weight, or None if it can."""
    if reason := triton.unsupported_device(request.target) or unsupported_format(request.weight):
        return reason
    least = triton.most_rows(request.weight) + 1
    if request.x.shape[0] < least:
        return f"takes {least} rows or more; got {request.x.shape[0]}"
    return triton.unsupported_matrix(request)


def lower_priority_reason(request: PackedMatmulRequest) -> str | None:
    """Return why XLA should multiply instead, or None: it reads some weights as stored, others it writes too."""
    weight = request.weight
    blocks = isinstance(weight.format, Float8Format) and weight.format.rows is not None
    if isinstance(weight.format, IntegerFormat | Float8Format) and not blocks and request.x.shape[0] < _ROWS_TO_WRITE:
        return f"integers and FP8, which XLA reads as stored, are written for {_ROWS_TO_WRITE} rows or more"
    return None


def multiply(request: PackedMatmulRequest) -> Float[Array, "rows out"]:
    """Multiply x with the transposed packed matrix; the gradient of x is computed in the same way."""
    return _product(request.out_dtype, request.target, request.x, request.weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(out_dtype: jax.typing.DTypeLike, target: Target, x: jax.Array, weight: PackedWeight) -> jax.Array:
    matrix, scales = widen(PackedMatmulRequest(x, weight, out_dtype, target))
    y = jax.lax.dot_general(x, matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return (y if scales is None else y * scales.astype(jnp.float32)).astype(out_dtype)


def _product_forward(
    out_dtype: jax.typing.DTypeLike, target: Target, x: jax.Array, weight: PackedWeight
) -> tuple[jax.Array, tuple[jax.Array, PackedWeight]]:
    return _product(out_dtype, target, x, weight), (x, weight)


def gradients(
    out_dtype: jax.typing.DTypeLike, target: Target, saved: tuple[jax.Array, PackedWeight], d_y: jax.Array
) -> tuple[jax.Array, PackedWeight]:
    """Return the gradients of x and of the weight, for `jax.custom_vjp` of products with a packed weight."""
    x, weight = saved
    # Otherwise XLA would write the weight once, and keep it from the forward pass to the backward pass.
    weight, d_y = jax.lax.optimization_barrier((weight, d_y))
    # Where the weight is frozen, as under adapters, XLA drops its gradient.
    _, backward = jax.vjp(lambda weight: xla.multiply(PackedMatmulRequest(x, weight, out_dtype, target)), weight)
    matrix, scales = widen(PackedMatmulRequest(x, weight, out_dtype, target))
    # The largest scale is left for the result, so that float16 does not underflow.
    largest = 1.0 if scales is None else jnp.maximum(jnp.abs(scales.astype(jnp.float32)).max(), 1e-30)
    scaled = d_y if scales is None else d_y * (scales.astype(jnp.float32) / largest)
    d_x = jnp.matmul(scaled.astype(x.dtype), matrix, preferred_element_type=jnp.float32) * largest
    return d_x.astype(x.dtype), backward(d_y)[0]


_product.defvjp(_product_forward, gradients)


def widen(request: PackedMatmulRequest) -> tuple[Float[Array, "out in"], Float[Array, " out"] | None]:
    """Write the packed matrix in the dtype of x; return it, and the scales of its outputs if they are left to do."""
    from pallas_kernels.weight_only.triton_widen import widen_kernel, widen_sparse_kernel

    weight = request.weight
    plan = widening_plan(request)
    scales = None
    if isinstance(weight.format, TwoOfFourFormat):
        kernel = widen_sparse_kernel
        arrays = (weight.arrays["values"], pair_bytes(weight.arrays["kept"]))
    else:
        kernel = widen_kernel
        arrays = kernel_arrays(weight, plan, request.x.dtype)
        if not plan.scaled and "scales" in weight.arrays:
            scales = weight.arrays["scales"][:, 0]
    major, minor = request.target.compute_capability or (0, 0)
    matrix = triton_call(
        *arrays,
        kernel=kernel,
        out_shape=jax.ShapeDtypeStruct((plan.outputs, plan.inputs), request.x.dtype),
        grid=(plan.outputs // plan.block_out, plan.tile.ranges),
        name="widen_weight",
        num_warps=_WARPS,
        compute_capability=10 * major + minor,
        plan=plan,
    )
    return matrix, scales


def widening_plan(request: PackedMatmulRequest) -> ProductPlan:
    """Return the constants of the kernel that writes a weight, 16 KB in a step of a program if the shape allows.

    Scales of whole outputs are left to the result, in which they are not rounded to 16 bits.
    """
    plan = make_plan(request, Tile(16, 32, 1, 1, _WARPS, 1))
    together = plan.outputs // plan.tables
    within = plan.inputs if plan.groups == 1 else plan.group_size
    block_out = next(size for size in (64, 32, 16) if together % size == 0)
    block_in = next(size for size in (128, 64, 32) if within % size == 0)
    blocks = plan.inputs // block_in
    # A program reads a table once for its steps.
    steps = next(count for count in range(_MOST_STEPS, 0, -1) if blocks % count == 0)
    tile = Tile(block_out, block_in, blocks // steps, 1, _WARPS, 1, assembly=request.x.dtype == jnp.bfloat16)
    later = plan.groups == 1 and plan.scale_rows == 1 and not plan.entries
    return dataclasses.replace(plan, tile=tile, scaled=plan.scaled and not later)
