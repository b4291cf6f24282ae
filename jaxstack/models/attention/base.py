"""Interface of the kinds of attention: configuration, training forward pass, decoding cache and decoding.

Dims: B batch, T query length, S key length, N heads, K kv heads, H head_dim.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from jaxstack.config.base import Component
from jaxstack.models.attention.cache_formats import CacheFormat
from jaxstack.parallel import current_context
from pallas_kernels import apply_rotary, with_whole_sequences

LayerCache: TypeAlias = Any
"""Cache of one layer while decoding: a NamedTuple of arrays, which each attention kind declares for itself."""

Angles = tuple[Float[Array, "*B T 1 pairs"], Float[Array, "*B T 1 pairs"]]
"""Cosines and sines by which pairs of elements of queries and keys are rotated (rotary positions), float32."""

SegmentIds = Int[Array, "B T"] | None
"""Document of each token; a token attends only within its own. None: each row is one document."""


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Number of heads, head width and score settings of one layer's attention.

    Attributes:
      num_heads, num_kv_heads: heads of the whole model; a call may see one device's part of them.
      scale: factor of the scores.
      soft_cap: cap c of the scores, c tanh(score / c).
      window: keys that a query sees, itself included, where the model gives this layer a window.
      implementation: backend by name; None: the first that supports the call.
      cache_format: how the cache stores keys and values; None: in the compute dtype.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float | None = None
    window: int | None = None
    implementation: str | None = None
    cache_format: CacheFormat | None = None


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """Model settings that not every kind of attention supports (window, soft cap, scale), named as in `ModelConfig`."""

    layer_types: tuple[str, ...] = ("full_attention",)
    attn_logit_softcapping: float | None = None
    query_pre_attn_scalar: float | None = None


class CacheRoom(NamedTuple):
    """Room of a cache for many sequences that come and go, such as those of the serving engine."""

    slots: int
    """Largest number of sequences at a time. A cache of fixed size for each sequence has one place for each slot."""
    length: int
    """Largest number of tokens of a sequence."""
    pages: int
    """Number of pages that all sequences share, in which softmax attention stores keys and values."""
    page_size: int
    """Tokens per page."""


class PageGroup(NamedTuple):
    """Group of sequences with the same number of new tokens in a decoding call, and their places in the cache."""

    table: Int[Array, "R pages"]
    """Pages of each sequence, in order; entries after its last page are any valid ones."""
    lengths: Int[Array, " R"]
    """Tokens of each sequence in the cache, its new tokens included; 0: an empty row of the group."""
    width: int
    """New tokens per sequence; those before position 0 are padding."""
    slots: Int[Array, " R"]
    """Slot of each sequence, which is its place in caches of fixed size."""


class PageSlots(NamedTuple):
    """Slots of the paged KV cache that one decoding call writes, and pages that it reads; the same for all layers."""

    write: Int[Array, " T"]
    """Number of each token's slot, page * page size + offset; a number past the last slot is not written."""
    groups: tuple[PageGroup, ...]
    """The sequences in the order of their tokens."""

    def split(self, *packed: Shaped[Array, "1 T ..."]) -> Iterator[tuple[PageGroup, list[Shaped[Array, "R C ..."]]]]:
        """Yield each group with its part of the packed arrays, in rows of the group's width C."""
        start = 0
        for group in self.groups:
            rows = group.lengths.shape[0]
            end = start + rows * group.width
            yield group, [x[0, start:end].reshape(rows, group.width, *x.shape[2:]) for x in packed]
            start = end


def pack_groups(parts: Iterable[Shaped[Array, "_ _ *dims"]]) -> Shaped[Array, "1 T *dims"]:
    """Join the rows of all groups to one packed row, as `PageSlots.split` took them."""
    return jnp.concatenate([part.reshape(-1, *part.shape[2:]) for part in parts])[None]


class CacheSlots(NamedTuple):
    """Positions of one decoding call's new tokens, and how many tokens each row has cached; the same for all layers."""

    queries: Int[Array, "B T"]
    """Position of each of this call's tokens, -1 for padding."""
    seen: Int[Array, " B"]
    """Tokens of each row in the cache before this call."""
    first: bool = False
    """True for the first call: the cache is empty, positions count from 0, and padding is at the end."""
    pages: PageSlots | None = None
    """Places of the tokens where the cache is in pages; the tokens of all sequences are then packed in one row."""

    @property
    def lengths_after(self) -> Int[Array, " B"]:
        """Number of tokens that each row has in the cache after this call."""
        return jnp.maximum(self.seen, self.queries.max(axis=1) + 1)


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


class AttentionKind(Component):
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

    def context_parallel_problem(self, method: str | None) -> str | None:
        """Return why this kind does not support a method of context parallelism, or None if it does.

        Args:
          method: a value of `parallel.context_method`; None: any.
        """
        if method in (None, "all_to_all"):
            return None
        name = getattr(self, "name", type(self).__name__)
        return (
            f"attention.name {name} needs whole sequences, which parallel.context_method all_to_all (or auto) gives; "
            f"found {method}, which works with softmax."
        )

    def exchanges_heads(self, method: str | None) -> bool:
        """Return True if context parallelism needs the query heads to divide evenly among its devices."""
        return True

    def make_weight(self, heads: AttentionSpec, rngs: nnx.Rngs) -> nnx.Param | None:
        """Create the additional parameter that this kind of attention learns per layer; None if it has none."""
        return None

    def with_weight(self, *weight: jax.Array) -> "AttentionKind":
        """Return a copy of this kind that uses the given array as its additional parameter; `self` if it has none."""
        return self

    def count_weight(self) -> int:
        """Count the parameters that this kind of attention adds to each layer."""
        return 0

    def length_problem(self, chunk: int) -> str | None:
        """Return why context parallelism cannot split sequences into parts of `chunk` tokens, or None."""
        return None

    @abstractmethod
    def make_cache(self, heads: AttentionSpec, batch: int, length: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        """Create a layer's empty decoding cache, all zeros, with room for `length` tokens in each of `batch` rows."""

    def make_shared_cache(self, heads: AttentionSpec, room: CacheRoom, dtype: jax.typing.DTypeLike) -> LayerCache:
        """Create a layer's empty cache for many sequences; by default one row of `make_cache` for each slot.

        A kind that stores every key overrides this with `empty_pages`, so that sequences take memory as they grow and
        share common prefixes.
        """
        return self.make_cache(heads, room.slots, room.length, dtype)

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
        if "sliding_attention" in options.layer_types:
            name = getattr(self, "name", type(self).__name__)
            raise ValueError(
                f"layer_types: sliding_attention needs attention.name softmax; found {name}; leave layer_types out."
            )
        if options.attn_logit_softcapping is not None:
            raise ValueError(
                f"attn_logit_softcapping ({options.attn_logit_softcapping}) needs attention.name softmax; leave it out."
            )
