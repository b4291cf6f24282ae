"""The gradients, the same for every backend that works in tiles of rows: three products, and groups laid out for them."""

from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.grouped.groups import aligned_rows, realign
from pallas_kernels.grouped.request import Request


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


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(products: Products, x: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
    return products.rows(x, weights, sizes, False)


def _forward(products: Products, x: jax.Array, weights: jax.Array, sizes: jax.Array) -> tuple:
    return products.rows(x, weights, sizes, False), (x, weights, sizes)


def _backward(products: Products, saved: tuple, d_out: jax.Array) -> tuple:
    x, weights, sizes = saved
    d_out = d_out.astype(x.dtype)
    return products.rows(d_out, weights, sizes, True), products.matrices(x, d_out, sizes), None


_multiply.defvjp(_forward, _backward)


def multiply(products: Products, request: Request) -> jax.Array:
    """The request by these products; groups that are not aligned to whole tiles are copied to where they are."""
    x, sizes, tile = request.x, request.group_sizes, products.tile
    if request.alignment == tile:
        return _multiply(products, x, request.weights, sizes)
    rows = aligned_rows(x.shape[0], sizes.shape[0], tile)
    if rows == 0:
        return jnp.zeros((x.shape[0], request.weights.shape[2]), x.dtype)
    aligned = realign(x, sizes, request.alignment, tile, rows)
    out = _multiply(products, aligned, request.weights, sizes)
    return realign(out, sizes, tile, request.alignment, x.shape[0])
