"""`paged_attention`: attention of each sequence's newest tokens to its keys and values, which are in pages."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def paged_attention(
    q: Float[Array, "B T N H"],
    k_pages: Float[Array, "P page K H"],
    v_pages: Float[Array, "P page K H"],
    page_table: Int[Array, "B pages"],
    lengths: Int[Array, " B"],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N H"]:
    """Compute the attention of each sequence's last T tokens to the tokens up to them.

    Args:
        q: queries of the tokens at the positions lengths - T .. lengths - 1. Those before position 0 are padding, whose
            outputs have no meaning.
        k_pages, v_pages: the pages of all sequences, which hold the keys and values of the queries' tokens too.
        page_table: int32 pages of each sequence in order; entries after the last page are ignored but must be valid.
        lengths: int32 tokens of each sequence, the T new ones included.
        scale: factor of the scores; default 1 / sqrt(H).
        soft_cap: cap c of the scores, c tanh(score / c).
        window: keys that a query sees, itself included; None: all before it.
        implementation: name of the backend, "xla"; None takes the first that supports the call.

    Returns:
        out [B, T, N, H] in the dtype of q.

    Raises:
        ValueError: there is no backend of this name.
    """
    if implementation not in (None, "xla"):
        raise ValueError(f"paged_attention has no backend {implementation!r}; known: 'xla'")
    batch, length, num_heads, width = q.shape
    k, v = (x[page_table].reshape(batch, -1, *x.shape[2:]) for x in (k_pages, v_pages))
    positions = lengths[:, None] - length + jnp.arange(length, dtype=jnp.int32)
    keys = jnp.arange(k.shape[1], dtype=jnp.int32)
    visible = keys <= positions[:, :, None]
    if window is not None:
        visible &= keys > positions[:, :, None] - window
    grouped = q.reshape(batch, length, k.shape[2], -1, width)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32)
    scores *= width**-0.5 if scale is None else scale
    if soft_cap:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)
