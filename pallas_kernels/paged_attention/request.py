"""A call of the paged attention with its arguments checked. Dims: B sequences, T new tokens, N and K heads, H width."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import AnyArray
from pallas_kernels.target import Target, current_target


@dataclass(frozen=True)
class PagedAttentionRequest:
    """A paged-attention call with its arguments checked.

    Attributes:
        q: queries [B, T, N, H].
        k_pages, v_pages: [P, page, K, H].
        page_table: int32 [B, pages].
        lengths: int32 [B].
        scale: factor of the scores.
        soft_cap: cap of the scores, or None.
        window: keys that a query sees, or None.
        target: the device that the call is lowered for.
    """

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array
    page_table: jax.Array
    lengths: jax.Array
    scale: float
    soft_cap: float | None
    window: int | None
    target: Target

    def __str__(self) -> str:
        q, pages = self.q, self.k_pages
        return f"q {list(q.shape)} {q.dtype.name} pages {list(pages.shape)} {pages.dtype.name} on {self.target}"


def make_request(
    q: AnyArray,
    k_pages: AnyArray,
    v_pages: AnyArray,
    page_table: AnyArray,
    lengths: AnyArray,
    *,
    scale: float | None,
    soft_cap: float | None,
    window: int | None,
) -> PagedAttentionRequest:
    """Check the arguments of `paged_attention`, and return them as a request.

    Raises:
        ValueError: an argument breaks a rule; the message gives the rule and the values.
    """
    q, k_pages, v_pages = jnp.asarray(q), jnp.asarray(k_pages), jnp.asarray(v_pages)
    page_table, lengths = jnp.asarray(page_table), jnp.asarray(lengths)
    shapes = f"got q {list(q.shape)}, k_pages {list(k_pages.shape)}, v_pages {list(v_pages.shape)}"
    if q.ndim != 4 or k_pages.ndim != 4 or k_pages.shape != v_pages.shape or q.shape[-1] != k_pages.shape[-1]:
        raise ValueError(f"q must be [B, T, N, H], and k_pages and v_pages both [P, page, K, H]; {shapes}")
    if q.shape[2] % k_pages.shape[2]:
        raise ValueError(f"the query heads N must be a multiple of the key heads K; {shapes}")
    if page_table.ndim != 2 or lengths.ndim != 1 or not q.shape[0] == page_table.shape[0] == lengths.shape[0]:
        raise ValueError(
            f"page_table must be [B, pages] and lengths [B], with B of q {list(q.shape)}; got "
            f"{list(page_table.shape)} and {list(lengths.shape)}"
        )
    for name, array in (("page_table", page_table), ("lengths", lengths)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} must be integers, got {array.dtype}")
    return PagedAttentionRequest(
        q,
        k_pages,
        v_pages,
        page_table.astype(jnp.int32),
        lengths.astype(jnp.int32),
        q.shape[-1] ** -0.5 if scale is None else scale,
        soft_cap,
        window,
        current_target(),
    )
