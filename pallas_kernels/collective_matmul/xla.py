"""Backend without overlap: XLA's own matmul, after an all-gather or before a reduce-scatter."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.collective_matmul.request import CollectiveRequest


@dataclass(frozen=True)
class SequentialMultiplier:
    """`Multiplier` without overlap: it communicates, then multiplies, or the other way round."""

    def gather_multiply(
        self, x: jax.Array, weights: tuple[jax.Array, ...], axis_name: str, transposed: bool
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """All-gather x, then multiply it with each weight."""
        gathered = lax.all_gather(x, axis_name, axis=0, tiled=True)
        return tuple(multiply(gathered, w, transposed) for w in weights), gathered

    def multiply_scatter(
        self, xs: tuple[jax.Array, ...], weights: tuple[jax.Array, ...], axis_name: str, transposed: bool
    ) -> jax.Array:
        """Multiply and add the pairs, then reduce-scatter the sum."""
        products = (multiply(x, w, transposed) for x, w in zip(xs, weights, strict=True))
        total = functools.reduce(jnp.add, products)
        return lax.psum_scatter(total, axis_name, scatter_dimension=0, tiled=True)


def multiply(x: jax.Array, w: jax.Array, transposed: bool) -> jax.Array:
    """Compute x @ w, or x @ w.T if `transposed`, in the dtype of x."""
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(x, w, dims, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32)).astype(x.dtype)


def unsupported_reason(request: CollectiveRequest) -> str | None:
    """Return None: everything that `make_request` accepts is supported."""
    del request
    return None


def multiplier(request: CollectiveRequest) -> SequentialMultiplier:
    """Return the products without overlap, the same for every request."""
    del request
    return SequentialMultiplier()
