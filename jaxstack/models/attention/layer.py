"""Causal multi-head attention: grouped queries, rotary positions, and the attention kind that the model chooses.

Dims: B batch, T query length, D model, N heads, K kv heads, H head_dim.
"""

from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxstack.models.attention.base import CacheSlots
from jaxstack.models.config import ModelConfig
from jaxstack.models.initialization import make_initializer
from jaxstack.models.linear import Input, Linear, apply_gathered, apply_scattered
from jaxstack.models.norm import NORMS, RMSNorm
from jaxstack.models.rope import apply_rope
from jaxstack.parallel import context_axis, keep, shard, with_local_heads

Angles = tuple[jax.Array, jax.Array] | None


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
    local_angles: Angles = None
    """Of layers with a window, where the model has others for them."""


class Attention(nnx.Module):
    """Attention of one layer; `window` is how many keys a query sees, itself included (None: the kind decides)."""

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
        norm = RMSNorm if config.norm == "layer_norm" else NORMS[config.norm]
        self.q_norm = norm(h, config.norm_eps) if config.qk_norm else None
        self.k_norm = norm(h, config.norm_eps) if config.qk_norm else None
        self.kind, self.heads = config.attention, config.heads(window)
        self.kind_weight = self.kind.make_weight(self.heads, rngs)

    def __call__(self, x: Input, context: Context, cache: Any = None) -> tuple[jax.Array, Any]:
        """x [B, T, D] -> ([B, T, D], the kind's cache with this call's tokens)."""
        q, k, v = apply_gathered(x, self.q_proj, self.k_proj, self.v_proj)
        q = shard(q, "batch", "length", "act_heads", "act_head_dim")
        k = shard(k, "batch", "length", "act_kv_heads", "act_head_dim")
        v = shard(v, "batch", "length", "act_kv_heads", "act_head_dim")
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        local = self.heads.window is not None and context.local_angles is not None
        angles = context.local_angles if local else context.angles
        if angles is not None:
            q, k = apply_rope(q, angles), apply_rope(k, angles)
        q, k = keep(q), keep(k)
        weight = () if self.kind_weight is None else (self.kind_weight[...],)
        slots, kind = context.slots, self.kind.bound(*weight)
        if cache is None or slots is None or slots.first:
            out = with_local_heads(self._attend, q, k, v, context.segment_ids, whole=weight)
            cache = cache if cache is None or slots is None else kind.store(k, v, cache, slots, self.heads)
        else:
            out, cache = kind.decode(q, k, v, cache, slots, self.heads)
        out = shard(out, "batch", "length", "act_heads", "act_head_dim")
        return apply_scattered(out, self.o_proj), cache

    def _attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, *weight: jax.Array
    ) -> jax.Array:
        kind, axis = self.kind.bound(*weight), context_axis()
        if axis is None:
            return kind.attend(q, k, v, segment_ids, self.heads)
        return kind.attend_over(axis, q, k, v, segment_ids, self.heads)
