"""What kinds of softmax attention over a part of the keys share: a cache of keys and values, and their FLOPs."""

from abc import abstractmethod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxstack.models.attention_kinds.base import AttentionKind, CacheSlots, Heads
from jaxstack.parallel import shard
from pallas_kernels.attention.masks import Mask


class LayerCache(NamedTuple):
    """Keys and values of one layer, [B, S, K, H] each."""

    key: jax.Array
    value: jax.Array


class MaskedSoftmax(AttentionKind):
    """Exact softmax attention under a mask that positions decide."""

    @abstractmethod
    def mask(self, heads: Heads, length: int) -> Mask:
        """Which keys a query sees in a document of up to `length` tokens."""

    @abstractmethod
    def keys_seen(self, heads: Heads, length: int) -> float:
        """How many keys a query sees on average; half of `length` for all that are before it."""

    def make_cache(self, heads: Heads, batch: int, length: int, dtype: Any) -> LayerCache:
        shape = (batch, length, heads.num_kv_heads, heads.head_dim)
        names = ("batch", None, "act_kv_heads", "act_head_dim")
        return LayerCache(*(shard(jnp.zeros(shape, dtype), *names) for _ in range(2)))

    def decode(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache, slots: CacheSlots, heads: Heads
    ) -> tuple[jax.Array, LayerCache]:
        cache = LayerCache(_put(cache.key, k, slots.start), _put(cache.value, v, slots.start))
        # Decoding reads the whole cache once a token: bound by its bytes, so a plain einsum is as fast as a kernel.
        batch, length, num_heads, width = q.shape
        groups = num_heads // cache.key.shape[2]
        q = q.reshape(batch, length, -1, groups, width)
        scores = jnp.einsum("btkgh,bskh->bkgts", q, cache.key, preferred_element_type=jnp.float32) * heads.scale
        if heads.soft_cap:
            scores = jnp.tanh(scores / heads.soft_cap) * heads.soft_cap
        visible = slots.positions[:, None, :] >= 0
        masked = self.mask(heads, slots.positions.shape[1]).visible(slots.queries, slots.positions)
        visible = visible if masked is None else visible & masked
        scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(cache.value.dtype)
        out = jnp.einsum("bkgts,bskh->btkgh", weights, cache.value)
        return out.reshape(batch, length, num_heads, width), cache

    def flops_per_token(self, heads: Heads, length: int) -> float:
        return 12.0 * self.keys_seen(heads, length) * heads.num_heads * heads.head_dim


def _put(stored: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(stored, new.astype(stored.dtype), start, axis=1)
