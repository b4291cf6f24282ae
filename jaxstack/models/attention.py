"""Causal multi-head attention: grouped queries, rotary positions, windows, packed documents, and a KV cache.

Dims: B batch, T query length, S cache length, D model, N heads, K kv heads, H head_dim.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxstack.models.config import ModelConfig
from jaxstack.models.initialization import make_initializer
from jaxstack.models.linear import Linear, apply_together
from jaxstack.models.norm import RMSNorm
from jaxstack.models.rope import apply_rope
from jaxstack.parallel import shard
from pallas_kernels import flash_attention

Angles = tuple[jax.Array, jax.Array] | None


class LayerCache(NamedTuple):
    """Keys and values of one layer, [B, S, K, H] each."""

    key: jax.Array
    value: jax.Array


class CacheSlots(NamedTuple):
    """Which position each of the S cache slots holds, the same for all layers."""

    positions: jax.Array
    """[B, S] int32, -1 where empty or padding; already holds the tokens of this call."""
    start: jax.Array
    """[] int32: the slot that this call's first token is written to."""


class Context(NamedTuple):
    """What every layer of one forward pass shares."""

    positions: jax.Array
    """[B, T] int32, or [1, T] where they are the same in every row."""
    angles: Angles
    segment_ids: jax.Array | None
    """[B, T] int32; tokens attend only within their segment."""
    slots: CacheSlots | None
    """Given when decoding with a cache."""
    counted: bool = False
    """Whether positions are 0..T-1 in every row."""


class Attention(nnx.Module):
    """Softmax attention of one layer; `window` is how many keys a query sees, itself included (None: all)."""

    def __init__(self, config: ModelConfig, window: int | None, rngs: nnx.Rngs):
        d, h = config.hidden_size, config.width_per_head
        n, k = config.num_heads, config.kv_heads
        inner, outer = make_initializer(config), make_initializer(config, residual=True)

        def project(heads: int, axis: str) -> Linear:
            return Linear(
                (d,), (heads, h), ("embed", axis, "head_dim"), rngs=rngs, initialize=inner, bias=config.qkv_bias
            )

        self.q_proj, self.k_proj, self.v_proj = project(n, "heads"), project(k, "kv_heads"), project(k, "kv_heads")
        self.o_proj = Linear(
            (n, h), (d,), ("heads", "head_dim", "embed"), rngs=rngs, initialize=outer, bias=config.output_bias
        )
        self.q_norm = RMSNorm(h, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(h, config.norm_eps) if config.qk_norm else None
        self.config, self.window = config, window

    def __call__(
        self, x: jax.Array, context: Context, cache: LayerCache | None = None
    ) -> tuple[jax.Array, LayerCache | None]:
        """x [B, T, D] -> ([B, T, D], the cache with this call's keys and values)."""
        q, k, v = apply_together(x, self.q_proj, self.k_proj, self.v_proj)
        q = shard(q, "batch", "length", "act_heads", "act_head_dim")
        k = shard(k, "batch", "length", "act_kv_heads", "act_head_dim")
        v = shard(v, "batch", "length", "act_kv_heads", "act_head_dim")
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if context.angles is not None:
            q, k = apply_rope(q, context.angles), apply_rope(k, context.angles)
        if cache is None or context.slots is None:
            out: Any = flash_attention(
                q,
                k,
                v,
                causal=True,
                window=self.window,
                segment_ids=context.segment_ids,
                scale=self.config.attention_scale,
                soft_cap=self.config.attn_logit_softcapping,
                implementation=self.config.attention_implementation,
            )
        else:
            cache = _write(cache, k, v, context.slots.start)
            out = self._attend_cache(q, cache, context.positions, context.slots.positions)
        out = shard(out, "batch", "length", "act_heads", "act_head_dim")
        return self.o_proj(out), cache

    def _attend_cache(
        self, q: jax.Array, cache: LayerCache, positions: jax.Array, stored: jax.Array
    ) -> jax.Array:
        # Decoding reads the whole cache once a token: bound by its bytes, so a plain einsum is as fast as a kernel.
        batch, length, heads, width = q.shape
        groups = heads // cache.key.shape[2]
        q = q.reshape(batch, length, -1, groups, width)
        scores = jnp.einsum("btkgh,bskh->bkgts", q, cache.key, preferred_element_type=jnp.float32)
        scores = scores * self.config.attention_scale
        if self.config.attn_logit_softcapping:
            scores = jnp.tanh(scores / self.config.attn_logit_softcapping) * self.config.attn_logit_softcapping
        behind = positions[:, :, None] - stored[:, None, :]
        visible = (stored[:, None, :] >= 0) & (behind >= 0)
        if self.window is not None:
            visible &= behind < self.window
        scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(cache.value.dtype)
        return jnp.einsum("bkgts,bskh->btkgh", weights, cache.value).reshape(batch, length, heads, width)


def _write(cache: LayerCache, k: jax.Array, v: jax.Array, start: jax.Array) -> LayerCache:
    put = jax.lax.dynamic_update_slice_in_dim
    return LayerCache(
        put(cache.key, k.astype(cache.key.dtype), start, axis=1),
        put(cache.value, v.astype(cache.value.dtype), start, axis=1),
    )
