"""Latent attention to keys that an indexer chooses (DeepSeek-V3.2, arXiv:2512.02556).

The cache of a token has the key of its indexer beside the latent. Where a sequence has at most as many tokens as a
query sees, attention is that of `latent_attention`, with its kernels. For longer ones XLA computes the scores of all
keys and masks those that were not chosen.

The indexer reads the model's activations without gradient. In training its own loss, and nothing else, trains it: the
divergence of its scores from the attention of the heads, over the keys that a query sees. That has no gradient either.

Dims: B batch, T query length, S key length, D model, N heads, I heads of the indexer, J their width, R latent, P
rotated channels.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.special import xlogy
from jaxtyping import Array, Bool, Float, Int

from jaxstack.models.attention.kv_cache import KeyCache, attend_to, extend, store
from jaxstack.models.attention.paged_cache import PagedKeys, attend_pages, copy_pages, put_in_pages
from jaxstack.models.attention.sparse_latent import SparseLatentAttention
from jaxstack.models.config import ModelConfig
from jaxstack.models.initialization import make_initializer
from jaxstack.models.layer import (
    Angles,
    CacheAndSums,
    CacheRoom,
    CacheSlots,
    Context,
    Layer,
    LayerCache,
    ParameterCount,
    pack_groups,
)
from jaxstack.models.layer_sums import LayerSums, auxiliary_loss
from jaxstack.models.linear import Linear, apply_together
from jaxstack.models.mixers.latent_attention import MultiHeadLatentAttention
from jaxstack.models.norm import LayerInput, LayerNorm, gradient_carrier
from jaxstack.models.rope import apply_rope
from jaxstack.parallel import shard

_KEY_NORM_EPS = 1e-6
_CHUNK_BYTES = 2**28
"""Bytes of the scores of all heads for a chunk of queries, in the loss of the indexer."""
_HIDDEN = jnp.finfo(jnp.float32).min
"""Score of a key that a query does not see."""
LOSS = "indexer_loss"
"""Name of the indexer's loss among the `LayerSums`, and of its metric."""


class Index(NamedTuple):
    """Queries, weights and keys of the indexer for each token."""

    queries: Float[Array, "B T I J"]
    weights: Float[Array, "B T I"]
    """Weight of each head's score."""
    keys: Float[Array, "B T J"]


class Indexer(nnx.Module):
    """Scores of keys for each query: the weighted sum over heads of relu(query . key)."""

    def __init__(self, config: ModelConfig, kind: SparseLatentAttention, rngs: nnx.Rngs):
        assert kind.q_lora_rank is not None
        d = config.hidden_size
        heads = kind.index_n_heads
        width = kind.index_head_dim

        def project(inputs: int, outputs: int) -> Linear:
            return Linear((inputs,), (outputs,), ("embed", "head_dim"), rngs=rngs, initialize=make_initializer(config))

        self.q_proj = project(kind.q_lora_rank, heads * width)
        self.k_proj = project(d, width)
        self.k_norm = LayerNorm(width, _KEY_NORM_EPS)
        self.weights_proj = project(d, heads)
        self.kind = kind

    def __call__(
        self,
        query_latent: Float[Array, "B T L"],
        key: Float[Array, "B T J"],
        weights: Float[Array, "B T I"],
        angles: Angles | None,
    ) -> Index:
        """Return the queries, weights and keys from the latent of queries and the products of `k_proj`, `weights_proj`.

        Args:
          angles: rotation of the first channels of queries and keys; None: they are not rotated.
        """
        q = self.q_proj(query_latent)
        q = q.reshape(*q.shape[:2], self.kind.index_n_heads, self.kind.index_head_dim)
        key = self.k_norm(key)[..., None, :]
        rotated = self.kind.qk_rope_head_dim
        if angles is not None:  # halves, where the attention's own channels may be rotated in pairs
            q, key = (
                jnp.concatenate([apply_rope(x[..., :rotated], angles), x[..., rotated:]], axis=-1) for x in (q, key)
            )
        scale = (self.kind.index_head_dim * self.kind.index_n_heads) ** -0.5
        return Index(q, weights.astype(jnp.float32) * scale, key[..., 0, :])

    def choose(
        self,
        queries: Float[Array, "B T I J"],
        weights: Float[Array, "B T I"],
        keys: Float[Array, "B S J"],
        visible: Bool[Array, "B T S"],
    ) -> Bool[Array, "B T S"]:
        """Return which of the visible keys each query attends to: at most `index_topk`."""
        size = keys.shape[1]
        if size <= self.kind.index_topk:
            return visible
        queries, weights, keys = (jax.lax.stop_gradient(x) for x in (queries, weights, keys))

        def add(total: jax.Array, head: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            q, weight = head
            scores = jnp.einsum("btj,bsj->bts", q, keys, preferred_element_type=jnp.float32)
            return total + weight[..., None] * jax.nn.relu(scores), None

        # One head at a time: the scores of all would take many times the memory.
        heads = jnp.moveaxis(queries, 2, 0), jnp.moveaxis(weights, 2, 0)
        scores, _ = jax.lax.scan(add, jnp.zeros(visible.shape, jnp.float32), heads)
        best = jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), self.kind.index_topk)[1]

        def mark(best: Int[Array, " top"]) -> Bool[Array, " S"]:
            return jnp.zeros(size, bool).at[best].set(True)

        return jax.vmap(jax.vmap(mark))(best) & visible

    def divergence(
        self,
        index: Index,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T N H"],
        seen: Callable[[Int[Array, ""]], Bool[Array, "#B T"]],
        scale: float,
    ) -> Float[Array, ""]:
        """Return the KL divergence of the scores' softmax from the attention of the heads, summed over queries.

        Queries are taken in chunks, so that the scores of all heads exist for a few of them only; the gradient
        recomputes them. It is that of the indexer alone.

        Args:
          q, k: queries and keys of the attention.
          seen: returns the keys that the query at a place attends to.
          scale: factor of the attention's scores.
        """
        batch, length, heads, _ = q.shape
        q, k = jax.lax.stop_gradient((q, k))

        def of_query(row: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> Float[Array, ""]:
            place, q, queries, weights = row
            visible = seen(place)
            scores = jnp.einsum("bnh,bsnh->bns", q, k, preferred_element_type=jnp.float32) * scale
            target = jnp.mean(_masked_softmax(scores, visible[:, None]), axis=1)
            scores = jnp.einsum("bij,bsj->bis", queries, index.keys, preferred_element_type=jnp.float32)
            scores = jnp.einsum("bi,bis->bs", weights, jax.nn.relu(scores))
            found = jax.nn.log_softmax(jnp.where(visible, scores, _HIDDEN), axis=-1)
            return jnp.sum(xlogy(target, target) - target * found)

        rows = jnp.arange(length), *(jnp.moveaxis(x, 1, 0) for x in (q, index.queries, index.weights))
        chunk = max(1, min(length, _CHUNK_BYTES // (4 * batch * heads * length)))
        return jnp.sum(jax.lax.map(jax.checkpoint(of_query), rows, batch_size=chunk))


def _masked_softmax(scores: Float[Array, "B N S"], visible: Bool[Array, "#B 1 S"]) -> Float[Array, "B N S"]:
    return jax.nn.softmax(jnp.where(visible, scores, _HIDDEN), axis=-1)


class SparseMultiHeadLatentAttention(MultiHeadLatentAttention):
    """The sublayer of latent attention to chosen keys.

    Args:
      layer: its mixer is a `SparseLatentAttention`.
    """

    def __init__(self, config: ModelConfig, layer: Layer, rngs: nnx.Rngs):
        super().__init__(config, layer, rngs)
        assert isinstance(layer.mixer, SparseLatentAttention)
        self.indexer = Indexer(config, layer.mixer, rngs)

    def __call__(
        self, x: LayerInput, context: Context, cache: LayerCache | None = None
    ) -> tuple[Float[Array, "B T D"], LayerCache | CacheAndSums | None]:
        """Apply the sublayer to x [B, T, D]; also return the cache with this call's tokens added.

        With `context.with_losses` the loss of the indexer is returned too.
        """
        q, latent, query_latent = self._project(x, context)
        index = self._index(x, cast(jax.Array, query_latent), context)
        slots = context.slots
        if cache is None or slots is None or slots.first:
            out, sums = self._attend_chosen(q, latent, index, context)
            if cache is not None and slots is not None:
                keys = latent[..., None, :], index.keys[..., None, :]
                cache = store(cast(KeyCache, cache), *keys, slots.lengths_after)
            return self._output(out), CacheAndSums(cache, sums) if sums else cache
        attend = self._attend_cached if slots.pages is None else self._attend_pages
        values, cache = attend(self._absorb(q), latent, index, cache, slots)
        return self._output(self._expand_values(values)), cache

    def _index(self, x: LayerInput, query_latent: jax.Array, context: Context) -> Index:
        """Compute the indexer's queries, weights and keys, which have no gradient with respect to x and the latent."""
        x, query_latent = jax.lax.stop_gradient((gradient_carrier(x), query_latent))
        key, weights = apply_together(x, self.indexer.k_proj, self.indexer.weights_proj)
        key, weights = (shard(y, "batch", "length", None) for y in (key, weights))
        angles = None if self.rotation is None else context.angles[self.rotation]
        return self.indexer(query_latent, key, weights, angles)

    def _attend_chosen(
        self, q: jax.Array, latent: jax.Array, index: Index, context: Context
    ) -> tuple[Float[Array, "B T N V"], LayerSums]:
        """Compute attention among the tokens of this call, with keys and values expanded from their latents.

        Also return the loss of the indexer, in training.
        """
        batch, length = q.shape[:2]
        kind = self.indexer.kind
        k, v = self._expand(latent)
        ids = context.segment_ids

        def earlier(place: Int[Array, ""]) -> Bool[Array, "#B S"]:
            found = (jnp.arange(length) <= place)[None]
            return found if ids is None else found & (ids == ids[:, place, None])

        if length <= kind.index_topk:
            seen = earlier
            out = self._attend_to_keys(q, k, v, context)
        else:
            visible = jax.vmap(earlier, out_axes=1)(jnp.arange(length))
            visible = jnp.broadcast_to(visible, (batch, length, length))
            chosen = self.indexer.choose(index.queries, index.weights, index.keys, visible)

            def seen(place: Int[Array, ""]) -> Bool[Array, "B S"]:
                return chosen[:, place]

            out = attend_to(q, KeyCache(*(jnp.moveaxis(x, 2, 1) for x in (k, v))), chosen, self._spec())
        if not context.with_losses or not kind.indexer_loss_weight:
            return out, {}
        with jax.named_scope("indexer_loss"):
            loss = self.indexer.divergence(index, q, k, seen, self.scale)
        return out, {LOSS: auxiliary_loss(loss, kind.indexer_loss_weight, batch * length)}

    def _attend_cached(
        self, q: jax.Array, latent: jax.Array, index: Index, cache: LayerCache, slots: CacheSlots
    ) -> tuple[Float[Array, "B T N R"], LayerCache]:
        """Add the tokens to the cache; return each head's weighted sum of the chosen latents, and the cache."""
        cache = cast(KeyCache, cache)
        cache, seen, positions = extend(cache, latent[..., None, :], index.keys[..., None, :], slots)
        visible = (positions >= 0)[:, None] & (positions[:, None] <= slots.queries[..., None])
        return self._attend_to(q, index.queries, index.weights, seen, visible), cache

    def _attend_pages(
        self, q: jax.Array, latent: jax.Array, index: Index, cache: LayerCache, slots: CacheSlots
    ) -> tuple[Float[Array, "B T N R"], LayerCache]:
        """Do the same with pages that hold the tokens of many sequences."""
        assert slots.pages is not None

        def row(x: jax.Array) -> jax.Array:  # Packed tokens are one row, whatever rows they are for the matmuls.
            return x.reshape(1, -1, *x.shape[2:])

        keys = row(latent)[..., None, :], row(index.keys)[..., None, :]
        pages = put_in_pages(cast(PagedKeys, cache), *keys, slots.pages)
        size = cast(jax.Array, pages.key).shape[1]
        outputs = []
        for group, (part, index_queries, weights) in slots.pages.split(row(q), row(index.queries), row(index.weights)):
            newest = group.lengths[:, None]
            queries = newest - group.width + jnp.arange(group.width)
            places = jnp.arange(group.table.shape[1] * size)
            if places.size <= self.indexer.kind.index_topk:
                one = slots.pages._replace(groups=(group,))
                latents = PagedKeys(pages.key, pages.key)
                out, _ = attend_pages(part.reshape(1, -1, *q.shape[2:]), latents, one, self._spec())
                outputs.append(out.reshape(*part.shape[:-1], -1))
                continue
            visible = (queries >= 0)[..., None] & (places <= queries[..., None])
            seen = KeyCache(*copy_pages(pages, group.table))
            outputs.append(self._attend_to(part, index_queries, weights, seen, visible))
        out, pages = jax.lax.optimization_barrier((pack_groups(outputs), pages))  # see `attend_pages`
        return out.reshape(*q.shape[:-1], self.kind.kv_lora_rank), pages

    def _attend_to(
        self, q: jax.Array, queries: jax.Array, weights: jax.Array, seen: KeyCache, visible: Bool[Array, "B T S"]
    ) -> Float[Array, "B T N R"]:
        """Return each head's weighted sum of the latents that the indexer chooses among the visible ones."""
        chosen = self.indexer.choose(queries, weights, cast(jax.Array, seen.value)[:, 0], visible)
        latents = KeyCache(seen.key, cast(jax.Array, seen.key)[..., : self.kind.kv_lora_rank])
        return attend_to(q, latents, chosen, self._spec())

    def make_cache(self, batch: int, length: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        """Create an empty cache of latents and index keys with room for `length` tokens in each of `batch` rows."""
        key = super().make_cache(batch, length, dtype).key
        return KeyCache(key, shard(self._no_index_keys(key), "batch", None, None, None))

    def make_shared_cache(self, room: CacheRoom, dtype: jax.typing.DTypeLike) -> LayerCache:
        """Create empty pages of latents and index keys for the sequences of an engine."""
        key = super().make_shared_cache(room, dtype).key
        return PagedKeys(key, self._no_index_keys(key))

    def _no_index_keys(self, key: jax.Array) -> jax.Array:
        return jnp.zeros((*key.shape[:-1], self.indexer.kind.index_head_dim), key.dtype)

    @staticmethod
    def count(config: ModelConfig, layer: Layer) -> ParameterCount:
        """Count the parameters of this sublayer, those of the indexer included."""
        kind = layer.mixer
        assert isinstance(kind, SparseLatentAttention)
        matmul, other = MultiHeadLatentAttention.count(config, layer)
        width = kind.index_head_dim
        heads = kind.index_n_heads
        indexer = (kind.q_lora_rank or 0) * heads * width + config.hidden_size * (width + heads)
        return ParameterCount(matmul + indexer, other + 2 * width)

    @staticmethod
    def flops_per_token(config: ModelConfig, layer: Layer, length: int) -> float:
        """Return FLOPs per token: those of attention to all keys, which are computed, and of the indexer's scores.

        The scores have a backward pass in the loss. The attention's scores for its target, and the indexer's for the
        choice, are recomputed, which does not count.
        """
        kind = layer.mixer
        assert isinstance(kind, SparseLatentAttention)
        scores = 2.0 * (length / 2) * kind.index_n_heads * kind.index_head_dim
        attention = MultiHeadLatentAttention.flops_per_token(config, layer, length)
        return attention + scores * (3 if kind.indexer_loss_weight else length > kind.index_topk)
