"""Base class of exact softmax attention under a position-dependent mask, with its KV cache and FLOPs."""

from abc import abstractmethod
from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxstack.models.attention.base import AttentionKind, AttentionSpec
from jaxstack.models.attention.kv_cache import (
    KeyCache,
    attend_to,
    empty_cache,
    extend,
    put,
    put_joined,
    slot_positions,
    store,
)
from jaxstack.models.attention.paged_cache import PagedKeys, copy_pages, put_in_pages, put_joined_in_pages
from jaxstack.models.layer import Angles, CacheSlots, LayerCache, pack_groups
from pallas_kernels.attention.masks import Mask


class MaskedSoftmax(AttentionKind):
    """Exact softmax attention under a mask that depends on positions."""

    @abstractmethod
    def mask(self, heads: AttentionSpec, length: int) -> Mask:
        """Return the attention mask for a document of up to `length` tokens."""

    @abstractmethod
    def keys_seen(self, heads: AttentionSpec, length: int) -> float:
        """Return how many keys a query attends to on average; full causal attention has length / 2."""

    @property
    def sink_scores(self) -> Float[Array, " N"] | None:
        """Scores of the attention sinks of a layer, one for each query head; None: there are none."""
        return None

    def keys_kept(self, heads: AttentionSpec) -> tuple[int, int | None]:
        """Return how many of the first and of the last keys the cache must keep; (0, None) for all keys."""
        return 0, None

    def make_cache(self, heads: AttentionSpec, batch: int, length: int, dtype: jax.typing.DTypeLike) -> KeyCache:
        first, last = self.keys_kept(heads)
        return empty_cache(heads, batch, length if last is None else min(length, first + last), dtype)

    def store(
        self,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        cache: KeyCache,
        slots: CacheSlots,
        heads: AttentionSpec,
    ) -> KeyCache:
        return store(cache, k, v, slots.lengths_after, self.keys_kept(heads)[0])

    def decode(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        cache: LayerCache,
        slots: CacheSlots,
        heads: AttentionSpec,
    ) -> tuple[Float[Array, "B T N H"], LayerCache]:
        if slots.pages is not None:
            return self.attend_to_pages(q, put_in_pages(cast(PagedKeys, cache), k, v, slots.pages), slots, heads)
        pinned = self.keys_kept(heads)[0]
        if q.shape[1] == 1:
            cache = put(cache, k, v, slots, pinned)
            return self.attend_to_cache(q, cache, slots, heads), cache
        cache, seen, positions = extend(cache, k, v, slots, pinned)
        return self._attend_to(q, seen, positions, cache.slots, slots, heads), cache

    def decode_joined(
        self,
        joined: Float[Array, "B T heads H"],
        angles: Angles,
        cache: LayerCache,
        slots: CacheSlots,
        heads: AttentionSpec,
    ) -> tuple[Float[Array, "B T N H"], LayerCache]:
        if slots.pages is not None:
            return self.attend_to_pages(*put_joined_in_pages(cache, joined, angles, slots.pages, heads), slots, heads)
        if joined.shape[1] != 1:
            return super().decode_joined(joined, angles, cache, slots, heads)
        q, cache = put_joined(cache, joined, angles, slots, heads, self.keys_kept(heads)[0])
        return self.attend_to_cache(q, cache, slots, heads), cache

    def attend_to_cache(
        self, q: Float[Array, "B 1 N H"], cache: KeyCache, slots: CacheSlots, heads: AttentionSpec
    ) -> Float[Array, "B 1 N H"]:
        """Compute attention of each row's newest token to the tokens in the cache, which it is one of."""
        positions = slot_positions(slots.lengths_after, cache.slots, self.keys_kept(heads)[0])
        return self._attend_to(q, cache, positions, cache.slots, slots, heads)

    def _attend_to(
        self,
        q: Float[Array, "B T N H"],
        seen: KeyCache,
        positions: Int[Array, "B S"],
        length: int,
        slots: CacheSlots,
        heads: AttentionSpec,
    ) -> Float[Array, "B T N H"]:
        """Compute attention to keys at `positions`, -1 for an empty slot, for a document of up to `length` tokens."""
        visible = (positions >= 0)[:, None]
        if heads.chunk is not None:
            visible &= (positions // heads.chunk)[:, None] == (slots.queries // heads.chunk)[..., None]
        masked = self.mask(heads, length).visible(slots.queries, positions)
        return attend_to(q, seen, visible if masked is None else visible & masked, heads, self.sink_scores)

    def attend_to_pages(
        self, q: Float[Array, "1 T N H"], cache: PagedKeys, slots: CacheSlots, heads: AttentionSpec
    ) -> tuple[Float[Array, "1 T N H"], PagedKeys]:
        """Compute attention of packed tokens to copies of their sequences' keys in pages; also return the cache.

        The copies are as long as the page table, and keys that the mask hides are read too.
        """
        assert slots.pages is not None
        outputs = []
        for group, (queries, new) in slots.pages.split(slots.queries, q):
            seen = KeyCache(*copy_pages(cache, group.table))
            places = jnp.arange(seen.slots, dtype=jnp.int32)
            positions = jnp.where(places < group.lengths[:, None], places, -1)
            outputs.append(self._attend_to(new, seen, positions, seen.slots, CacheSlots(queries, group.lengths), heads))
        # The barrier orders these reads before the next write to the pages, which XLA would else copy to be safe.
        return jax.lax.optimization_barrier((pack_groups(outputs), cache))

    def flops_per_token(self, heads: AttentionSpec, length: int) -> float:
        return 12.0 * self.keys_seen(heads, length) * heads.num_heads * heads.head_dim
