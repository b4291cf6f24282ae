"""The decoder-only Transformer: embedding, layers, final norm and output head."""

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxstack.models.adapters import adapted_layers
from jaxstack.models.block import shard_residual
from jaxstack.models.config import ModelConfig
from jaxstack.models.dropout import drop, split_key
from jaxstack.models.embedding import Embedding
from jaxstack.models.initialization import (
    Width,
    embedding_initializer,
    make_initializer,
    mup_width,
    scale_initial_weights,
)
from jaxstack.models.layer import Angles, CacheRoom, CacheSlots, Context, LayerCache, PageSlots, SegmentIds
from jaxstack.models.layer_sums import LayerSums
from jaxstack.models.linear import multiply
from jaxstack.models.mixers import TokenMixer
from jaxstack.models.moe.router import ROUTER, RouterSums
from jaxstack.models.multi_token_prediction import MultiTokenPrediction
from jaxstack.models.norm import make_norm
from jaxstack.models.per_layer_embedding import PerLayerEmbedding
from jaxstack.models.rope import rope_cos_sin
from jaxstack.models.stack import Caches, Stack
from jaxstack.parallel import batch_shards, gather_parameter, packed_product, shard, splits_length
from jaxstack.parallel.shard_map_layers import sum_over_sequence
from jaxstack.precision import PrecisionConfig
from pallas_kernels import PackedWeight

HEAD_AXES = ("embed", "vocab")
"""Logical axes of the output head."""


class Cache(nnx.Pytree):
    """Decoding caches of all layers, such as keys and values, and the number of tokens in each row.

    Attributes:
      layers: one cache for each entry of `Stack.layers`.
      seen: number of tokens of each row in the cache, [B].
    """

    def __init__(self, layers: list[LayerCache], seen: Int[Array, " B"]):
        self.layers = nnx.data(layers)
        self.seen = nnx.data(seen)


class Transformer(nnx.Module):
    """Decoder-only Transformer language model.

    Args:
      config: shape and components; `vocab_size` must be set.
      rngs: source of the initial weights.
      dtype: dtype of the computation; weights are stored in float32 and cast where they are used.

    Raises:
      ValueError: `config.vocab_size` is None.
    """

    gathers_weights = True
    """Declares that every matrix passes `gather_parameter` where it is used, so that a train step may pass shards."""

    companions: tuple[tuple[str, str], ...] = ()
    """Submodules that are not trained, not part of checkpoints, and loaded separately, as pairs of a name such as
    `teacher` and the feature that it belongs to; see `jaxstack.module_arrays.companion`."""

    teacher: "Transformer | None" = None
    """A model from whose predictions this one learns; see `jaxstack.distill`."""

    reference: "Transformer | None" = None
    """A model from which the rewards of this one are measured; see `jaxstack.preference`."""

    reward_head: nnx.Param | None = None
    """Weights [D] float32 of a reward model's reward, see `add_reward_head`."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, dtype: jax.typing.DTypeLike = jnp.float32):
        if config.vocab_size is None:
            raise ValueError("ModelConfig.vocab_size must be set to build a Transformer.")
        vocab = config.vocab_size
        d = config.hidden_size
        embed = embedding_initializer(config)
        self.embedding = Embedding(vocab, d, ("vocab", "embed"), embed, rngs)
        rows = config.max_position_embeddings if config.positions == "learned" else None
        self.position_embedding = Embedding(rows, d, ("position", "embed"), embed, rngs) if rows else None
        self.decoder = Stack(config, rngs)
        self.final_norm = make_norm(config.norm, d, config.norm_eps)
        head = None if config.tie_word_embeddings else make_initializer(config)(rngs.params(), (d, vocab), d)
        self.head = None if head is None else nnx.Param(head, logical_axes=HEAD_AXES)
        self.mtp = MultiTokenPrediction(config, rngs) if config.num_nextn_predict_layers else None
        """The layers that predict tokens after the next, which `jaxstack.loss` trains."""
        self.per_layer_embedding = PerLayerEmbedding(config, rngs) if config.hidden_size_per_layer_input else None
        self.config = config
        self.dtype = dtype
        scale_initial_weights(self, config)
        self.precision = PrecisionConfig()
        """Precision of the matmuls, as set by `in_fp8`."""

    def attach(self, name: str, companion: "Transformer", feature: str) -> None:
        """Add a model that is not trained with this one, and not in its checkpoints, as the submodule `name`.

        Args:
          name: such as `teacher`.
          companion: the model.
          feature: name of the feature that it belongs to, such as `distillation`.
        """
        setattr(self, name, companion)
        self.companions = (*self.companions, (name, feature))

    def add_reward_head(self) -> None:
        """Make this a reward model: add a head that maps a hidden state to a reward, with zeros as weights."""
        self.reward_head = nnx.Param(jnp.zeros(self.config.hidden_size, jnp.float32), logical_axes=("norm",))

    def rewards(
        self,
        tokens: Int[Array, "B T"],
        last: Int[Array, " B"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        with_losses: bool = False,
    ) -> tuple[Float[Array, " B"], LayerSums]:
        """Compute float32 rewards of sequences, from the hidden state of the last token of each, and the layers' sums.

        Args:
          tokens: int32 token ids, each row padded at its end.
          last: position of each row's last token.
          positions: see `hidden_and_sums`.
          with_losses: see `hidden_and_sums`.
        """
        assert self.reward_head is not None, "the model has no reward head"
        hidden, sums = self.hidden_and_sums(tokens, positions=positions, with_losses=with_losses)
        places = jnp.arange(tokens.shape[1]) if positions is None else positions
        chosen = sum_over_sequence(jnp.sum(jnp.where((places == last[:, None])[..., None], hidden, 0), axis=1))
        return jnp.sum(chosen.astype(jnp.float32) * self.reward_head[...], axis=-1), sums

    @property
    def width(self) -> Width | None:
        """The relative width from which muP derives learning rates; None if muP is not used."""
        return mup_width(self.config)

    @property
    def drops_tokens(self) -> bool:
        """True if the model uses dropout, so that a train step must pass it a random key for every token."""
        return self.config.dropout > 0 or any(layer.adapter.dropout for layer in adapted_layers(self).values())

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        segment_ids: SegmentIds = None,
        dropout_key: Key[Array, "..."] | None = None,
        experts: Int[Array, "B T layers k"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Compute float32 logits of the next token at each position. See `hidden` for the arguments."""
        x = self.hidden(tokens, positions=positions, segment_ids=segment_ids, dropout_key=dropout_key, experts=experts)
        return self.logits(x)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        segment_ids: SegmentIds = None,
        dropout_key: Key[Array, "..."] | None = None,
        experts: Int[Array, "B T layers k"] | None = None,
    ) -> Float[Array, "B T D"]:
        """Compute the final hidden states, from which the head computes logits, in the compute dtype.

        Args:
          tokens: int32 token ids.
          positions: int32 positions; None: 0..T-1.
          segment_ids: int32 number of each token's document, within which it attends; None: each row is one document.
          dropout_key: draws dropout masks: one key, or [B, T], one for each token; None: no dropout.
          experts: experts that each token is sent to in each layer, from 0, such as another model's choices (routing
            replay, see `route`); those of dense layers are ignored. None or -1: the router chooses.

        Raises:
          ValueError: the mesh splits sequences over `context`, and `positions` are not given; or `experts` have another
            shape.
        """
        return self.hidden_and_sums(
            tokens, positions=positions, segment_ids=segment_ids, dropout_key=dropout_key, experts=experts
        )[0]

    def hidden_and_sums(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        segment_ids: SegmentIds = None,
        dropout_key: Key[Array, "..."] | None = None,
        experts: Int[Array, "B T layers k"] | None = None,
        records_experts: bool = False,
        with_losses: bool = False,
    ) -> tuple[Float[Array, "B T D"], LayerSums]:
        """Compute final hidden states, and the layers' sums over these tokens, such as losses and balance of routers.

        See `hidden` for the other arguments.

        Args:
          records_experts: return in `RouterSums.experts` the experts of each token [B, T, layers, k], which are values
            of `experts`. They are those before a capacity drops any; those of dense layers are 0.
          with_losses: compute the losses of token mixers too, which only training needs.
        """
        context = self._training_context(tokens, positions, segment_ids)
        beside = context.beside._replace(experts=self._checked_experts(experts, tokens))
        context = context._replace(beside=beside, records_experts=records_experts, with_losses=with_losses)
        x, _, sums = self._run(tokens, context, None, dropout_key)
        if records_experts and ROUTER in sums:
            sums = {**sums, ROUTER: cast(RouterSums, sums[ROUTER])._replace(experts=_experts_of_tokens(sums))}
        return x, sums

    def _checked_experts(self, experts: jax.Array | None, tokens: jax.Array) -> jax.Array | None:
        if experts is None:
            return None
        moe = self.config.moe
        if moe is None:
            raise ValueError("experts are given, and the model has no mixture of experts; leave them out.")
        wanted = *tokens.shape, self.config.num_layers, moe.num_experts_per_tok
        if experts.shape != wanted:
            raise ValueError(
                f"experts are [B, T, layers, k], here {list(wanted)}, as `hidden_and_sums` records them; found "
                f"{list(experts.shape)}."
            )
        return experts

    def inputs_of_layers(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        segment_ids: SegmentIds = None,
    ) -> tuple[Float[Array, "B T D"], Context]:
        """Compute the input of the first layer, without dropout, and the `Context` (positions, masks) of all layers.

        See `hidden` for the arguments.
        """
        return self._start(tokens, self._training_context(tokens, positions, segment_ids), None)

    def _training_context(self, tokens: jax.Array, positions: jax.Array | None, segment_ids: SegmentIds) -> Context:
        counted = positions is None
        if positions is None and splits_length():
            raise ValueError(
                "a mesh with several devices on context holds sequences in another order, so `positions` must be given "
                "(jaxstack.data.device_batches.arrange puts a batch into that order and adds them)."
            )
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        return Context(positions, self._angles(positions), segment_ids, None, counted)

    def prefill(
        self, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], room: int
    ) -> tuple[Float[Array, "B V"], Cache]:
        """Run the model on the prompts; return the float32 logits after each prompt's last token, and the filled cache.

        Args:
          tokens: int32 token ids, each row padded at its end.
          lengths: number of tokens of each row without padding, at least 1.
          room: tokens per row that the cache has room for, at least T.
        """
        context = self.first_context(tokens.shape[1], lengths)
        empty = self.make_cache(tokens.shape[0], room)
        x, layers, _ = self._run(tokens, context, list(empty.layers), None)
        last = jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)[:, 0]
        return self.logits(last), _cache(layers, context)

    def decode(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: Cache
    ) -> tuple[Float[Array, "B T V"], Cache]:
        """Run the model on the next T tokens of each row; return their float32 logits and the updated cache.

        Args:
          tokens: int32 token ids.
          positions: int32 positions, which continue those in the cache; -1 marks padding, which nothing attends to.
          cache: from `make_cache` or `prefill`, with room for the tokens.
        """
        context = self.decode_context(positions, cache.seen)
        x, layers, _ = self._run(tokens, context, list(cache.layers), None)
        return self.logits(x), _cache(layers, context)

    def first_context(self, length: int, lengths: Int[Array, " B"]) -> Context:
        """Return the `Context` (positions, cache slots) of `prefill`, for `lengths` tokens padded to `length`."""
        numbers = jnp.arange(length, dtype=jnp.int32)
        slots = CacheSlots(jnp.where(numbers < lengths[:, None], numbers, -1), jnp.zeros_like(lengths), first=True)
        return Context(numbers[None], self._angles(numbers[None]), None, slots, counted=True)

    def decode_context(self, positions: Int[Array, "B T"], seen: Int[Array, " B"]) -> Context:
        """Return the positions and cache slots that `decode` needs for new tokens, after `seen` cached ones."""
        return Context(positions, self._angles(positions), None, CacheSlots(positions, seen))

    def make_cache(self, batch: int, length: int) -> Cache:
        """Create an empty decoding cache with room for `length` tokens per row (fewer where layers have windows)."""
        layers = self._layer_caches(lambda mixer: mixer.make_cache(batch, length, self.dtype))
        return Cache(layers, jnp.zeros(batch, jnp.int32))

    def make_shared_cache(self, room: CacheRoom) -> list[LayerCache]:
        """Create the empty cache of all layers for `decode_packed`: pages, or one row of fixed size for each slot."""
        return self._layer_caches(lambda mixer: mixer.make_shared_cache(room, self.dtype))

    def decode_packed(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        slots: PageSlots,
        pages: list[LayerCache],
        *,
        layers_together: int = 1,
    ) -> tuple[Float[Array, "T D"], list[LayerCache]]:
        """Run the next tokens of many sequences, packed in one row; return hidden states and the updated cache.

        Args:
          tokens: int32 token ids.
          positions: int32 position of each token in its sequence; -1 marks padding.
          slots: the places of the tokens in the pages, and the pages of each sequence.
          pages: caches of all layers, from `make_shared_cache`.
          layers_together: number of layers whose attention reads the same input, see `Stack.run_together`; 1: exact.
        """
        context = self.packed_context(positions, slots)
        tokens = tokens.reshape(context.positions.shape)
        if layers_together > 1:
            x, context = self._start(tokens, context, None)
            x, layers = self.decoder.run_together(x, context, pages, self.dtype, layers_together)
            x = self.leave(x)
        else:
            x, layers, _ = self._run(tokens, context, pages, None)
        return x.reshape(-1, x.shape[-1]), layers or []

    def decode_packed_with_experts(
        self, tokens: Int[Array, " T"], positions: Int[Array, " T"], slots: PageSlots, pages: list[LayerCache]
    ) -> tuple[Float[Array, "T D"], list[LayerCache], Int[Array, "T layers k"]]:
        """Return as `decode_packed`, and the experts that each token was sent to, as `hidden_and_sums` records them."""
        context = self.packed_context(positions, slots)._replace(records_experts=True)
        x, layers, sums = self._run(tokens.reshape(context.positions.shape), context, pages, None)
        experts = _experts_of_tokens(sums)
        return x.reshape(-1, x.shape[-1]), layers or [], experts.reshape(-1, *experts.shape[2:])

    def packed_context(self, positions: Int[Array, " T"], slots: PageSlots) -> Context:
        """Return the positions and cache places that all layers need in `decode_packed`.

        On a mesh that splits batches over devices the tokens are as many rows, so that each device computes its part of
        the matmuls; T has to be a multiple of their number. Otherwise they are one row.
        """
        rows = positions.reshape(batch_shards(), -1)
        places = CacheSlots(positions[None], jnp.zeros(1, jnp.int32), pages=slots)
        return Context(rows, self._angles(rows), None, places)

    def _layer_caches(self, make: Callable[[TokenMixer], LayerCache]) -> list[LayerCache]:
        """Create a decoding cache for each item (layer or stack) of the model's layer list, by calling `make`."""
        stack = self.decoder
        return [
            block.make_cache(make, stack.repeats if index in stack.scanned else None)
            for index, block in enumerate(stack.layers)
        ]

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Compute float32 logits from final hidden states, soft-capped if the model has a cap."""
        stored = self.embedding.table if self.head is None else self.head
        if isinstance(packed := stored.get_raw_value(), PackedWeight):
            logits = packed_product(hidden, packed, HEAD_AXES, jnp.float32)
        else:
            logits = multiply(jax.lax.dot_general, hidden, self.output_weight(), 1, jnp.float32)
        cap = self.config.final_logit_softcapping
        return jnp.tanh(logits / cap) * cap if cap else logits

    def output_weight(self) -> Float[Array, "D V"]:
        """Return the output head's matrix in the compute dtype, all-gathered over the mesh axis `fsdp`."""
        return gather_parameter(self.stored_output_weight(), self.dtype)

    def stored_output_weight(self) -> nnx.Variable:
        """Return the output head's stored matrix [D, V], dequantized if packed; if tied, the embedding's transpose."""
        stored = self.embedding.table if self.head is None else self.head
        if isinstance(packed := stored.get_raw_value(), PackedWeight):
            return stored.copy(packed.dense(self.dtype), logical_axes=HEAD_AXES, whole_shape=packed.shape)
        if self.head is not None:
            return self.head
        table = self.embedding.table
        whole_shape = table.get_metadata().get("whole_shape", table.shape)
        # Without a barrier XLA transposes and casts the table once, and looks tokens up in its columns.
        return table.copy(
            jax.lax.optimization_barrier(table[...]).T, logical_axes=HEAD_AXES, whole_shape=whole_shape[::-1]
        )

    def _angles(self, positions: jax.Array) -> dict[str, Angles]:
        """Compute the rotary angles that the layers use, by the name of the rotation."""
        positions = jnp.maximum(positions, 0)
        return {
            name: rope_cos_sin(positions, rotation.frequencies(), rotation.factor)
            for name, rotation in self.config.rotations().items()
        }

    def _position_rows(self, context: Context) -> jax.Array:
        """Return learned position embeddings, [B, T, D], or [T, D] without a lookup if positions are 0..T-1."""
        assert self.position_embedding is not None
        if context.counted:
            return self.position_embedding.weight(self.dtype)[: context.positions.shape[1]]
        return self.position_embedding(jnp.maximum(context.positions, 0), self.dtype)

    def _run(
        self, tokens: jax.Array, context: Context, caches: Caches, key: jax.Array | None
    ) -> tuple[jax.Array, Caches, LayerSums]:
        """Run embedding and layers; return final hidden states [B, T, D], caches and the sums of the layers."""
        embedding_key, layers_key = split_key(key)
        with jax.named_scope("embedding"):
            x, context = self._start(tokens, context, embedding_key)
        with jax.named_scope("layers"):
            x, caches, sums = self.decoder(x, context, caches, layers_key, self.dtype)
        return self.leave(x), caches, sums

    def enter(self, vectors: Float[Array, "B T D"], context: Context) -> Float[Array, "B T D"]:
        """Convert the tokens' embedding rows to the input of the first layer: scale them and add positions."""
        return shard_residual(self._scale_and_place(vectors.astype(self.dtype), context))

    def leave(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Apply the final norm to the last layer's output, and the scale of the logits; this gives the head's input."""
        with jax.named_scope("final_norm"):
            x = shard_residual(self.final_norm(x))
            if self.config.logits_scaling != 1:
                x = x * jnp.asarray(1 / self.config.logits_scaling, x.dtype)
        return shard(x, "batch", "length", "act_embed")

    def _start(self, tokens: jax.Array, context: Context, key: jax.Array | None) -> tuple[jax.Array, Context]:
        """Embed tokens, with positions and dropout, as the input of the first layer; return it and all layers' context.

        The context gets what each layer adds of its own embedding, if the model has `per_layer_embedding`.
        """
        x = self._scale_and_place(self.embedding(tokens, self.dtype), context)
        if self.per_layer_embedding is not None:
            beside = context.beside._replace(inputs=self.per_layer_embedding(tokens, x))
            context = context._replace(beside=beside)
        return shard_residual(drop(x, self.config.dropout, key)), context

    def _scale_and_place(self, x: jax.Array, context: Context) -> jax.Array:
        """Scale token embeddings if the model does so, and add learned position embeddings if it has them."""
        if self.config.embedding_factor != 1:
            x = x * jnp.asarray(self.config.embedding_factor, x.dtype)
        return x if self.position_embedding is None else x + self._position_rows(context)


def _cache(layers: Caches, context: Context) -> Cache:
    """Return a `Cache` made of the updated layer caches and the new number of tokens in each row."""
    assert context.slots is not None
    return Cache(layers or [], context.slots.lengths_after)


def _experts_of_tokens(sums: LayerSums) -> Int[Array, "B T layers k"]:
    """Return the recorded experts of each token in all layers."""
    return jnp.moveaxis(cast(jax.Array, cast(RouterSums, sums[ROUTER]).experts), 0, 2)
