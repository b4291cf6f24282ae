"""Parts of sequences, for recurrences: packed documents, and chunks of tokens.

Dims: B batch, T tokens, n chunks of C tokens.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped


def find_documents(ids: jax.Array, shape: tuple[int, ...]) -> tuple[Int[Array, "B T"], jax.Array]:
    """Return the number of each token's document in its row, int32 [B, T], and a mask of the padding, from segment ids.

    Args:
        ids: segment ids; tokens with different neighbouring ids are of different documents, negative ones are padding.
        shape: (B, T), which the ids must have.

    Raises:
        ValueError: the ids have another shape, or are not integers.
    """
    if ids.shape != shape:
        raise ValueError(f"segment_ids must have shape {list(shape)} (batch, length); got {list(ids.shape)}")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"segment_ids must be integers; got {ids.dtype}")
    # Padding before the first token is counted with that token's document, so that a state passes over it.
    begun = jnp.cumsum(ids >= 0, axis=1) > 0
    starts = jnp.pad((ids[:, 1:] != ids[:, :-1]) & begun[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum(starts, axis=1, dtype=jnp.int32), ids < 0


def in_chunks(x: Shaped[Array, "B T ..."], size: int, mode: str = "constant") -> Shaped[Array, "B n C ..."]:
    """Cut a sequence into chunks of `size` tokens; the last is padded with zeros, or as a `mode` of `jnp.pad` says."""
    missing = -x.shape[1] % size
    if missing:
        x = jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)), mode=mode)
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])
