"""A Transformer layer: attention and a feed-forward sublayer, each added to the residual stream."""

from typing import cast

import jax
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxstack.models.attention.base import LayerCache
from jaxstack.models.attention_layer import Attention, Context
from jaxstack.models.config import ModelConfig
from jaxstack.models.dropout import drop, split_key
from jaxstack.models.feed_forward_chunks import apply_in_chunks, count_chunks
from jaxstack.models.mlp import MLPS, PlainMLP
from jaxstack.models.moe_layer import MoE
from jaxstack.models.norm import Norm, make_norm
from jaxstack.models.remat import MATMULS_SAVED
from jaxstack.models.residual import add_to_residual, normalize, shard_residual


class Block(nnx.Module):
    """One Transformer layer: x = x + attention(norm(x)), then x = x + mlp(norm(x)).

    With `config.post_norms` the output of each sublayer is normalized too, before it is added.

    Args:
      window: keys that a query sees, itself included; None: all before it.
      mixture: True if the feed-forward sublayer is a mixture of experts.
    """

    def __init__(self, config: ModelConfig, window: int | None, rngs: nnx.Rngs, *, mixture: bool = False):
        def norm() -> Norm:
            return make_norm(config.norm, config.hidden_size, config.norm_eps)

        self.attention_norm = norm()
        self.mlp_norm = norm()
        self.attention = Attention(config, window, rngs)
        self.mlp = MoE(config, rngs) if mixture else MLPS[config.mlp](config, rngs)
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_post_norm = norm() if config.post_norms else None
        self.dropout = config.dropout
        self.chunked_width = None if mixture or config.remat in MATMULS_SAVED else config.feed_forward_size
        """Width of the activations that decides into how many chunks the MLP is cut; None: it is never cut."""

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        cache: LayerCache | None = None,
        key: Key[Array, "..."] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None, Float[Array, ""] | None]:
        """Apply the layer to the residual stream; also return the updated cache and the router's losses.

        Args:
          context: what all layers of this forward pass share.
          cache: this layer's cache while decoding.
          key: draws the dropout masks: one key, or [B, T], one for each token; None: no dropout.

        Returns:
          The residual stream, the cache with this call's tokens, and the router's losses summed over tokens (None for
          a dense block).
        """
        attention_key, mlp_key = split_key(key if self.dropout else None)
        with jax.named_scope("attention"):
            normalized, x = normalize(self.attention_norm, x)
            update, cache = self.attention(normalized, context, cache)
            x = self._add(x, update, self.attention_post_norm, attention_key)
        with jax.named_scope("mlp"):
            update, x, router_loss = self._feed_forward(x, decoding=cache is not None)
            x = self._add(x, update, self.mlp_post_norm, mlp_key)
        return x, cache, router_loss

    def attend(
        self, x: Float[Array, "B T D"], context: Context, cache: LayerCache
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Compute only the attention sublayer's output while decoding; also return the updated cache."""
        with jax.named_scope("attention"):
            return self.attention(normalize(self.attention_norm, x)[0], context, cache)

    def finish(self, x: Float[Array, "B T D"], update: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Complete the layer after `attend`: add its output to the residual stream; run the feed-forward sublayer."""
        with jax.named_scope("mlp"):
            x = self._add(x, update, self.attention_post_norm, None)
            update, x, _ = self._feed_forward(x, decoding=True)
            return self._add(x, update, self.mlp_post_norm, None)

    def _feed_forward(self, x: jax.Array, *, decoding: bool) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Compute mlp(norm(x)); also return the residual stream to add it to, and the router's losses."""
        modules = cast(tuple[Norm, PlainMLP], (self.mlp_norm, self.mlp))
        count = 1 if self.chunked_width is None else count_chunks(modules, x, self.chunked_width)
        if count > 1:
            return apply_in_chunks(_apply_mlp, modules, x, count), x, None
        normalized, x = normalize(self.mlp_norm, x)
        if isinstance(self.mlp, MoE):
            update, router_loss = self.mlp(normalized, decoding=decoding)
            return update, x, router_loss
        return self.mlp(normalized), x, None

    def _add(self, x: jax.Array, update: jax.Array, post_norm: Norm | None, key: jax.Array | None) -> jax.Array:
        """Add a sublayer's output to the residual stream: x + dropout(post_norm(update))."""
        update = shard_residual(update)
        if post_norm is not None:
            update = post_norm(update)
        return add_to_residual(x, drop(update, self.dropout, key))


def _apply_mlp(modules: tuple[Norm, PlainMLP], x: jax.Array) -> jax.Array:
    norm, mlp = modules
    return mlp(shard_residual(norm(x)))
