"""`copy_newest` in XLA: a gather of all slots of the page tables."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels.page_copies.request import PageCopyRequest


def copy(request: PageCopyRequest) -> tuple[jax.Array, jax.Array]:
    """Compute `copy_newest` in XLA; slots before the first token have that one's numbers."""
    index, _ = places_of(request.table, request.lengths, request.page_size)
    keys, values = (x.reshape(-1, *x.shape[2:])[index].astype(request.dtype) for x in (request.keys, request.values))
    return keys, values


def places_of(
    table: Int[Array, "R W"], lengths: Int[Array, " R"], page_size: int
) -> tuple[Int[Array, "R slots"], Int[Array, "R slots"]]:
    """Return the place in the cache of each slot of the copies, and the number of its token: negative ones are none."""
    width = table.shape[1] * page_size
    tokens = jnp.arange(width, dtype=jnp.int32) - width + lengths[:, None]
    page = jnp.take_along_axis(table, jnp.maximum(tokens, 0) // page_size, axis=1)
    return page * page_size + jnp.maximum(tokens, 0) % page_size, tokens
