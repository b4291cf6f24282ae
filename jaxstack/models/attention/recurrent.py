"""What kinds of attention with a state of fixed size share: the state as the cache, and their FLOPs."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxstack.models.attention.base import AttentionKind, AttentionSpec, CacheSlots
from jaxstack.parallel import shard
from pallas_kernels import LinearState, empty_linear_state


class Recurrent(AttentionKind):
    """Attention through features of queries and keys: memory while decoding does not grow with the text."""

    @abstractmethod
    def features_of(self, heads: AttentionSpec) -> int:
        """How many features a head has."""

    @abstractmethod
    def operation(self, heads: AttentionSpec) -> Callable[..., Any]:
        """A function like `linear_attention` of (q, k, v, segment_ids=, state=)."""

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, heads: AttentionSpec
    ) -> jax.Array:
        return self.operation(heads)(q, k, v, segment_ids=segment_ids)

    def make_cache(self, heads: AttentionSpec, batch: int, length: int, dtype: Any) -> LinearState:
        state = empty_linear_state(batch, heads.num_kv_heads, self.features_of(heads), heads.head_dim)
        return LinearState(*(shard(x, "batch", "act_kv_heads", *(None,) * (x.ndim - 2)) for x in state))

    def store(
        self, k: jax.Array, v: jax.Array, cache: LinearState, slots: CacheSlots, heads: AttentionSpec
    ) -> LinearState:
        return self.decode(k, k, v, cache, slots, heads)[1]  # XLA leaves out what only the outputs need

    def decode(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: LinearState, slots: CacheSlots, heads: AttentionSpec
    ) -> tuple[jax.Array, LinearState]:
        there = slots.queries >= 0
        # The state is that of the last document: padding goes before the tokens.
        order = jnp.argsort(there, axis=1, stable=True)
        q, k, v = (jnp.take_along_axis(x, order[:, :, None, None], axis=1) for x in (q, k, v))
        padding = jnp.take_along_axis(jnp.where(there, 0, -1), order, axis=1)
        out, state = self.operation(heads)(q, k, v, segment_ids=padding, state=cache)
        return jnp.take_along_axis(out, jnp.argsort(order, axis=1)[:, :, None, None], axis=1), state

    def flops_per_token(self, heads: AttentionSpec, length: int) -> float:
        """Of the recurrence token by token: each key is added to the state, each query multiplied with it."""
        return 6.0 * self.features_of(heads) * heads.head_dim * (heads.num_heads + heads.num_kv_heads)
