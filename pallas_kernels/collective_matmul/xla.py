"""Backend without overlap: a matmul of XLA, after an all-gather or before a reduce-scatter."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.collective_matmul.request import CollectiveRequest


@dataclass(frozen=True)
class SequentialMultiplier:
    """Collective matmuls without overlap: all-gather and then multiply, or multiply and then reduce-scatter."""

    def gather_multiply(
        self, x: jax.Array, weights: tuple[jax.Array, ...], axis_name: str, transposed: bool
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """All-gather the rows of x, then multiply them with each weight."""
        gathered = lax.all_gather(x, axis_name, axis=0, tiled=True)
        return tuple(multiply(gathered, w, transposed) for w in weights), gathered

    def multiply_scatter(
        self, xs: tuple[jax.Array, ...], weights: tuple[jax.Array, ...], axis_name: str, transposed: bool
    ) -> jax.Array:
        """Sum the products of all pairs (x, w), then reduce-scatter the rows of the sum."""
        products = (multiply(x, w, transposed) for x, w in zip(xs, weights, strict=True))
        total = functools.reduce(jnp.add, products)
        return lax.psum_scatter(total, axis_name, scatter_dimension=0, tiled=True)


def multiply(x: jax.Array, w: jax.Array, transposed: bool) -> jax.Array:
    """Compute x @ w, or x @ w.T if `transposed`, in the dtype of x."""
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return lax.dot_general(x, w, dims, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32)).astype(x.dtype)


def unsupported_reason(request: CollectiveRequest) -> str | None:
    """Return None, as this backend computes every collective matmul."""
    del request
    return None


def multiplier(request: CollectiveRequest) -> SequentialMultiplier:
    """Return the object that computes collective matmuls without overlap."""
    del request
    return SequentialMultiplier()
