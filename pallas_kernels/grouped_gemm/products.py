"""The gradients, the same for every backend that works in tiles: three products, and rows laid out for them."""

from functools import partial
from typing import Protocol

import jax

from pallas_kernels.grouped_gemm.groups import aligned_rows, realign
from pallas_kernels.grouped_gemm.request import GroupedMatmulRequest


class Products(Protocol):
    """What a backend computes; hashable. Rows are aligned to `tile`, and rows of x that belong to no group are 0."""

    @property
    def tile(self) -> int:
        """Rows of a tile, which belongs to one group."""
        ...

    def rows(self, x: jax.Array, weights: jax.Array, sizes: jax.Array, transposed: bool) -> jax.Array:
        """[R, D] x [G, D, F] -> [R, F]; `transposed`: [R, F] x [G, D, F] -> [R, D]. Rows of no group are 0."""
        ...

    def matrices(self, x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
        """The sum over a group's rows of x [R, D] times y [R, F] -> [G, D, F]; empty groups are 0."""
        ...


def multiply(products: Products, request: GroupedMatmulRequest) -> jax.Array:
    """The request by these products; groups that are not aligned to their tiles are copied to where they are."""
    return _multiply(products, request.alignment, request.x, request.weights, request.group_sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(products: Products, alignment: int, x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return _forward(products, alignment, x, weights, sizes)[0]


def _forward(products: Products, alignment: int, x: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple:
    rows, x = x.shape[0], _to_tiles(products, alignment, x, sizes)
    out = products.rows(x, weights, sizes, False)
    return _from_tiles(products, alignment, out, sizes, rows), (x, weights, sizes)


def _backward(products: Products, alignment: int, saved: tuple, d_out: jax.Array) -> tuple:
    x, weights, sizes = saved
    rows, d_out = d_out.shape[0], _to_tiles(products, alignment, d_out.astype(x.dtype), sizes)
    d_x = products.rows(d_out, weights, sizes, True)
    return _from_tiles(products, alignment, d_x, sizes, rows), products.matrices(x, d_out, sizes), None


_multiply.defvjp(_forward, _backward)


def _to_tiles(products: Products, alignment: int, x: jax.Array, sizes: jax.Array) -> jax.Array:
    if alignment == products.tile:
        return x
    rows = max(products.tile, aligned_rows(x.shape[0], sizes.shape[0], products.tile))
    return realign(x, sizes, alignment, products.tile, rows)


def _from_tiles(products: Products, alignment: int, y: jax.Array, sizes: jax.Array, rows: int) -> jax.Array:
    return y if alignment == products.tile else realign(y, sizes, products.tile, alignment, rows)
