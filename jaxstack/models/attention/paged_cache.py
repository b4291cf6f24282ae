"""Keys and values in pages that many sequences share, and attention to them by packed tokens.

The tokens of one step, of any number of sequences, are packed in one row [1, T] without padding between them (as in
EnergonAI, Du et al. 2022, arXiv:2209.02341).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxstack.models.attention.base import AttentionSpec, PageSlots
from jaxstack.parallel import current_rules, shard
from pallas_kernels.paged_attention.api import paged_attention


class PagedKeys(NamedTuple):
    """Keys and values of one layer."""

    key: Float[Array, "P page K H"]
    value: Float[Array, "P page K H"]


def empty_pages(heads: AttentionSpec, pages: int, page_size: int, dtype: jax.typing.DTypeLike) -> PagedKeys:
    """Return `pages` pages of zeros for `page_size` tokens each."""
    shape = (pages, page_size, heads.num_kv_heads, heads.head_dim)
    return PagedKeys(*(shard(jnp.zeros(shape, dtype), None, None, "act_kv_heads", "act_head_dim") for _ in range(2)))


def attend_pages(
    q: Float[Array, "1 T N H"],
    k: Float[Array, "1 T K H"],
    v: Float[Array, "1 T K H"],
    cache: PagedKeys,
    slots: PageSlots,
    heads: AttentionSpec,
) -> tuple[Float[Array, "1 T N H"], PagedKeys]:
    """Write the keys and values of packed tokens to their pages; return the tokens' attention, and the cache."""
    cache = PagedKeys(_write(cache.key, k, slots.write), _write(cache.value, v, slots.write))
    rules, outputs, start = current_rules(), [], 0
    for group in slots.groups:
        rows, width = group.lengths.shape[0], group.width
        part = q[0, start : start + rows * width].reshape(rows, width, *q.shape[2:])
        out = paged_attention(
            part,
            cache.key,
            cache.value,
            group.table,
            group.lengths,
            scale=heads.scale,
            soft_cap=heads.soft_cap,
            window=heads.window,
            # XLA cannot partition a kernel over the devices of a mesh.
            implementation="xla" if rules is not None and rules.mesh.size > 1 else None,
        )
        outputs.append(out.reshape(rows * width, *q.shape[2:]))
        start += rows * width
    return jnp.concatenate(outputs)[None], cache


def _write(pages: jax.Array, new: jax.Array, write: Int[Array, " T"]) -> jax.Array:
    flat = pages.reshape(-1, *pages.shape[2:])
    return flat.at[write].set(new[0].astype(pages.dtype), mode="drop").reshape(pages.shape)
