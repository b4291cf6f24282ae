"""The decoder-only Transformer: embedding, layers, final norm, head."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxstack.models.adapters import adapted_layers
from jaxstack.models.attention.base import CacheSlots
from jaxstack.models.attention.layer import Angles, Context
from jaxstack.models.config import ModelConfig
from jaxstack.models.dropout import drop, split_key
from jaxstack.models.embedding import Embedding
from jaxstack.models.initialization import embedding_initializer, make_initializer
from jaxstack.models.norm import NORMS
from jaxstack.models.rope import rope_angles, rope_frequencies
from jaxstack.models.stack import Caches, Stack
from jaxstack.parallel import gather_parameter, shard, splits_length
from jaxstack.precision.config import PrecisionConfig

HEAD_AXES = ("embed", "vocab")


class Cache(nnx.Pytree):
    """What all layers keep for decoding: `layers` as `Stack.layers`, and how many tokens of each row, `seen` [B]."""

    def __init__(self, layers: list[Any], seen: jax.Array):
        self.layers = nnx.data(layers)
        self.seen = nnx.data(seen)


class Transformer(nnx.Module):
    """A decoder-only language model.

    Args:
      config: its shape; `vocab_size` must be set.
      rngs: source of the initial weights.
      dtype: of the computation (weights are stored in float32 and cast when used).

    Raises:
      ValueError: `config.vocab_size` is None.
    """

    gathers_weights = True
    """Every matrix passes `gather_parameter` where it is used, so a train step may give it this device's shards."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, *, dtype: Any = jnp.float32):
        if config.vocab_size is None:
            raise ValueError("ModelConfig.vocab_size must be set to build a Transformer.")
        vocab, d = config.vocab_size, config.hidden_size
        embed = embedding_initializer(config)
        self.embedding = Embedding(vocab, d, ("vocab", "embed"), embed, rngs)
        rows = config.max_position_embeddings if config.positions == "learned" else None
        self.position_embedding = Embedding(rows, d, ("position", "embed"), embed, rngs) if rows else None
        self.decoder = Stack(config, rngs)
        self.final_norm = NORMS[config.norm](d, config.norm_eps)
        head = None if config.tie_word_embeddings else make_initializer(config)(rngs.params(), (d, vocab), d)
        self.head = None if head is None else nnx.Param(head, logical_axes=HEAD_AXES)
        self.config, self.dtype = config, dtype
        self.precision = PrecisionConfig()
        """Which matmuls run in FP8; `in_fp8` sets it."""

    @property
    def drops_tokens(self) -> bool:
        """Whether it draws dropout masks, for which a train step gives every token a key."""
        return self.config.dropout > 0 or any(layer.adapter.dropout for layer in adapted_layers(self).values())

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """Logits, float32 [B, T, V], of tokens int32 [B, T]. See `hidden` for the arguments."""
        x = self.hidden(tokens, positions=positions, segment_ids=segment_ids, dropout_key=dropout_key)
        return self.logits(x)

    def hidden(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> jax.Array:
        """What the head reads, [B, T, D] in the compute dtype.

        Args:
          tokens: int32 [B, T].
          positions: int32 [B, T]; default 0..T-1.
          segment_ids: int32 [B, T]; a token attends only to its own segment. Default: one segment.
          dropout_key: draws dropout masks: one key, or [B, T], one for each token; without it there is no dropout.
        """
        return self.hidden_and_router_loss(
            tokens, positions=positions, segment_ids=segment_ids, dropout_key=dropout_key
        )[0]

    def hidden_and_router_loss(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """`hidden`, and the losses of all routers summed over the tokens, [] float32; None without experts."""
        counted = positions is None
        if positions is None and splits_length():
            raise ValueError(
                "a mesh with several devices on context holds sequences in another order, so `positions` must be given "
                "(jaxstack.data.batch_source.arrange orders a batch and adds them)."
            )
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        angles, local = self._angles(positions)
        context = Context(positions, angles, segment_ids, None, counted, local)
        x, _, router_loss = self._run(tokens, context, None, dropout_key)
        return x, router_loss

    def prefill(self, tokens: jax.Array, lengths: jax.Array, room: int) -> tuple[jax.Array, Cache]:
        """Logits float32 [B, V] after each row's last token, and the cache.

        Args:
          tokens: int32 [B, T], each row filled up at its end.
          lengths: int32 [B], how many tokens of each row are its own; at least 1.
          room: tokens of a row that the cache is for, at least T.
        """
        numbers = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        slots = CacheSlots(jnp.where(numbers < lengths[:, None], numbers, -1), jnp.zeros_like(lengths), first=True)
        angles, local = self._angles(numbers[None])
        context = Context(numbers[None], angles, None, slots, counted=True, local_angles=local)
        empty = self.make_cache(tokens.shape[0], room)
        x, layers, _ = self._run(tokens, context, list(empty.layers), None)
        last = jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)[:, 0]
        return self.logits(last), Cache(layers or [], slots.seen_after)

    def decode(self, tokens: jax.Array, positions: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Logits float32 [B, T, V] of T further tokens, and the cache with them.

        Args:
          tokens, positions: int32 [B, T]; a row's positions go on where the cache ends, -1 marks padding, which
            nothing attends to.
          cache: from `make_cache` or `prefill`, with room for them.
        """
        angles, local = self._angles(positions)
        slots = CacheSlots(positions, cache.seen)
        context = Context(positions, angles, None, slots, local_angles=local)
        x, layers, _ = self._run(tokens, context, list(cache.layers), None)
        return self.logits(x), Cache(layers or [], slots.seen_after)

    def make_cache(self, batch: int, length: int) -> Cache:
        """An empty cache for `length` tokens of each of `batch` sequences; layers with a window keep no more."""
        stack = self.decoder

        def empty(index: int) -> Any:
            layer = stack.layers[index].attention
            cache = layer.kind.make_cache(layer.heads, batch, length, self.dtype)
            if index not in stack.scanned:
                return cache
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (stack.repeats, *x.shape)), cache)

        layers = [empty(index) for index in range(len(stack.layers))]
        return Cache(layers, jnp.zeros(batch, jnp.int32))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., D] -> float32 [..., V], soft-capped where the model has a cap."""
        logits = jnp.einsum("...d,dv->...v", hidden, self.output_weight(), preferred_element_type=jnp.float32)
        cap = self.config.final_logit_softcapping
        return jnp.tanh(logits / cap) * cap if cap else logits

    def output_weight(self) -> jax.Array:
        """The head's matrix [D, V] in the compute dtype, whole over `fsdp`."""
        return gather_parameter(self.stored_output_weight(), self.dtype)

    def stored_output_weight(self) -> nnx.Variable:
        """The head's float32 matrix [D, V] as it is stored (the embedding's transpose where tied)."""
        if self.head is not None:
            return self.head
        table = self.embedding.table
        whole = table.get_metadata().get("whole_shape", table.shape)
        # Without a barrier XLA turns and casts the table once, and looks up the tokens' rows there, as columns.
        return table.copy(jax.lax.optimization_barrier(table[...]).T, logical_axes=HEAD_AXES, whole_shape=whole[::-1])

    def _angles(self, positions: jax.Array) -> tuple[Angles, Angles]:
        """The rotations of all layers, and those of layers with a window where they are others."""
        config, positions = self.config, jnp.maximum(positions, 0)
        if config.positions != "rope":
            return None, None
        frequencies = rope_frequencies(config.width_per_head, config.rope_theta, config.rope_scaling)
        angles = rope_angles(positions, frequencies)
        if config.rope_local_base_freq is None:
            return angles, None
        return angles, rope_angles(positions, rope_frequencies(config.width_per_head, config.rope_local_base_freq))

    def _position_rows(self, context: Context) -> jax.Array:
        """Rows of the learned position table: [B, T, D], or [T, D] where positions simply count, without a gather."""
        assert self.position_embedding is not None
        if context.counted:
            return self.position_embedding.weight(self.dtype)[: context.positions.shape[1]]
        return self.position_embedding(jnp.maximum(context.positions, 0), self.dtype)

    def _run(
        self, tokens: jax.Array, context: Context, caches: Caches, key: jax.Array | None
    ) -> tuple[jax.Array, Caches, jax.Array | None]:
        config = self.config
        with jax.named_scope("embedding"):
            x = self.embedding(tokens, self.dtype)
            if config.scale_embeddings:
                x = x * jnp.asarray(config.hidden_size**0.5, x.dtype)
            if self.position_embedding is not None:
                x = x + self._position_rows(context)
            keys = split_key(key)
            x = shard(drop(x, config.dropout, keys[0]), "batch", "residual_length", "act_embed")
        with jax.named_scope("layers"):
            x, caches, router_loss = self.decoder(x, context, caches, keys[1], self.dtype)
        with jax.named_scope("final_norm"):
            x = shard(self.final_norm(x), "batch", "residual_length", "act_embed")
        return shard(x, "batch", "length", "act_embed"), caches, router_loss
