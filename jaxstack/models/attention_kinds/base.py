"""The interface of an attention kind: a file of its own with a configuration, how it attends, and how it decodes.

Dims: B batch, T query length, S cache length, N heads, K kv heads, H head_dim.
"""

import dataclasses
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jaxstack.config import Component

if TYPE_CHECKING:
    from jaxstack.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Heads:
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
    positions: jax.Array
    """[B, S] int32, which position each slot holds, -1 where empty or padding; already with this call's tokens."""
    start: jax.Array
    """[] int32: the slot that this call's first token is written to."""


class AttentionKind(Component):
    """An attention kind: subclass it in a file of its own, with a `name`, and add it to `ATTENTION_KINDS`.

    Queries and keys come with rotary positions and norms applied. All kinds are causal.
    """

    @abstractmethod
    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, heads: Heads
    ) -> jax.Array:
        """q [B, T, N, H], k and v [B, T, K, H] -> [B, T, N, H]; a token attends only within its segment [B, T].

        The arrays are one device's rows and heads.
        """

    @abstractmethod
    def make_cache(self, heads: Heads, batch: int, length: int, dtype: Any) -> Any:
        """What a layer keeps while decoding, before the first token: arrays with logical axes, for `length` slots."""

    @abstractmethod
    def decode(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, slots: CacheSlots, heads: Heads
    ) -> tuple[jax.Array, Any]:
        """The outputs [B, T, N, H] of T further tokens, as in `attend` over all of them, and the new cache."""

    @abstractmethod
    def flops_per_token(self, heads: Heads, length: int) -> float:
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
