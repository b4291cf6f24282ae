"""Interface of the kinds of attention: configuration, training forward pass, decoding cache and decoding.

Dims: B batch, T query length, S key length, N heads, K kv heads, H head_dim.
"""

import dataclasses
from abc import abstractmethod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxstack.models.attention.cache_formats import CacheFormat
from jaxstack.models.layer import Angles, CacheRoom, CacheSlots, LayerCache, Mixer, SegmentIds
from jaxstack.parallel import current_context
from pallas_kernels import apply_rotary, with_whole_sequences


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Number of heads, head width and score settings of one layer's attention.

    Attributes:
      num_heads, num_kv_heads: heads of the whole model; a call may see one device's part of them.
      scale: factor of the scores.
      soft_cap: cap c of the scores, c tanh(score / c).
      window: keys that a query sees, itself included, where the model gives this layer a window.
      chunk: a query sees only keys of its own chunk of this many positions, which count from the start of the document.
        `AttentionKind.attend` gets the chunks as segments; only decoding has to apply this.
      implementation: backend by name; None: the first that supports the call.
      cache_format: how the cache stores keys and values; None: in the compute dtype.
      value_width: number of channels of a value, if values are the first channels of their keys; else None.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float | None = None
    window: int | None = None
    chunk: int | None = None
    implementation: str | None = None
    cache_format: CacheFormat | None = None
    value_width: int | None = None

    @property
    def score_options(self) -> dict[str, Any]:
        """Settings of the scores, by the names that kernels give them."""
        return {"scale": self.scale, "soft_cap": self.soft_cap, "window": self.window}


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """Model settings that not every kind of attention supports (window, soft cap), named as in `ModelConfig`.

    `num_kv_heads` and `head_dim` are numbers also where the configuration leaves them out.
    """

    layer_types: tuple[str, ...]
    attn_logit_softcapping: float | None
    query_pre_attn_scalar: float | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool | str
    qkv_bias: bool
    output_bias: bool
    partial_rotary_factor: float
    rope_local_base_freq: float | None


def split_and_rotate(
    joined: Float[Array, "B T heads H"], angles: Angles, heads: AttentionSpec
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Return the queries and keys in `joined` with rotary positions applied, and the values."""
    q, k, v = jnp.split(joined, (heads.num_heads, heads.num_heads + heads.num_kv_heads), axis=-2)
    cos, sin = (x.squeeze(-2) for x in angles)
    return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v


def context_method() -> str | None:
    """Return the configured method of context parallelism; None to choose it by the shapes of the inputs."""
    context = current_context()
    return context.layout.context_method if context else None


class AttentionKind(Mixer):
    """Base class of the kinds of attention. A new one is a subclass with a `name`, added to `AnyAttention`.

    Queries and keys arrive with rotary positions and norms applied. All kinds are causal.
    """

    @abstractmethod
    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        segment_ids: SegmentIds,
        heads: AttentionSpec,
    ) -> Float[Array, "B T N H"]:
        """Compute attention of each query to its own and earlier keys.

        The arrays are one device's rows and heads.
        """

    def attend_over(
        self,
        axis_name: str,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        segment_ids: SegmentIds,
        heads: AttentionSpec,
    ) -> Float[Array, "B T N H"]:
        """Compute attention inside a `shard_map` over a mesh axis whose devices each hold a part of the sequence.

        The default gives each device whole sequences of a part of its heads, by an all-to-all.

        Raises:
          ValueError: the devices of the axis do not divide the heads, or another method was asked for.
        """
        problem = self.context_parallel_problem(context_method())
        if problem:
            raise ValueError(problem)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
            return self.attend(q, k, v, segment_ids, heads)

        return with_whole_sequences(attend, q, k, v, segment_ids, axis_name=axis_name)

    weight_name: ClassVar[str] = "kind_weight"
    """Name of the additional parameter within the layer."""
    weight_per_head: ClassVar[bool] = False
    """True if the additional parameter has an element for each query head; else every device needs all of it."""

    def make_weight(self, heads: AttentionSpec, rngs: nnx.Rngs) -> nnx.Param | None:
        """Create the additional parameter that this kind of attention learns per layer; None if it has none."""
        return None

    def with_weight(self, *weight: jax.Array) -> "AttentionKind":
        """Return a copy of this kind that uses the given array as its additional parameter; `self` if it has none."""
        return self

    def count_weight(self, heads: AttentionSpec) -> int:
        """Count the parameters that this kind of attention adds to each layer."""
        return 0

    @abstractmethod
    def make_cache(self, heads: AttentionSpec, batch: int, length: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        """Create a layer's empty decoding cache, all zeros, with room for `length` tokens in each of `batch` rows."""

    def make_shared_cache(self, heads: AttentionSpec, room: CacheRoom, dtype: jax.typing.DTypeLike) -> LayerCache:
        """Create a layer's empty cache for many sequences; by default one row of `make_cache` for each slot.

        A kind that stores every key overrides this with `empty_pages`, so that sequences take memory as they grow and
        share common prefixes.
        """
        return self.make_cache(heads, room.rows, room.length, dtype)

    @abstractmethod
    def store(
        self,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        cache: LayerCache,
        slots: CacheSlots,
        heads: AttentionSpec,
    ) -> LayerCache:
        """Write the keys and values of the prompts to an empty cache, and return the cache."""

    @abstractmethod
    def decode(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        cache: LayerCache,
        slots: CacheSlots,
        heads: AttentionSpec,
    ) -> tuple[Float[Array, "B T N H"], LayerCache]:
        """Add T tokens to the cache; return their attention to all tokens so far, and the cache."""

    def decode_joined(
        self,
        joined: Float[Array, "B T heads H"],
        angles: Angles,
        cache: LayerCache,
        slots: CacheSlots,
        heads: AttentionSpec,
    ) -> tuple[Float[Array, "B T N H"], LayerCache]:
        """Do what `decode` does, with heads that are in one array and have no rotary positions yet.

        A kind may override this to rotate heads and write them to its cache in one kernel. The cache is in the compute
        dtype, not in a `cache_format`.

        Args:
          joined: heads of queries, keys and values, N + 2 K of them in this order.
          angles: rotations of the tokens' queries and keys.
        """
        return self.decode(*split_and_rotate(joined, angles, heads), cache, slots, heads)

    @abstractmethod
    def flops_per_token(self, heads: AttentionSpec, length: int) -> float:
        """Return forward and backward FLOPs per token of one layer's attention, without its projections."""

    def check(self, options: ScoreOptions) -> None:
        """Check that this kind supports the model's settings; the default accepts neither windows nor a soft cap.

        Raises:
          ValueError: the kind does not support one of them.
        """
        for name in ("sliding_attention", "chunked_attention"):
            if name in options.layer_types:
                raise ValueError(
                    f"layer_types: {name} needs attention.name softmax; found {self.title}; leave layer_types out."
                )
        if options.attn_logit_softcapping is not None:
            raise ValueError(
                f"attn_logit_softcapping ({options.attn_logit_softcapping}) needs attention.name softmax; leave it out."
            )
