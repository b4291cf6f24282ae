"""Gemma 4's attention sublayer: values are normalized, and may be the keys before their norm and rotation. A layer may
attend to the keys and values of an earlier layer, and has then only queries (E2B and E4B).

Dims: B batch, T query length, D model, N heads, H head_dim.
"""

from typing import cast

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxstack.models.attention.gemma import GemmaAttention
from jaxstack.models.config import ModelConfig
from jaxstack.models.layer import (
    CacheAndKept,
    CacheRoom,
    Context,
    Kept,
    Layer,
    LayerCache,
    ParameterCount,
)
from jaxstack.models.linear import apply_gathered
from jaxstack.models.mixers.attention import Attention
from jaxstack.models.norm import LayerInput, RMSNormWithoutGain, count_norm_parameters, head_norm_name


class GemmaAttentionLayer(Attention):
    """The attention sublayer of Gemma 4.

    Args:
      layer: its mixer is a `GemmaAttention`.
    """

    def __init__(self, config: ModelConfig, layer: Layer, rngs: nnx.Rngs):
        super().__init__(config, layer, rngs)
        self.v_norm = RMSNormWithoutGain(config.norm_eps)
        self.values_are_keys = _values_are_keys(layer)
        self.keeps = layer.keeps
        self.reuses = layer.reuses
        if self.values_are_keys or self.reuses is not None:
            del self.v_proj
        if self.reuses is not None:
            del self.k_proj, self.k_norm, self.v_norm

    def __call__(
        self, x: LayerInput, context: Context, cache: LayerCache | None = None
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Apply the sublayer to x [B, T, D]; also return the cache with this call's tokens added.

        A layer whose keys and values later layers reuse returns them with its cache, as `CacheAndKept`.
        """
        slots = context.slots
        if self.reuses is not None:
            (q,) = apply_gathered(x, self.q_proj)
            q = self._finish_queries(q, context)
            assert context.beside.kept is not None, f"no earlier layer keeps the keys and values of {self.reuses}"
            return self._project_output(self._attend_to_kept(q, context, context.beside.kept[self.reuses])), cache
        if self.keeps is None:
            return super().__call__(x, context, cache)
        q, k, v = self._queries_keys_values(x, context)
        kept = Kept(k, v, cache)
        if cache is None or slots is None or slots.first:
            kept = Kept(*self._as_stored(k, v), None)
            out = self._attend_without_cache(q, kept.key, kept.value, context)
            cache = cache if cache is None or slots is None else self.kind.store(k, v, cache, slots, self.heads)
        else:
            out, cache = self._decode_heads(self.kind, q, k, v, cache, slots)
            kept = kept if slots.pages is None else kept._replace(cache=cache)
        return self._project_output(out), CacheAndKept(cache, {self.keeps: kept})

    def _attend_to_kept(self, q: Float[Array, "B T N H"], context: Context, kept: Kept) -> Float[Array, "B T N H"]:
        """Compute attention to the keys and values of an earlier layer, and to those in its cache while decoding."""
        slots = context.slots
        if kept.cache is None or slots is None:
            return self._attend_without_cache(q, kept.key, kept.value, context)
        kind = cast(GemmaAttention, self.kind)
        if slots.pages is None:
            # The cache is that before these tokens: a ring may have lost keys that their first queries see.
            return kind.decode(q, kept.key, kept.value, kept.cache, slots, self.heads)[0]
        row = q.reshape(1, -1, *q.shape[2:])
        return kind.attend_to_pages(row, kept.cache, slots, self.heads)[0].reshape(q.shape)

    def channel_order(self) -> Int[Array, "*layers K H"] | None:
        """Return the order in which the cache stores the channels of keys; None also for a layer without keys."""
        return None if self.reuses is not None else super().channel_order()

    def make_cache(self, batch: int, length: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        """Create an empty cache as in other models; None for a layer without keys."""
        return None if self.reuses is not None else super().make_cache(batch, length, dtype)

    def make_shared_cache(self, room: CacheRoom, dtype: jax.typing.DTypeLike) -> LayerCache:
        """Create an empty cache for the sequences of an engine; None for a layer without keys."""
        return None if self.reuses is not None else super().make_shared_cache(room, dtype)

    def join_projections(self, parts: int = 1) -> bool:
        """Merge the projections into one layer as in other models, unless values or keys have none."""
        return self.reuses is None and not self.values_are_keys and super().join_projections(parts)

    def _project(self, x: LayerInput) -> tuple[jax.Array, jax.Array, jax.Array]:
        if self.values_are_keys:
            q, k = apply_gathered(x, self.q_proj, self.k_proj)
            v = k
        else:
            q, k, v = super()._project(x)
        return q, k, self.v_norm(v)

    @staticmethod
    def count(config: ModelConfig, layer: Layer) -> ParameterCount:
        """Count the parameters of this sublayer: values that are keys have no projection, reused keys neither."""
        matmul, other = Attention.count(config, layer)
        heads = config.heads(layer)
        missing = 2 if layer.reuses is not None else int(_values_are_keys(layer))
        width = missing * heads.num_kv_heads * heads.head_dim
        norm = 0 if layer.reuses is None else count_norm_parameters(head_norm_name(config.norm), heads.head_dim)
        return ParameterCount(matmul - config.hidden_size * width, other - width * config.qkv_bias - norm)


def _values_are_keys(layer: Layer) -> bool:
    assert isinstance(layer.mixer, GemmaAttention)
    return layer.mixer.attention_k_eq_v and layer.window is None
