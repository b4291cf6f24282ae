"""What kinds of softmax attention over a part of the keys share: a cache of keys and values, and their FLOPs."""

from abc import abstractmethod
from typing import Any

import jax

from jaxstack.models.attention.base import AttentionKind, AttentionSpec, CacheSlots
from jaxstack.models.attention.key_cache import KeyCache, attend_to, empty_cache, extend, store
from pallas_kernels.attention.masks import Mask


class MaskedSoftmax(AttentionKind):
    """Exact softmax attention under a mask that positions decide."""

    @abstractmethod
    def mask(self, heads: AttentionSpec, length: int) -> Mask:
        """Which keys a query sees in a document of up to `length` tokens."""

    @abstractmethod
    def keys_seen(self, heads: AttentionSpec, length: int) -> float:
        """How many keys a query sees on average; half of `length` for all that are before it."""

    def keys_kept(self, heads: AttentionSpec) -> tuple[int, int | None]:
        """Of a long text, how many first and how many last keys later queries can see; None: all."""
        return 0, None

    def make_cache(self, heads: AttentionSpec, batch: int, length: int, dtype: Any) -> KeyCache:
        first, last = self.keys_kept(heads)
        return empty_cache(heads, batch, length if last is None else min(length, first + last), dtype)

    def store(self, k: jax.Array, v: jax.Array, cache: KeyCache, slots: CacheSlots, heads: AttentionSpec) -> KeyCache:
        return store(cache, k, v, slots.seen_after, self.keys_kept(heads)[0])

    def decode(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: KeyCache, slots: CacheSlots, heads: AttentionSpec
    ) -> tuple[jax.Array, KeyCache]:
        cache, seen, positions = extend(cache, k, v, slots, self.keys_kept(heads)[0])
        visible = (positions >= 0)[:, None]
        masked = self.mask(heads, cache.key.shape[2]).visible(slots.queries, positions)
        return attend_to(q, seen, visible if masked is None else visible & masked, heads), cache

    def flops_per_token(self, heads: AttentionSpec, length: int) -> float:
        return 12.0 * self.keys_seen(heads, length) * heads.num_heads * heads.head_dim
