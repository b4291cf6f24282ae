"""Checked arguments of paged attention. Dims: B sequences, T new tokens, N query heads, K key heads, H head dim."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import AnyArray
from pallas_kernels.attention.request import check_sinks
from pallas_kernels.low_bits.encoded import Encoded, Stored, permute_query_channels, without_order
from pallas_kernels.target import Target, current_target


@dataclass(frozen=True)
class PagedAttentionRequest:
    """Checked arguments of one call of paged attention: queries, pages, page table, lengths and options.

    Attributes:
        q: queries [B, T, N, H], in the order of the channels that `k_pages` are stored in.
        k_pages, v_pages: [P, page, K, H], or `Encoded` with such values.
        page_size: tokens of a page.
        key_heads: K.
        page_table: int32 [B, pages].
        lengths: int32 [B].
        scale: factor of the scores.
        soft_cap: cap of the scores, or None.
        window: keys that a query sees, or None.
        target: the device that the call is lowered for.
        sinks: float32 [N], one more score of each query of a head, without a value; None: there are none.
        value_width: V, if values are the first V channels of their keys, so that `v_pages` are `k_pages`; else None.
    """

    q: jax.Array
    k_pages: Stored
    v_pages: Stored
    page_size: int
    key_heads: int
    page_table: jax.Array
    lengths: jax.Array
    scale: float
    soft_cap: float | None
    window: int | None
    target: Target
    sinks: jax.Array | None = None
    value_width: int | None = None

    def __str__(self) -> str:
        q = self.q
        pages = jax.tree.leaves(self.k_pages)[0]
        stored = self.k_pages.codec if isinstance(self.k_pages, Encoded) else pages.dtype.name
        values = "" if self.value_width is None else f" values in the first {self.value_width} channels"
        return f"q {list(q.shape)} {q.dtype.name} pages {list(pages.shape)} {stored}{values} on {self.target}"


def make_request(
    q: AnyArray,
    k_pages: AnyArray | Encoded,
    v_pages: AnyArray | Encoded | int,
    page_table: AnyArray,
    lengths: AnyArray,
    *,
    scale: float | None,
    soft_cap: float | None,
    window: int | None,
    sinks: AnyArray | None = None,
) -> PagedAttentionRequest:
    """Check the arguments of a call of paged attention, and return them in one object.

    Raises:
        ValueError: an argument breaks a rule; the message gives the rule and the values.
    """
    q = jnp.asarray(q)
    page_table = jnp.asarray(page_table)
    lengths = jnp.asarray(lengths)
    value_width = v_pages if isinstance(v_pages, int) else None
    v_pages = k_pages if isinstance(v_pages, int) else v_pages
    k_shape = _value_shape(k_pages)
    v_shape = _value_shape(v_pages)
    shapes = f"got q {list(q.shape)}, k_pages {list(k_shape)}, v_pages {list(v_shape)}"
    if q.ndim != 4 or len(k_shape) != 4 or k_shape != v_shape or q.shape[-1] != k_shape[-1]:
        raise ValueError(f"q must be [B, T, N, H], and k_pages and v_pages both [P, page, K, H]; {shapes}")
    if value_width is not None and not 0 < value_width <= q.shape[-1]:
        raise ValueError(
            f"values in the first V channels of their keys need a V from 1 to {q.shape[-1]}; got {value_width}"
        )
    if q.shape[2] % k_shape[2]:
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
        q if not isinstance(k_pages, Encoded) else permute_query_channels(q, k_pages),
        without_order(k_pages) if isinstance(k_pages, Encoded) else jnp.asarray(k_pages),
        without_order(v_pages) if isinstance(v_pages, Encoded) else jnp.asarray(v_pages),
        *k_shape[1:3],
        page_table.astype(jnp.int32),
        lengths.astype(jnp.int32),
        q.shape[-1] ** -0.5 if scale is None else scale,
        soft_cap,
        window,
        current_target(),
        None if sinks is None else check_sinks(sinks, q),
        value_width,
    )


def _value_shape(pages: AnyArray | Encoded) -> tuple[int, ...]:
    """Return the shape [P, page, K, H] that the keys or values in `pages` have once they are decoded."""
    if not isinstance(pages, Encoded):
        return jnp.shape(pages)
    return jax.eval_shape(pages.codec.decode, pages.parts).shape
