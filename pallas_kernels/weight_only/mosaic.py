"""Matmul of many rows with integers of 4 or 8 bits on Hopper, converted on their way to the tensor cores.

Which calls the kernel of `mosaic_product` supports, and its launch. The weight is not written in 16 bits, as `widened`
does, so that a product of a few hundred rows gains from its few bytes too.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.hopper.target import unsupported_target
from pallas_kernels.target import Target, multiprocessors
from pallas_kernels.weight_only import mosaic_product, triton, widened
from pallas_kernels.weight_only.formats import IntegerFormat, RoundedInputFormat
from pallas_kernels.weight_only.mosaic_product import DEPTH, TILE_OUTPUTS, IntegerProduct
from pallas_kernels.weight_only.packed import PackedWeight
from pallas_kernels.weight_only.request import PackedMatmulRequest

# Tests set this to run the kernel on a CPU.
INTERPRET = False
_TILE_ROWS = (64, 128, 192, 256)
_ROWS_OF_A_TILES_START = 32
"""Rows of x whose products take as long as the start and end of a tile, in the choice of `tile_rows`."""


def unsupported_reason(request: PackedMatmulRequest) -> str | None:
    """Return why this backend cannot compute a matmul with a packed weight, or None if it can."""
    weight = request.weight
    if reason := unsupported_target(request.target, INTERPRET):
        return reason
    if not isinstance(weight.format, IntegerFormat) or isinstance(weight.format, RoundedInputFormat):
        return f"multiplies integers with inputs as they are; the weight is {weight.format}"
    if "zeros" in weight.arrays:
        return "reads integers without zero points; the weight has some"
    if request.x.dtype != jnp.bfloat16:
        return f"needs activations in bfloat16; got {request.x.dtype}"
    if jnp.dtype(request.out_dtype).itemsize != 2:
        return f"returns numbers of 16 bits; got {jnp.dtype(request.out_dtype)}"
    if request.x.shape[0] <= triton.MOST_ROWS:
        return f"takes {triton.MOST_ROWS + 1} rows or more; got {request.x.shape[0]}"
    outputs, inputs = math.prod(weight.outputs), math.prod(weight.inputs)
    if outputs % TILE_OUTPUTS or inputs % DEPTH:
        return f"needs outputs that are a multiple of {TILE_OUTPUTS} and inputs of {DEPTH}; got {outputs} and {inputs}"
    groups = weight.arrays["scales"].shape[1]
    if groups > 1 and inputs // groups % DEPTH:
        return f"needs groups of a multiple of {DEPTH} inputs; got {inputs // groups}"
    return None


def lower_priority_reason(request: PackedMatmulRequest) -> str | None:
    """Return why another backend should multiply instead, unless the caller names this one."""
    del request
    return "was compiled for Hopper and interpreted, but has not run on a GPU"


def multiply(request: PackedMatmulRequest) -> Float[Array, "rows out"]:
    """Multiply x with the transposed packed matrix; gradients are computed with the weight written in 16 bits."""
    return _product(request.out_dtype, request.target, request.x, request.weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(out_dtype: jax.typing.DTypeLike, target: Target, x: jax.Array, weight: PackedWeight) -> jax.Array:
    spec = product_plan(PackedMatmulRequest(x, weight, out_dtype, target))
    rows = x.shape[0]
    padded = jnp.pad(x, ((0, spec.rows - rows), (0, 0)))
    return mosaic_product.product(spec, padded, weight.arrays["q"], weight.arrays["scales"], out_dtype)[:rows]


def _product_forward(
    out_dtype: jax.typing.DTypeLike, target: Target, x: jax.Array, weight: PackedWeight
) -> tuple[jax.Array, tuple[jax.Array, PackedWeight]]:
    return _product(out_dtype, target, x, weight), (x, weight)


_product.defvjp(_product_forward, widened.gradients)


def product_plan(request: PackedMatmulRequest) -> IntegerProduct:
    """Return the constants of the kernel for a call."""
    weight = request.weight
    outputs = math.prod(weight.outputs)
    programs = 2 if INTERPRET else multiprocessors()
    rows = tile_rows(request.x.shape[0], outputs, programs)
    return IntegerProduct(
        rows=-(-request.x.shape[0] // rows) * rows,
        outputs=outputs,
        inputs=math.prod(weight.inputs),
        bits=triton.stored_bits(request),
        groups=weight.arrays["scales"].shape[1],
        tile_rows=rows,
        programs=programs,
        interpret=INTERPRET,
    )


def tile_rows(rows: int, outputs: int, programs: int) -> int:
    """Return the rows of x in a tile with which the busiest program has the least to do.

    Larger tiles read less of the operands and convert the weight less often; smaller ones leave fewer programs idle.
    """

    def time(size: int) -> int:
        tiles = -(-rows // size) * (outputs // TILE_OUTPUTS)
        return -(-tiles // programs) * (size + _ROWS_OF_A_TILES_START)

    return min(reversed(_TILE_ROWS), key=time)
