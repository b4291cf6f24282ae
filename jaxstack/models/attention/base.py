"""The interface of an attention kind: a file of its own with a configuration, how it attends, and how it decodes.

Dims: B batch, T query length, S cache length, N heads, K kv heads, H head_dim.
"""

import dataclasses
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jaxstack.config.base import Component
from jaxstack.parallel import current_context
from pallas_kernels import with_whole_sequences

if TYPE_CHECKING:
    from jaxstack.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What one layer of a model says of its attention.

    Attributes:
      num_heads, num_kv_heads: of the whole model; a call may see one device's part of them.
      scale: what scores are multiplied with.
      soft_cap: of the scores.
      window: keys that a query sees, itself included, where the model gives this layer a window.
      implementation: backend by name.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float | None = None
    window: int | None = None
    implementation: str | None = None


class CacheSlots(NamedTuple):
    """Where the tokens of a decoding call stand, the same for all layers."""

    queries: jax.Array
    """[B, T] int32 positions of this call's tokens, -1 for padding."""
    seen: jax.Array
    """[B] int32: tokens of each row in the cache before this call."""
    first: bool = False
    """Whether this is the first call: nothing is in the cache, positions count from 0, padding is at the end."""

    @property
    def seen_after(self) -> jax.Array:
        """[B] int32: `seen` with this call's tokens."""
        return jnp.maximum(self.seen, self.queries.max(axis=1) + 1)


def context_method() -> str | None:
    """How attention is to see the keys of other devices, of the rules in use; None: by its shape."""
    context = current_context()
    return context.layout.context_method if context else None


class AttentionKind(Component):
    """An attention kind: subclass it in a file of its own, with a `name`, and add it to `ATTENTION_KINDS`.

    Queries and keys come with rotary positions and norms applied. All kinds are causal.
    """

    @abstractmethod
    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, heads: AttentionSpec
    ) -> jax.Array:
        """q [B, T, N, H], k and v [B, T, K, H] -> [B, T, N, H]; a token attends only within its segment [B, T].

        The arrays are one device's rows and heads.
        """

    def attend_over(
        self,
        axis_name: str,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array | None,
        heads: AttentionSpec,
    ) -> jax.Array:
        """`attend` inside `shard_map`, where the arrays are this device's part of the sequence along a mesh axis.

        Without a better way a device gets whole sequences of a part of its heads, by an all-to-all.

        Raises:
          ValueError: the devices of the axis do not divide the heads, or another method was asked for.
        """
        problem = self.context_problem(context_method())
        if problem:
            raise ValueError(problem)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
            return self.attend(q, k, v, segment_ids, heads)

        return with_whole_sequences(attend, q, k, v, segment_ids, axis_name=axis_name)

    def context_problem(self, method: str | None) -> str | None:
        """Why this method of seeing the keys of other devices (None: any) does not work for this kind, or None."""
        if method in (None, "all_to_all"):
            return None
        name = getattr(self, "name", type(self).__name__)
        return (
            f"attention.name {name} needs whole sequences, which parallel.context_method all_to_all (or auto) gives; "
            f"found {method}, which works with softmax."
        )

    def exchanges_heads(self, method: str | None) -> bool:
        """Whether each of the devices that a sequence is split over must get an equal part of the query heads."""
        return True

    def make_weight(self, heads: AttentionSpec, rngs: nnx.Rngs) -> nnx.Param | None:
        """What a layer of this kind learns besides its projections; none by default."""
        return None

    def bound(self, *weight: jax.Array) -> Self:
        """This kind with a layer's weight, where it has one."""
        return self

    def count_weight(self) -> int:
        """Numbers in the weight."""
        return 0

    def length_problem(self, chunk: int) -> str | None:
        """Why sequences cannot be cut into chunks of so many tokens, or None."""
        return None

    @abstractmethod
    def make_cache(self, heads: AttentionSpec, batch: int, length: int, dtype: Any) -> Any:
        """What a layer keeps while decoding, before the first token: arrays with logical axes, for `length` tokens."""

    @abstractmethod
    def store(self, k: jax.Array, v: jax.Array, cache: Any, slots: CacheSlots, heads: AttentionSpec) -> Any:
        """The cache after the first tokens, which `attend` computes."""

    @abstractmethod
    def decode(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, slots: CacheSlots, heads: AttentionSpec
    ) -> tuple[jax.Array, Any]:
        """The outputs [B, T, N, H] of T further tokens, as in `attend` over all of them, and the new cache."""

    @abstractmethod
    def flops_per_token(self, heads: AttentionSpec, length: int) -> float:
        """Forward and backward FLOPs of one layer's attention a token, in sequences of `length`; no projections."""

    def check(self, model: "ModelConfig") -> None:
        """Raises ValueError where the model has what only softmax attention knows."""
        if "sliding_attention" in model.layer_types:
            name = getattr(self, "name", type(self).__name__)
            raise ValueError(
                f"layer_types: sliding_attention needs attention.name softmax; found {name}; leave layer_types out."
            )
        if model.attn_logit_softcapping is not None:
            raise ValueError(
                f"attn_logit_softcapping ({model.attn_logit_softcapping}) needs attention.name softmax; leave it out."
            )
