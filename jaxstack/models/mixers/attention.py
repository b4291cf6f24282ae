"""The causal multi-head attention sublayer: projections, rotary positions, and the configured attention kind.

Dims: B batch, T query length, D model, N heads, K kv heads, H head_dim.
"""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxstack.models.attention.base import AttentionKind
from jaxstack.models.attention.cache_formats import as_stored, magnitude_order
from jaxstack.models.attention.kv_cache import KeyCache
from jaxstack.models.attention.paged_cache import PagedKeys
from jaxstack.models.attention.slot_cache import decode_slots
from jaxstack.models.config import ModelConfig
from jaxstack.models.initialization import make_initializer
from jaxstack.models.layer import (
    Angles,
    CacheRoom,
    CacheSlots,
    Context,
    Layer,
    LayerCache,
    ParameterCount,
    SegmentIds,
)
from jaxstack.models.linear import Linear, apply_gathered, apply_scattered, join_layers, split_outputs
from jaxstack.models.norm import (
    HeadsNorm,
    LayerInput,
    Norm,
    RMSNormWithoutGain,
    count_norm_parameters,
    head_norm_name,
    make_norm,
)
from jaxstack.models.rope import apply_rope
from jaxstack.parallel import (
    context_axis,
    save_for_backward,
    shard,
    splits_heads_alone,
    with_local_cache,
    with_local_heads,
)
from jaxstack.parallel.sharding_context import is_sharded
from pallas_kernels import PackedWeight
from pallas_kernels.low_bits.encoded import Encoded


class Attention(nnx.Module):
    """The attention sublayer: projections of queries, keys, values and output around an attention kind.

    Args:
      layer: its window or chunks, and which rotations it applies; its mixer is an attention kind.
    """

    def __init__(self, config: ModelConfig, layer: Layer, rngs: nnx.Rngs):
        assert isinstance(layer.mixer, AttentionKind)
        d = config.hidden_size
        self.heads = config.heads(layer)
        h = self.heads.head_dim
        n = self.heads.num_heads
        k = self.heads.num_kv_heads
        inner = make_initializer(config)
        outer = make_initializer(config, residual=True)

        def project(heads: int, axis: str) -> Linear:
            return Linear(
                (d,), (heads, h), ("embed", axis, "head_dim"), rngs=rngs, initialize=inner, bias=config.qkv_bias
            )

        self.q_proj = project(n, "heads")
        self.k_proj = project(k, "kv_heads")
        self.v_proj = project(k, "kv_heads")
        self.qkv_proj: Linear | None = nnx.data(None)
        """The three projections as one layer, after `join_projections`."""
        self.joined_parts = 1
        """Number of devices among which the heads of the joined layer are divided."""
        self.o_proj = Linear(
            (n, h), (d,), ("heads", "head_dim", "embed"), rngs=rngs, initialize=outer, bias=config.output_bias
        )
        self.q_norm = _make_head_norm(config, layer, n, "heads")
        self.k_norm = _make_head_norm(config, layer, k, "kv_heads")
        self.kind = layer.mixer
        if (weight := self.kind.make_weight(self.heads, rngs)) is not None:
            setattr(self, self.kind.weight_name, weight)
        self.rotation = layer.rotation
        self.rotary_channels = config.rotary_width(layer) if layer.rotation is not None else 0
        self.floor_scale = config.floor_scale if layer.rotation is None else None
        self.attn_scale = config.attn_scale

    def __call__(
        self, x: LayerInput, context: Context, cache: LayerCache | None = None
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Apply the sublayer to x [B, T, D]; also return the cache with this call's tokens added."""
        parameter = getattr(self, self.kind.weight_name, None)
        weight = () if parameter is None else (parameter[...],)
        slots = context.slots
        kind = self.kind.with_weight(*weight)
        if cache is None or slots is None or slots.first:
            q, k, v = self._queries_keys_values(x, context)
            out = self._attend_without_cache(q, *self._as_stored(k, v), context, *weight)
            cache = cache if cache is None or slots is None else kind.store(k, v, cache, slots, self.heads)
        else:
            out, cache = self._decode(kind, x, context, cache, slots)
        return self._project_output(self._change_output(out, x)), cache

    def _change_output(self, out: Float[Array, "B T N H"], x: LayerInput) -> Float[Array, "B T N H"]:
        """Return the heads' outputs as they go into the output projection; x is the sublayer's input."""
        return out

    def channel_order(self) -> Int[Array, "*layers K H"] | None:
        """Return the order in which the cache stores the channels of keys; None if it does not reorder them.

        A layer that is a stack of layers has an order for each of them.
        """
        cache_format = self.heads.cache_format
        if cache_format is None or not cache_format.sorts_channels:
            return None
        kernel = self.k_proj.kernel.get_value()
        return magnitude_order(
            kernel.dense() if isinstance(kernel, PackedWeight) else kernel, rotated=self.rotary_channels
        )

    def join_projections(self, parts: int = 1) -> bool:
        """Merge the query, key and value projections into one layer if possible; return True if they were merged.

        They stay apart where the cache sorts channels, for which the keys' projection is read, where `join_layers`
        refuses, and if they were merged before.

        Args:
          parts: as in `join_layers`.
        """
        cache_format = self.heads.cache_format
        if self.qkv_proj is not None or (cache_format is not None and cache_format.sorts_channels):
            return False
        self.qkv_proj = join_layers((self.q_proj, self.k_proj, self.v_proj), -2, parts)
        if self.qkv_proj is None:
            return False
        self.joined_parts = parts
        del self.q_proj, self.k_proj, self.v_proj
        return True

    def make_cache(self, batch: int, length: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        """Create an empty cache with room for `length` tokens in each of `batch` rows, or fewer with a window."""
        return self.kind.make_cache(self.heads, batch, length, dtype)

    def make_shared_cache(self, room: CacheRoom, dtype: jax.typing.DTypeLike) -> LayerCache:
        """Create an empty cache for the sequences of an engine."""
        return self.kind.make_shared_cache(self.heads, room, dtype)

    def complete_cache(self, cache: LayerCache) -> LayerCache:
        """Return the empty cache with this layer's channel order set, if its format sorts channels."""
        order = self.channel_order()
        if order is None or not isinstance(cache, KeyCache | PagedKeys):
            return cache
        return cache._replace(key=dataclasses.replace(cast(Encoded, cache.key), order=order))

    def _decode(
        self, kind: AttentionKind, x: LayerInput, context: Context, cache: LayerCache, slots: CacheSlots
    ) -> tuple[Float[Array, "B T N H"], LayerCache]:
        """Add the tokens to the cache; return their attention to all tokens so far, and the cache."""
        angles = self._angles(context)
        format = self.heads.cache_format
        plain = self.q_norm is None and (format is None or format.stores_numbers)
        in_slots = slots.pages is not None and not isinstance(cache, PagedKeys)
        whole = self.rotary_channels == self.heads.head_dim
        if self.qkv_proj is not None and angles is not None and plain and whole and not in_slots:
            # XLA cannot partition the kernel that takes joined heads, which rotates whole heads.
            if not is_sharded():
                return kind.decode_joined(apply_gathered(x, self.qkv_proj)[0], angles, cache, slots, self.heads)
            pages = isinstance(cache, PagedKeys) and not hasattr(self, self.kind.weight_name)
            if pages and splits_heads_alone(self.joined_parts):
                joined = apply_gathered(x, self.qkv_proj)[0]
                decode = functools.partial(self._decode_own_heads, kind)
                return with_local_cache(decode, joined, cache, angles, slots)
        return self._decode_heads(kind, *self._queries_keys_values(x, context), cache, slots)

    def _decode_own_heads(
        self, kind: AttentionKind, joined: jax.Array, cache: LayerCache, angles: Angles, slots: CacheSlots
    ) -> tuple[Float[Array, "B T n H"], LayerCache]:
        """Do what `decode_joined` does, on one device's share of the heads."""
        heads = self.heads
        own = dataclasses.replace(
            heads,
            num_heads=heads.num_heads // self.joined_parts,
            num_kv_heads=heads.num_kv_heads // self.joined_parts,
        )
        return kind.decode_joined(joined, angles, cache, slots, own)

    def _decode_heads(
        self, kind: AttentionKind, q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache, slots: CacheSlots
    ) -> tuple[Float[Array, "B T N H"], LayerCache]:
        """Add tokens to the cache, given their heads; return their attention to all tokens so far, and the cache."""
        if slots.pages is None:
            return kind.decode(q, k, v, cache, slots, self.heads)
        # Packed tokens are one row for attention, whatever rows they are for the matmuls.
        row_q, row_k, row_v = (part.reshape(1, -1, *part.shape[2:]) for part in (q, k, v))
        if not isinstance(cache, PagedKeys):
            decode = functools.partial(kind.decode, heads=self.heads)
            out, cache = decode_slots(decode, (row_q, row_k, row_v), cache, slots)
        else:
            out, cache = kind.decode(row_q, row_k, row_v, cache, slots, self.heads)
        return out.reshape(q.shape), cache

    def _angles(self, context: Context) -> Angles | None:
        """Return the rotations of this layer's queries and keys; None if it does not rotate them."""
        return None if self.rotation is None else context.angles[self.rotation]

    def _queries_keys_values(self, x: LayerInput, context: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Compute q [B, T, N, H], k and v [B, T, K, H], with head norms and rotary positions applied."""
        q, k, v = self._project(x)
        q = self._finish_queries(q, context)
        k = shard(k, "batch", "length", "act_kv_heads", "act_head_dim")
        v = shard(v, "batch", "length", "act_kv_heads", "act_head_dim")
        if self.k_norm is not None:
            k = self.k_norm(k)
        if (angles := self._angles(context)) is not None:
            k = apply_rope(k, angles)
        return q, save_for_backward(k), v

    def _finish_queries(self, q: Float[Array, "B T N H"], context: Context) -> Float[Array, "B T N H"]:
        """Apply the head norm, rotary positions and the scale by position to projected queries."""
        q = shard(q, "batch", "length", "act_heads", "act_head_dim")
        if self.q_norm is not None:
            q = self.q_norm(q)
        if (angles := self._angles(context)) is not None:
            q = apply_rope(q, angles)
        if self.floor_scale is not None:
            steps = jnp.floor((context.positions + 1) / self.floor_scale)
            q = (q * (1 + self.attn_scale * jnp.log1p(steps))[..., None, None]).astype(q.dtype)
        return save_for_backward(q)

    def _as_stored(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys and values with the rounding error of the cache's format, if it has one."""
        return as_stored(k, v, self.heads.cache_format, self.channel_order())

    def _attend_without_cache(
        self, q: jax.Array, k: jax.Array, v: jax.Array, context: Context, *weight: jax.Array
    ) -> Float[Array, "B T N H"]:
        """Compute attention of the tokens to each other, given their heads."""
        own = {"per_head" if self.kind.weight_per_head else "whole": weight}
        segment_ids = _chunk_segments(context, self.heads.chunk, q)
        return with_local_heads(self._attend, q, k, v, segment_ids, **own)

    def _project_output(self, out: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        return apply_scattered(shard(out, "batch", "length", "act_heads", "act_head_dim"), self.o_proj)

    def _project(self, x: LayerInput) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Compute q [B, T, N, H], k and v [B, T, K, H], before head norms and rotary positions."""
        if self.qkv_proj is None:
            q, k, v = apply_gathered(x, self.q_proj, self.k_proj, self.v_proj)
            return q, k, v
        k = self.heads.num_kv_heads
        joined = apply_gathered(x, self.qkv_proj)[0]
        q, k, v = split_outputs(joined, (self.heads.num_heads, k, k), -2, self.joined_parts)
        return q, k, v

    def _attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, *weight: jax.Array
    ) -> jax.Array:
        kind = self.kind.with_weight(*weight)
        axis = context_axis()
        if axis is None:
            return kind.attend(q, k, v, segment_ids, self.heads)
        return kind.attend_over(axis, q, k, v, segment_ids, self.heads)

    @staticmethod
    def count(config: ModelConfig, layer: Layer) -> ParameterCount:
        """Count the parameters of this sublayer: projections; biases, head norms and what the attention kind learns."""
        assert isinstance(layer.mixer, AttentionKind)
        d = config.hidden_size
        heads = config.heads(layer)
        h = heads.head_dim
        n = heads.num_heads
        k = heads.num_kv_heads
        head_norms = (n + k) * h if config.qk_norm == "all_heads" else 0
        if config.qk_norm is True:
            head_norms = 2 * count_norm_parameters(head_norm_name(config.norm), h)
        biases = (n + 2 * k) * h * config.qkv_bias + d * config.output_bias
        return ParameterCount(2 * d * n * h + 2 * d * k * h, biases + head_norms + layer.mixer.count_weight(heads))

    @staticmethod
    def flops_per_token(config: ModelConfig, layer: Layer, length: int) -> float:
        """Return forward and backward FLOPs per token of the attention over `length` tokens, without projections."""
        assert isinstance(layer.mixer, AttentionKind)
        return layer.mixer.flops_per_token(config.heads(layer), length)


def _chunk_segments(context: Context, chunk: int | None, q: Float[Array, "B T N H"]) -> SegmentIds:
    """Return the segments of the tokens of q: the chunks of documents, or whole documents if `chunk` is None."""
    batch, length = q.shape[:2]
    if chunk is None or (context.counted and length <= chunk):
        return context.segment_ids
    axis = context_axis()
    most = (length * (1 if axis is None else jax.lax.axis_size(axis)) - 1) // chunk + 1
    documents = 0 if context.segment_ids is None else context.segment_ids * most
    return jnp.broadcast_to(documents + context.positions // chunk, (batch, length))


def _make_head_norm(config: ModelConfig, layer: Layer, heads: int, axis: str) -> Norm | None:
    """Return the norm of query or key heads; None without `config.qk_norm`."""
    if config.qk_norm == "without_gain":
        # A rotation does not change the norm, so that it makes no difference which of the two is first.
        return None if layer.rotation is None else RMSNormWithoutGain(config.norm_eps)
    width = config.heads(layer).head_dim
    if config.qk_norm == "all_heads":
        return HeadsNorm(heads, width, config.norm_eps, axis)
    return make_norm(head_norm_name(config.norm), width, config.norm_eps) if config.qk_norm else None
