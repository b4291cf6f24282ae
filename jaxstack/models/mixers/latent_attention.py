"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): expanded for whole sequences, absorbed for decoding.

Expanded, each head's keys and values are computed from the latent, and attention is that of any model. Absorbed, the
matrix that would expand the keys is applied to the queries, and that of the values to the outputs: a step then reads
only the latent and the shared rotated channels, as one key head whose first channels are also its values.

Where devices hold parts of a sequence, they send each other latents, and each expands those that it receives, unless
`pallas_kernels.attention.context.sends_source` finds that sending keys and values takes no longer.

Dims: B batch, T query length, D model, N heads, R latent, P rotated channels, H channels of a key head, V of a value
head.
"""

from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxstack.models.attention.base import AttentionSpec, context_method
from jaxstack.models.attention.kv_cache import KeyCache, attend_to, empty_cache, extend, store
from jaxstack.models.attention.latent import LatentAttention
from jaxstack.models.attention.paged_cache import PagedKeys, attend_pages, put_in_pages
from jaxstack.models.config import ModelConfig
from jaxstack.models.initialization import make_initializer
from jaxstack.models.layer import CacheRoom, CacheSlots, Context, Layer, LayerCache, ParameterCount
from jaxstack.models.linear import Linear, apply_scattered, apply_together, is_plain_product
from jaxstack.models.norm import LayerInput, Norm, make_norm
from jaxstack.models.rope import apply_rope
from jaxstack.parallel import context_axis, context_bandwidth, save_for_backward, shard, with_local_heads
from jaxstack.parallel.sharding_context import splits_length
from pallas_kernels import KeySource, context_attention, flash_attention


class MultiHeadLatentAttention(nnx.Module):
    """The sublayer of multi-head latent attention: projections to and from the latents, and attention.

    Args:
      layer: its mixer is a `LatentAttention`.
    """

    def __init__(self, config: ModelConfig, layer: Layer, rngs: nnx.Rngs):
        kind = layer.mixer
        assert isinstance(kind, LatentAttention)
        d = config.hidden_size
        n = config.num_heads
        h = kind.key_width
        inner = make_initializer(config)
        outer = make_initializer(config, residual=True)

        def project(inputs: int, outputs: tuple[int, ...]) -> Linear:
            axes = ("embed", *(("heads",) if len(outputs) == 2 else ()), "head_dim")
            return Linear((inputs,), outputs, axes, rngs=rngs, initialize=inner)

        def norm(width: int) -> Norm:
            return make_norm("rms_norm", width, kind.latent_norm_eps)

        rank = kind.q_lora_rank
        self.q_a_proj = None if rank is None else project(d, (rank,))
        self.q_a_norm = None if rank is None else norm(rank)
        self.q_b_proj = None if rank is None else project(rank, (n, h))
        self.q_proj = project(d, (n, h)) if rank is None else None
        self.kv_a_proj = project(d, (kind.kv_lora_rank + kind.qk_rope_head_dim,))
        self.kv_a_norm = norm(kind.kv_lora_rank)
        self.kv_b_proj = project(kind.kv_lora_rank, (n, kind.qk_nope_head_dim + kind.v_head_dim))
        self.o_proj = Linear((n, kind.v_head_dim), (d,), ("heads", "head_dim", "embed"), rngs=rngs, initialize=outer)
        self.kind = kind
        self.rotation = layer.rotation
        scaling = config.rope_scaling
        self.scale = config.attention_scale * (1.0 if scaling is None else scaling.score_factor)
        self.implementation = config.attention_implementation

    def __call__(
        self, x: LayerInput, context: Context, cache: LayerCache | None = None
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Apply the sublayer to x [B, T, D]; also return the cache with this call's tokens added."""
        q, latent, _ = self._project(x, context)
        slots = context.slots
        if cache is None or slots is None or slots.first:
            out = self._attend_expanded(q, latent, context)
            cache = cache if cache is None or slots is None else self._store(latent, cache, slots)
        else:
            values, cache = self._attend_absorbed(self._absorb(q), latent, cache, slots)
            out = self._expand_values(values)
        return self._output(out), cache

    def _output(self, out: Float[Array, "B T N V"]) -> Float[Array, "B T D"]:
        return apply_scattered(shard(out, "batch", "length", "act_heads", "act_head_dim"), self.o_proj)

    @property
    def _nope(self) -> int:
        return self.kind.qk_nope_head_dim

    def _project(self, x: LayerInput, context: Context) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Project the input of the sublayer.

        Returns:
          The queries [B, T, N, H]; as one array [B, T, R + P] the latent and the shared channels; the latent of
          queries, if there is one.
        """
        if self.q_a_proj is None or self.q_a_norm is None or self.q_b_proj is None:
            assert self.q_proj is not None
            low = None
            q, latent = apply_together(x, self.q_proj, self.kv_a_proj)
        else:
            low, latent = apply_together(x, self.q_a_proj, self.kv_a_proj)
            low = self.q_a_norm(save_for_backward(low))
            q = self.q_b_proj(low)
        q = shard(q, "batch", "length", "act_heads", "act_head_dim")
        latent = shard(save_for_backward(latent), "batch", "length", None)
        rank = self.kind.kv_lora_rank
        normal = self.kv_a_norm(latent[..., :rank])
        shared = self._rotate(latent[..., None, rank:], context)[..., 0, :]
        q = jnp.concatenate([q[..., : self._nope], self._rotate(q[..., self._nope :], context)], axis=-1)
        return q, jnp.concatenate([normal, shared], axis=-1), low

    def _rotate(self, x: Float[Array, "B T heads P"], context: Context) -> Float[Array, "B T heads P"]:
        if self.rotation is None:
            return x
        if self.kind.rope_interleave:  # Pairs become halves; the order is the same in queries and keys.
            x = x.reshape(*x.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(x.shape)
        return apply_rope(x, context.angles[self.rotation])

    def _expansion(self, dtype: jax.typing.DTypeLike) -> Float[Array, "R N keys_and_values"]:
        """Return the matrix that expands the latent to each head's keys, without rotated channels, and values."""
        return self.kv_b_proj.whole_kernel().astype(dtype)

    def _expand(self, latent: Float[Array, "B T R_P"]) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N V"]]:
        """Return the keys and values of all heads."""
        rank = self.kind.kv_lora_rank
        expanded = self.kv_b_proj(latent[..., :rank])
        return self._keys_and_values(shard(expanded, "batch", "length", "act_heads", "act_head_dim"), latent)

    def _keys_and_values(
        self, expanded: Float[Array, "B S N keys_and_values"], latent: Float[Array, "B S R_P"]
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N V"]]:
        """Return keys and values, given the product of the latent with the expansion; keys get the shared channels."""
        rank = self.kind.kv_lora_rank
        shared = jnp.broadcast_to(latent[..., None, rank:], (*expanded.shape[:3], self.kind.qk_rope_head_dim))
        return jnp.concatenate([expanded[..., : self._nope], shared], axis=-1), expanded[..., self._nope :]

    def _expand_values(self, sums: Float[Array, "B T N R"]) -> Float[Array, "B T N V"]:
        """Return the heads' outputs, given their weighted sums of latents."""
        return jnp.einsum("btnr,rnv->btnv", sums, self._expansion(sums.dtype)[..., self._nope :])

    def _attend_expanded(self, q: jax.Array, latent: jax.Array, context: Context) -> Float[Array, "B T N V"]:
        """Compute attention among the tokens of this call, with keys and values expanded from their latents."""
        if splits_length() and is_plain_product(self.kv_b_proj):
            expansion = jnp.moveaxis(self._expansion(q.dtype), 1, 0)
            ids = context.segment_ids
            return with_local_heads(self._attend_to_latents, q, None, None, latent, ids, per_head=(expansion,))
        return self._attend_to_keys(q, *self._expand(latent), context)

    def _attend_to_keys(self, q: jax.Array, k: jax.Array, v: jax.Array, context: Context) -> Float[Array, "B T N V"]:
        """Compute attention among the tokens of this call, with keys and values from `_expand`."""

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> jax.Array:
            if context_axis() is not None:
                return self._attend_over_context(q, k, v, ids)
            options = {"scale": self.scale, "implementation": self.implementation}
            return cast(jax.Array, flash_attention(q, k, v, segment_ids=ids, **options))

        return with_local_heads(attend, q, k, v, context.segment_ids)

    def _attend_to_latents(
        self,
        q: Float[Array, "B T N H"],
        k: None,
        v: None,
        latent: Float[Array, "B T R_P"],
        ids: jax.Array | None,
        expansion: Float[Array, "N R keys_and_values"],
    ) -> Float[Array, "B T N V"]:
        """Compute attention to the keys and values of a split sequence, of which this device has its own latents."""
        del k, v

        def expand(expansion: jax.Array, latent: jax.Array) -> tuple[jax.Array, jax.Array]:
            expanded = jnp.einsum("bsr,nrc->bsnc", latent[..., : self.kind.kv_lora_rank], expansion)
            return self._keys_and_values(expanded, latent)

        return self._attend_over_context(q, KeySource((latent,), expand, expansion, context_bandwidth()), None, ids)

    def _attend_over_context(
        self, q: jax.Array, k: jax.Array | KeySource, v: jax.Array | None, ids: jax.Array | None
    ) -> Float[Array, "B T N V"]:
        axis = context_axis()
        assert axis is not None
        return context_attention(
            q,
            k,
            v,
            axis_name=axis,
            method=context_method(),
            segment_ids=ids,
            scale=self.scale,
            implementation=self.implementation,
        )

    def _absorb(self, q: Float[Array, "B T N H"]) -> Float[Array, "B T N R_P"]:
        """Return queries of the latent: their product with the keys' expansion, and their rotated channels."""
        expansion = self._expansion(q.dtype)[..., : self._nope]
        absorbed = jnp.einsum("btnh,rnh->btnr", q[..., : self._nope], expansion)
        return jnp.concatenate([absorbed, q[..., self._nope :]], axis=-1)

    def _spec(self) -> AttentionSpec:
        """Return the settings of absorbed attention, which has one key head."""
        width = self.kind.kv_lora_rank + self.kind.qk_rope_head_dim
        rank = self.kind.kv_lora_rank
        return AttentionSpec(self.kv_b_proj.kernel.shape[-2], 1, width, self.scale, value_width=rank)

    def _attend_absorbed(
        self, q: jax.Array, latent: jax.Array, cache: LayerCache, slots: CacheSlots
    ) -> tuple[Float[Array, "B T N R"], LayerCache]:
        """Add the tokens to the cache; return each head's weighted sum of all latents so far, and the cache."""
        rank = self.kind.kv_lora_rank
        key = latent[..., None, :]
        if slots.pages is None:
            cache, seen, positions = extend(cast(KeyCache, cache), key, _no_values(key), slots)
            visible = (positions >= 0)[:, None] & (positions[:, None] <= slots.queries[..., None])
            latents = KeyCache(seen.key, cast(jax.Array, seen.key)[..., :rank])
            return attend_to(q, latents, visible, self._spec()), cache
        # Packed tokens are one row for attention, whatever rows they are for the matmuls.
        row_q, row_key = (part.reshape(1, -1, *part.shape[2:]) for part in (q, key))
        cache = put_in_pages(cast(PagedKeys, cache), row_key, _no_values(row_key), slots.pages)
        out, latents = attend_pages(row_q, PagedKeys(cache.key, cache.key), slots.pages, self._spec())
        return out.reshape(*q.shape[:-1], rank), PagedKeys(latents.key, cache.value)

    def _store(self, latent: jax.Array, cache: LayerCache, slots: CacheSlots) -> LayerCache:
        key = latent[..., None, :]
        return store(cast(KeyCache, cache), key, _no_values(key), slots.lengths_after)

    def make_cache(self, batch: int, length: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        """Create an empty cache of latents with room for `length` tokens in each of `batch` rows."""
        key, _ = empty_cache(self._spec(), batch, length, dtype)
        return KeyCache(key, cast(jax.Array, key)[..., :0])

    def make_shared_cache(self, room: CacheRoom, dtype: jax.typing.DTypeLike) -> LayerCache:
        """Create empty pages of latents for the sequences of an engine."""
        key = jnp.zeros((room.pages, room.page_size, 1, self._spec().head_dim), dtype)
        return PagedKeys(key, key[..., :0])

    def complete_cache(self, cache: LayerCache) -> LayerCache:
        """Return the cache as it is: nothing in it depends on weights."""
        return cache

    @staticmethod
    def count(config: ModelConfig, layer: Layer) -> ParameterCount:
        """Count the parameters of this sublayer: its projections, and the norms of the latents."""
        kind = layer.mixer
        assert isinstance(kind, LatentAttention)
        d = config.hidden_size
        n = config.num_heads
        rank = kind.q_lora_rank
        queries = n * kind.key_width * (rank or d) + (d * rank if rank else 0)
        latent = d * (kind.kv_lora_rank + kind.qk_rope_head_dim)
        expansion = kind.kv_lora_rank * n * (kind.qk_nope_head_dim + kind.v_head_dim)
        return ParameterCount(queries + latent + expansion + n * kind.v_head_dim * d, (rank or 0) + kind.kv_lora_rank)

    @staticmethod
    def flops_per_token(config: ModelConfig, layer: Layer, length: int) -> float:
        """Return forward and backward FLOPs per token of the expanded attention, without projections."""
        kind = layer.mixer
        assert isinstance(kind, LatentAttention)
        return 6.0 * (length / 2) * config.num_heads * (kind.key_width + kind.v_head_dim)


def _no_values(key: jax.Array) -> jax.Array:
    """Return an array like `key` without channels: the latent is stored once, for keys and values."""
    return key[..., :0]
