"""A layer of a model: a token mixer and a feed-forward sublayer, each added to the residual stream; or one of them."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from jaxstack.models.config import ModelConfig
from jaxstack.models.dropout import drop, split_key
from jaxstack.models.experts_beside_mlp import ExpertsBesideMLP
from jaxstack.models.feed_forward_chunks import apply_in_chunks, count_chunks
from jaxstack.models.layer import CacheAndSums, Context, Layer, LayerCache
from jaxstack.models.layer_sums import LayerSums
from jaxstack.models.linear import add
from jaxstack.models.mixers import TokenMixer, mixer_module
from jaxstack.models.mlp import MLPS, PlainMLP
from jaxstack.models.moe.router import ROUTER, RouterSums
from jaxstack.models.moe_layer import MoE
from jaxstack.models.norm import LayerInput, Norm, make_norm
from jaxstack.models.per_layer_embedding import PerLayerInput
from jaxstack.models.remat import MATMULS_SAVED
from jaxstack.parallel import save_for_backward, shard


def shard_residual(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Constrain x to the sharding of the residual stream."""
    return shard(x, "batch", "residual_length", "act_embed")


def normalize(norm: Norm | None, x: Float[Array, "B T D"]) -> tuple[LayerInput, Float[Array, "B T D"]]:
    """Normalize the input of a sublayer; return (norm(x), x), where x continues as the residual stream.

    Without a norm both are x.

    Two things that a norm may offer are used here, and change nothing but the speed:

    - `with_residual(x)` computes both results, so that the gradients of both are joined by one kernel. The residual
      stream must then be continued with the second result instead of the x that went in.
    - `as_layer_input(normalized, x)` is an input that dense layers in FP8 recompute while they round it, so that the
      normalized array need not be stored.
    """
    if norm is None:
        return x, x
    with_residual = getattr(norm, "with_residual", None)
    normalized, x = (norm(x), x) if with_residual is None else with_residual(x)
    normalized = shard_residual(normalized)
    as_layer_input = getattr(norm, "as_layer_input", None)
    return (normalized if as_layer_input is None else as_layer_input(normalized, x)), x


def add_to_residual(x: Float[Array, "B T D"], update: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Add a sublayer's output to the residual stream, which is sharded and saved for the backward pass."""
    return save_for_backward(shard_residual(add(update, x)))


class Block(nnx.Module):
    """A layer: x = x + mixer(norm(x)), then x = x + mlp(norm(x)). Either sublayer may be missing.

    With `layer.post_norms` the output of each sublayer is normalized too, before it is added; without
    `layer.pre_norms` its input is not. With `config.layer_scalars` the result is multiplied by a learned number.

    Args:
      layer: what this layer consists of.
    """

    def __init__(self, config: ModelConfig, layer: Layer, rngs: nnx.Rngs):
        def norm(wanted: object) -> Norm | None:
            return make_norm(config.norm, config.hidden_size, config.norm_eps) if wanted else None

        self.attention_norm = norm(layer.mixer and layer.pre_norms)
        # Experts next to an MLP have a norm for each of the two.
        self.mlp_norm = norm(layer.feed_forward not in (None, "both") and layer.pre_norms)
        self.attention = None if layer.mixer is None else mixer_module(layer.mixer)(config, layer, rngs)  # pyright: ignore[reportCallIssue]
        self.mlp = _make_feed_forward(config, layer, rngs)
        self.attention_post_norm = norm(layer.mixer and layer.post_norms)
        self.mlp_post_norm = norm(layer.feed_forward and layer.post_norms)
        scalar = nnx.Param(jnp.ones(1, jnp.float32), logical_axes=("norm",)) if config.layer_scalars else None
        self.layer_scalar = scalar
        self.per_layer_input = PerLayerInput(config, rngs) if config.hidden_size_per_layer_input else None
        self.dropout = config.dropout
        self.residual_multiplier = config.residual_multiplier
        cut = layer.feed_forward == "dense" and config.remat not in MATMULS_SAVED
        self.chunked_width = config.feed_forward_width(layer) if cut else None
        """Width of the activations that decides into how many chunks the MLP is cut; None: it is never cut."""

    def __call__(
        self,
        x: Float[Array, "B T D"],
        context: Context,
        cache: LayerCache | None = None,
        key: Key[Array, "..."] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None, LayerSums]:
        """Apply the layer to the residual stream; also return the updated cache and the sums of its sublayers.

        Args:
          context: what all layers of this forward pass share.
          cache: this layer's cache while decoding.
          key: draws the dropout masks: one key, or [B, T], one for each token; None: no dropout.

        Returns:
          The residual stream, the cache with this call's tokens, and sums over tokens of the router and the mixer.
        """
        attention_key, mlp_key = split_key(key if self.dropout else None)
        sums: dict[str, Any] = {}
        if self.attention is not None:
            with jax.named_scope("attention"):
                normalized, x = normalize(self.attention_norm, x)
                update, cache = self.attention(normalized, context, cache)
                if isinstance(cache, CacheAndSums):
                    cache, own = cache
                    sums |= own
                x = self._add(x, update, self.attention_post_norm, attention_key)
        if self.mlp is not None:
            with jax.named_scope("mlp"):
                update, x, router_sums = self._feed_forward(x, context.slots is not None, context.beside.experts)
                if router_sums is not None:
                    sums[ROUTER] = router_sums
                x = self._add(x, update, self.mlp_post_norm, mlp_key)
        return self._end(x, context), cache, sums

    def make_cache(self, make: Callable[[TokenMixer], LayerCache], layers: int | None = None) -> LayerCache:
        """Create the mixer's empty cache by calling `make`; None if the layer has no mixer.

        Args:
          layers: number of layers that this block stacks, a leading dim of the result; None: it is one layer.
        """
        if self.attention is None:
            return None
        cache = make(self.attention)
        if layers is not None:
            cache = jax.tree.map(lambda x: jnp.broadcast_to(x, (layers, *x.shape)), cache)
        return self.attention.complete_cache(cache)

    def attend(
        self, x: Float[Array, "B T D"], context: Context, cache: LayerCache
    ) -> tuple[Float[Array, "B T D"] | None, LayerCache | None]:
        """Compute only the mixer's output while decoding; also return the updated cache. Both None without a mixer."""
        if self.attention is None:
            return None, None
        with jax.named_scope("attention"):
            return self.attention(normalize(self.attention_norm, x)[0], context, cache)

    def finish(
        self, x: Float[Array, "B T D"], update: Float[Array, "B T D"] | None, context: Context
    ) -> Float[Array, "B T D"]:
        """Complete the layer after `attend`: add its output to the residual stream; run the feed-forward sublayer."""
        with jax.named_scope("mlp"):
            if update is not None:
                x = self._add(x, update, self.attention_post_norm, None)
            if self.mlp is not None:
                update, x, _ = self._feed_forward(x, True)
                x = self._add(x, update, self.mlp_post_norm, None)
            return self._end(x, context)

    def _end(self, x: jax.Array, context: Context) -> jax.Array:
        """Add what the layer's own embedding gives, and multiply by the layer's learned number, if it has them."""
        if self.per_layer_input is not None and context.beside.inputs is not None:
            with jax.named_scope("per_layer_input"):
                x = add_to_residual(x, self.per_layer_input(x, context.beside.inputs))
        return x if self.layer_scalar is None else x * self.layer_scalar[...].astype(x.dtype)

    def _feed_forward(
        self, x: jax.Array, decoding: bool, experts: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, RouterSums | None]:
        """Compute mlp(norm(x)); also return the residual stream to add it to, and the router's sums."""
        norm, mlp = modules = cast(tuple[Norm | None, PlainMLP], (self.mlp_norm, self.mlp))
        count = 1 if self.chunked_width is None else count_chunks(modules, x, self.chunked_width)
        if count > 1:
            return apply_in_chunks(_apply_mlp, modules, x, count), x, None
        normalized, x = normalize(norm, x)
        if isinstance(self.mlp, ExpertsBesideMLP):
            update, router_sums = self.mlp(x, decoding=decoding, experts=experts)
            return update, x, router_sums
        if isinstance(self.mlp, MoE):
            update, router_sums = self.mlp(normalized, decoding=decoding, experts=experts)
            return update, x, router_sums
        return mlp(normalized), x, None

    def _add(self, x: jax.Array, update: jax.Array, post_norm: Norm | None, key: jax.Array | None) -> jax.Array:
        """Add a sublayer's output to the residual stream: x + residual_multiplier dropout(post_norm(update))."""
        update = shard_residual(update)
        if post_norm is not None:
            update = post_norm(update)
        if self.residual_multiplier != 1:
            update = update * jnp.asarray(self.residual_multiplier, update.dtype)
        return add_to_residual(x, drop(update, self.dropout, key))


def _make_feed_forward(config: ModelConfig, layer: Layer, rngs: nnx.Rngs) -> nnx.Module | None:
    if layer.feed_forward is None:
        return None
    if (width := config.feed_forward_width(layer)) != config.feed_forward_size:
        config = config.model_copy(update={"intermediate_size": width})
    if layer.feed_forward == "both":
        return ExpertsBesideMLP(config, rngs)
    return MoE(config, rngs) if layer.feed_forward == "experts" else MLPS[config.mlp](config, rngs)


def _apply_mlp(modules: tuple[Norm | None, PlainMLP], x: jax.Array) -> jax.Array:
    norm, mlp = modules
    return mlp(shard_residual(x if norm is None else norm(x)))
