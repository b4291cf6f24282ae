"""Activation and matmul in Hopper kernels that keep the hidden layer's gradient in registers.

Where the activation's input is a product with a bias, one kernel computes it together with the activation, and the
backward kernel also computes the sums for the bias's gradient.
"""

import functools
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fused_mlp import mosaic_backward, mosaic_forward
from pallas_kernels.fused_mlp.activations import ACTIVATIONS
from pallas_kernels.fused_mlp.remat import name_products
from pallas_kernels.fused_mlp.request import ActivatedMatmulRequest, BiasedProduct
from pallas_kernels.hopper.matmul import DEPTH, TILE_ROWS, ProductTiling, TiledProduct, single_product
from pallas_kernels.hopper.target import unsupported_target

# Tests set this to run the kernel on a CPU.
INTERPRET = False
_TILINGS = {
    1: (
        ProductTiling(columns=192, stages=4, group=16, turns=True, cluster=2),
        ProductTiling(columns=128, stages=5, group=16, turns=True, cluster=2),
    ),
    2: (ProductTiling(columns=256, stages=3, group=16, cluster=2),),
}
"""Block sizes by the number of inputs of the activation, the first whose columns divide F.

With `turns` the tensor cores multiply for one warpgroup while the other computes the activation's gradient.
"""
_FEWEST_TILES = 132
"""Fewest tiles for which the kernel is chosen: with fewer the plain product is as fast."""


def unsupported_reason(request: ActivatedMatmulRequest) -> str | None:
    """Return the first reason why the Hopper kernel cannot compute this call, or None if it can."""
    reason = unsupported_target(request.target, INTERPRET)
    if reason is not None:
        return reason
    if request.weight.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {request.weight.dtype}"
    (width, depth), rows = request.weight.shape, request.rows
    columns = _tiling(_inputs(request), width).columns
    if rows % TILE_ROWS or width % columns or depth % DEPTH:
        multiples = f"{TILE_ROWS}, {columns} and {DEPTH}"
        return f"rows, F and D must be multiples of {multiples}, got {rows}, {width} and {depth}"
    return None


def lower_priority_reason(request: ActivatedMatmulRequest) -> str | None:
    """Return why XLA's plain matmul is preferred to the Hopper kernel (small arrays), or None if it is not."""
    width = request.weight.shape[0]
    columns = _tiling(_inputs(request), width).columns
    tiles = request.rows // TILE_ROWS * (width // columns)
    if tiles < _FEWEST_TILES and not INTERPRET:
        return f"is for at least {_FEWEST_TILES} tiles of {TILE_ROWS} x {columns}, got {tiles}"
    return None


def _inputs(request: ActivatedMatmulRequest) -> int:
    return ACTIVATIONS[request.activation].inputs


def _tiling(inputs: int, width: int) -> ProductTiling:
    """Return the block sizes for an activation with `inputs` inputs and F = width; no block need divide F."""
    choices = _TILINGS[inputs]
    return next((tiling for tiling in choices if width % tiling.columns == 0), choices[-1])


def make_product(inputs: int, rows: int, width: int, depth: int) -> TiledProduct:
    """Return the compile-time description of the kernel's matmul, d_out [rows, D] @ weight.T with weight [F, D]."""
    return single_product(rows, depth, width, _tiling(inputs, width), transposed=True, interpret=INTERPRET)


def multiply(request: ActivatedMatmulRequest) -> jax.Array:
    """Compute activation(*inputs) @ weight, [..., D], with Hopper kernels."""
    source = request.inputs
    in_kernel = ACTIVATIONS[request.activation].in_kernel
    if isinstance(source, BiasedProduct) and in_kernel is not None and source.x.shape[-1] % DEPTH == 0:
        rows = source.x.reshape(-1, source.x.shape[-1])
        source = source._replace(x=rows, bias=source.bias.astype(jnp.float32))
        out = cast(jax.Array, _multiply_product(request.activation, source, request.weight))
        return out.reshape((*request.shape[:-1], request.weight.shape[1]))
    return _multiply(request.activation, request.compute_inputs(), request.weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(activation: str, inputs: tuple[jax.Array, ...], weight: jax.Array) -> jax.Array:
    return _forward_rule(activation, inputs, weight)[0]


def _forward_rule(activation: str, inputs: tuple[jax.Array, ...], weight: jax.Array) -> tuple:
    hidden = ACTIVATIONS[activation].forward(*inputs)
    out = jnp.dot(hidden.reshape(-1, weight.shape[0]), weight)
    return out.reshape(*hidden.shape[:-1], weight.shape[1]), (inputs, hidden, weight)


def _backward_rule(activation: str, saved: tuple, d_out: jax.Array) -> tuple:
    inputs, hidden, weight = saved
    width, depth = weight.shape
    d_out = d_out.reshape(-1, depth)
    flat = tuple(x.reshape(-1, width) for x in inputs)
    product = make_product(len(flat), d_out.shape[0], width, depth)
    gradient = ACTIVATIONS[activation].gradient
    found, _ = mosaic_backward.gradients(product, gradient, d_out, weight, flat)
    d_weight = lax.dot_general(hidden.reshape(-1, width), d_out, (((0,), (0,)), ((), ())))
    return tuple(value.reshape(x.shape) for value, x in zip(found, inputs, strict=True)), d_weight


_multiply.defvjp(_forward_rule, _backward_rule)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_product(activation: str, source: BiasedProduct, weight: jax.Array) -> jax.Array:
    return _product_forward_rule(activation, source, weight)[0]


def _product_forward_rule(activation: str, source: BiasedProduct, weight: jax.Array) -> tuple:
    (rows, depth), width = source.x.shape, weight.shape[0]
    in_kernel = ACTIVATIONS[activation].in_kernel
    assert in_kernel is not None
    product = single_product(rows, depth, width, _tiling(1, width), interpret=INTERPRET)
    value, hidden = name_products(*mosaic_forward.activated_product(product, in_kernel, *source))
    return jnp.dot(hidden, weight), (source, value, hidden, weight)


def _product_backward_rule(activation: str, saved: tuple, d_out: jax.Array) -> tuple:
    source, value, hidden, weight = saved
    width, depth = weight.shape
    product = make_product(1, d_out.shape[0], width, depth)
    gradient = ACTIVATIONS[activation].gradient
    (d_value,), (sums,) = mosaic_backward.gradients(product, gradient, d_out, weight, (value,), with_sums=True)
    d_weight = lax.dot_general(hidden, d_out, (((0,), (0,)), ((), ())))
    d_first = lax.dot_general(source.x, d_value, (((0,), (0,)), ((), ())))
    d_x = lax.dot_general(d_value, source.weight, (((1,), (1,)), ((), ())))
    return BiasedProduct(d_x, d_first, sums.sum(axis=0)), d_weight


_multiply_product.defvjp(_product_forward_rule, _product_backward_rule)
