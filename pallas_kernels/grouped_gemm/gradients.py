"""Differentiable grouped matmul, built from the matmuls of any backend that works in tiles of rows."""

from functools import partial
from typing import Protocol, cast

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels.grouped_gemm.groups import aligned_rows, realign
from pallas_kernels.grouped_gemm.request import GroupedMatmulRequest
from pallas_kernels.weight_only.packed import PackedWeight, is_packed


class Products(Protocol):
    """Interface of a backend's grouped matmuls, for the forward pass and the gradients; hashable.

    Groups of rows are aligned to `tile`, and rows of x outside of every group are 0.
    """

    @property
    def tile(self) -> int:
        """Number of rows in a tile, all of which belong to one group."""
        ...

    def rows(
        self, x: Float[Array, "R _"], weights: Float[Array, "G D F"], sizes: Int32[Array, " G"], transposed: bool
    ) -> Float[Array, "R _"]:
        """Multiply each row with its group's matrix, [R, D] x [G, D, F] -> [R, F]; rows in no group give 0.

        With `transposed`: [R, F] x [G, D, F] -> [R, D].
        """
        ...

    def matrices(
        self, x: Float[Array, "R D"], y: Float[Array, "R F"], sizes: Int32[Array, " G"]
    ) -> Float[Array, "G D F"]:
        """Sum x.T @ y over the rows of each group: x [R, D], y [R, F] -> [G, D, F], the gradient of the matrices.

        The result is 0 for empty groups.
        """
        ...


def multiply(products: Products, request: GroupedMatmulRequest) -> jax.Array:
    """Compute the grouped matmul differentiably; if groups do not start at tile boundaries, copy them there first.

    Packed matrices are constants: their gradient is zero.
    """
    return _multiply(products, request.alignment, request.x, request.weights, request.group_sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(
    products: Products, alignment: int, x: jax.Array, weights: jax.Array | PackedWeight, sizes: jax.Array
) -> jax.Array:
    return _forward(products, alignment, x, weights, sizes)[0]


def _forward(
    products: Products, alignment: int, x: jax.Array, weights: jax.Array | PackedWeight, sizes: jax.Array
) -> tuple:
    rows = x.shape[0]
    x = _to_tiles(products, alignment, x, sizes)
    out = products.rows(x, cast(jax.Array, weights), sizes, False)  # packed ones only for backends that take them
    return _from_tiles(products, alignment, out, sizes, rows), (x, weights, sizes)


def _backward(products: Products, alignment: int, saved: tuple, d_out: jax.Array) -> tuple:
    x, weights, sizes = saved
    rows = d_out.shape[0]
    d_out = _to_tiles(products, alignment, d_out.astype(x.dtype), sizes)
    d_x = products.rows(d_out, weights, sizes, True)
    d_weights = None if is_packed(weights) else products.matrices(x, d_out, sizes)
    return _from_tiles(products, alignment, d_x, sizes, rows), d_weights, None


_multiply.defvjp(_forward, _backward)


def _to_tiles(products: Products, alignment: int, x: jax.Array, sizes: jax.Array) -> jax.Array:
    if alignment == products.tile:
        return x
    rows = max(products.tile, aligned_rows(x.shape[0], sizes.shape[0], products.tile))
    return realign(x, sizes, alignment, products.tile, rows)


def _from_tiles(products: Products, alignment: int, y: jax.Array, sizes: jax.Array, rows: int) -> jax.Array:
    return y if alignment == products.tile else realign(y, sizes, products.tile, alignment, rows)
