"""Base class of linear attention kinds, whose decoding cache is a recurrent state of fixed size."""

from abc import abstractmethod
from typing import Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxstack.models.attention.base import AttentionKind, AttentionSpec
from jaxstack.models.layer import CacheSlots, SegmentIds
from jaxstack.parallel import shard
from pallas_kernels import LinearState, empty_linear_state


@runtime_checkable
class LinearOperation(Protocol):
    """Interface of a linear attention function; given a recurrent state, it also returns the new state."""

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        segment_ids: jax.Array | None = ...,
        state: LinearState | None = ...,
    ) -> jax.Array | tuple[jax.Array, LinearState]: ...


class Recurrent(AttentionKind):
    """Attention by feature maps of queries and keys, whose memory while decoding does not grow with the text."""

    @abstractmethod
    def feature_count(self, heads: AttentionSpec) -> int:
        """Return the length of the feature vector that the feature map computes from a head's query or key."""

    @abstractmethod
    def operation(self, heads: AttentionSpec) -> LinearOperation:
        """Return the linear attention function, with this configuration's arguments (such as the feature map) bound."""

    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        segment_ids: SegmentIds,
        heads: AttentionSpec,
    ) -> Float[Array, "B T N H"]:
        return cast(jax.Array, self.operation(heads)(q, k, v, segment_ids=segment_ids))

    def make_cache(self, heads: AttentionSpec, batch: int, length: int, dtype: jax.typing.DTypeLike) -> LinearState:
        state = empty_linear_state(batch, heads.num_kv_heads, self.feature_count(heads), heads.head_dim)
        return LinearState(*(shard(x, "batch", "act_kv_heads", *(None,) * (x.ndim - 2)) for x in state))

    def store(
        self,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        cache: LinearState,
        slots: CacheSlots,
        heads: AttentionSpec,
    ) -> LinearState:
        return self.decode(k, k, v, cache, slots, heads)[1]  # XLA removes the operations that only the outputs need

    def decode(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        cache: LinearState,
        slots: CacheSlots,
        heads: AttentionSpec,
    ) -> tuple[Float[Array, "B T N H"], LinearState]:
        there = slots.queries >= 0
        # The returned state belongs to the last document, so padding is moved before the tokens.
        order = jnp.argsort(there, axis=1, stable=True)
        q, k, v = (jnp.take_along_axis(x, order[:, :, None, None], axis=1) for x in (q, k, v))
        padding = jnp.take_along_axis(jnp.where(there, 0, -1), order, axis=1)
        found = self.operation(heads)(q, k, v, segment_ids=padding, state=cache)
        out, state = cast(tuple[jax.Array, LinearState], found)
        return jnp.take_along_axis(out, jnp.argsort(order, axis=1)[:, :, None, None], axis=1), state

    def flops_per_token(self, heads: AttentionSpec, length: int) -> float:
        """Return forward and backward FLOPs per token of the recurrence: updating and reading the state."""
        return 6.0 * self.feature_count(heads) * heads.head_dim * (heads.num_heads + heads.num_kv_heads)
