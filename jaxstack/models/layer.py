"""A layer as a record, and the interface of its token mixer, the sublayer in which tokens exchange information.

Dims: B batch, T query length, D model, K kv heads, H head_dim.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxstack.config.base import Component
from jaxstack.models.layer_sums import LayerSums

LayerCache: TypeAlias = Any
"""Cache of one layer while decoding: a NamedTuple of arrays, which each attention kind declares for itself."""

Angles = tuple[Float[Array, "*B T 1 pairs"], Float[Array, "*B T 1 pairs"]]
"""Cosines and sines by which pairs of elements of queries and keys are rotated (rotary positions), float32."""

SegmentIds = Int[Array, "B T"] | None
"""Document of each token; a token attends only within its own. None: each row is one document."""


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
    snapshots: int = 0
    """Number of further places of a cache of fixed size, which keep those of earlier sequences."""

    @property
    def rows(self) -> int:
        """Number of rows of a cache of fixed size: one for each slot, and then those of the snapshots."""
        return self.slots + self.snapshots


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
    drafts: bool = False
    """True: the tokens may be rejected, so that caches of fixed size do not keep them."""


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


class Kept(NamedTuple):
    """Keys and values that a layer computed and later layers attend to as well, see `Layer.keeps`."""

    key: Float[Array, "B T K H"]
    value: Float[Array, "B T K H"]
    cache: LayerCache | None
    """The layer's cache while decoding: pages with these tokens, or another cache without them; None: there is none."""


class CacheAndKept(NamedTuple):
    """Updated cache of a mixer with the keys and values that later layers reuse; returned in place of the cache."""

    cache: LayerCache | None
    kept: dict[str, Kept]
    """The keys and values, by the name in `Layer.keeps`."""


class CacheAndSums(NamedTuple):
    """Updated cache of a mixer with losses of its own; returned in place of the cache where `Context.with_losses`."""

    cache: LayerCache | CacheAndKept | None
    sums: LayerSums


class Beside(NamedTuple):
    """Arrays that layers read beside the residual stream: those of all layers, or, within a layer, of this one."""

    kept: dict[str, Kept] | None = None
    """Keys and values that earlier layers left for later ones, by name."""
    inputs: Float[Array, "*L B T d"] | None = None
    """Embeddings of each layer, see `jaxstack.models.per_layer_embedding`."""
    experts: Int[Array, "B T *L k"] | None = None
    """Experts that tokens are sent to; None: the routers choose."""

    @property
    def has_gradients(self) -> bool:
        """True if gradients flow through these arrays."""
        return self.kept is not None or self.inputs is not None

    def of_layer(self, number: Int[Array, ""] | int, index: int | None = None) -> "Beside":
        """Return what the layer `number` reads.

        Args:
          index: its index in `inputs`, where these are of some of the layers only; None: its number.
        """
        inputs = None if self.inputs is None else self.inputs[number if index is None else index]
        return Beside(self.kept, inputs, None if self.experts is None else self.experts[:, :, number])

    def after(self, cache: LayerCache | CacheAndKept | None) -> "tuple[Beside, LayerCache | None]":
        """Return what the layers after one may read, given the updated cache that it returned; and that cache."""
        if not isinstance(cache, CacheAndKept):
            return self, cache
        return self._replace(kept={**(self.kept or {}), **cache.kept}), cache.cache


class Context(NamedTuple):
    """Inputs that all layers of one forward pass share, such as positions and rotary angles."""

    positions: Int[Array, "#B T"]
    """Positions of the tokens; one row where they are the same in every row."""
    angles: Mapping[str, Angles]
    """Rotations of queries and keys by name, which a layer's `rotation` chooses; empty: no layer rotates them."""
    segment_ids: SegmentIds
    slots: CacheSlots | None
    """Positions in the cache while decoding; None: there is no cache."""
    counted: bool = False
    """True if positions are 0..T-1 in every row."""
    beside: Beside = Beside()
    """Inputs of layers in addition to the residual stream."""
    records_experts: bool = False
    """True if mixtures of experts return the experts of each token."""
    with_losses: bool = False
    """True if mixers that have a loss of their own return it, see `CacheAndSums`."""


class Mixer(Component):
    """Base class of the configurations of token mixers, the sublayers in which tokens exchange information.

    Each has a `name`. `jaxstack.models.mixers.MIXERS` has the module that computes it.
    """

    shares_keys: ClassVar[bool] = False
    """True if layers can attend to the keys and values of earlier ones, see `Layer.reuses`."""

    @property
    def title(self) -> str:
        """Its name in messages."""
        return getattr(self, "name", type(self).__name__)

    @property
    def described(self) -> str:
        """The setting that a model has this mixer by, in messages."""
        return f"attention.name {self.title}"

    @property
    def own_heads(self) -> int | None:
        """Number of its heads, which `parallel.tensor` and `context` split; None: those of the model's attention."""
        return None

    def layer_heads(self, heads: Any) -> Any:
        """Return the heads of a layer, an `AttentionSpec`, given those that the model's settings describe."""
        return heads

    def rotated_width(self, head_dim: int) -> int:
        """Return how many channels of a head are rotated by position, of `head_dim`."""
        return head_dim

    def context_parallel_problem(self, method: str | None) -> str | None:
        """Return why this mixer does not support a method of context parallelism, or None if it does.

        Args:
          method: a value of `parallel.context_method`; None: any.
        """
        if method in (None, "all_to_all"):
            return None
        return (
            f"{self.described} needs whole sequences, which parallel.context_method all_to_all (or auto) "
            f"gives; found {method}, which works with softmax."
        )

    def exchanges_heads(self, method: str | None) -> bool:
        """Return True if context parallelism needs the query heads to divide evenly among its devices."""
        return True

    def key_source(self, heads: int) -> tuple[int, int]:
        """Return how many numbers of a token context parallelism may send in place of keys and values, or 0.

        Args:
          heads: number of query heads.

        Returns:
          That number, and how many parameters compute keys and values from it.
        """
        return 0, 0

    def length_problem(self, chunk: int) -> str | None:
        """Return why context parallelism cannot split sequences into parts of `chunk` tokens, or None."""
        return None


@dataclasses.dataclass(frozen=True)
class Layer:
    """Composition of a layer of a model. Layers with equal records have equal structure, and can be stacked.

    Attributes:
      mixer: configuration of its token mixer; None: the layer has only a feed-forward sublayer.
      window: number of tokens that a token sees, itself included; None: all earlier ones that the mixer sees.
      chunk: number of positions of the chunks that tokens see only their own of; None: there are no chunks.
      rotation: name of the rotations of queries and keys in `Context.angles`; None: they are not rotated.
      feed_forward: its feed-forward sublayer, dense, a mixture of experts, or both, whose outputs are added; None: the
        layer has only a mixer.
      pre_norms: True if the inputs of its sublayers are normalized.
      post_norms: True if their outputs are.
      keeps: name under which its keys and values are kept for later layers; None: no other layer reads them.
      reuses: name of the kept keys and values that its queries attend to in place of its own, of which it has none;
        None: it attends to its own.
    """

    mixer: Mixer | None
    window: int | None = None
    chunk: int | None = None
    rotation: str | None = None
    feed_forward: Literal["dense", "experts", "both"] | None = "dense"
    pre_norms: bool = True
    post_norms: bool = False
    keeps: str | None = None
    reuses: str | None = None


class ParameterCount(NamedTuple):
    """Number of parameters of a part of a model."""

    matmul: int
    """Elements of the matrices that multiply a token's activations."""
    other: int
    """All other parameters, such as biases and gains."""


@dataclasses.dataclass(frozen=True)
class LayerType:
    """Meaning of a name in `ModelConfig.layer_types`.

    Attributes:
      mixer: name of the key of `ModelConfig` that configures its token mixer; None: it has none.
      windowed: True if a token sees the last `ModelConfig.sliding_window` tokens only.
      chunked: True if a token sees its own chunk of `ModelConfig.attention_chunk_size` positions only.
      rotates: False leaves queries and keys without rotary positions.
      feed_forward: True if it has a feed-forward sublayer.
      dense: True if that is never a mixture of experts.
      normalizes_inputs: True if the inputs of its sublayers are normalized, and their outputs not, whatever the model's
        `pre_norms` and `post_norms` say.
    """

    mixer: str | None = "attention"
    windowed: bool = False
    chunked: bool = False
    rotates: bool = True
    feed_forward: bool = True
    dense: bool = False
    normalizes_inputs: bool = False


LAYER_TYPES = {
    "full_attention": LayerType(),
    "sliding_attention": LayerType(windowed=True),
    "chunked_attention": LayerType(chunked=True),
    "full_attention_no_rope": LayerType(rotates=False),
    "attention_only": LayerType(feed_forward=False),
    "feed_forward_only": LayerType(mixer=None),
    "mlp_only": LayerType(mixer=None, dense=True),
    "delta": LayerType(mixer="delta", rotates=False),
    "delta_pre_norms": LayerType(mixer="delta", rotates=False, normalizes_inputs=True),
    "kda": LayerType(mixer="kda", rotates=False),
    "ssd": LayerType(mixer="ssd", rotates=False),
    "ssd_only": LayerType(mixer="ssd", rotates=False, feed_forward=False),
}
"""The types of layers by the name that `ModelConfig.layer_types` has for them."""
