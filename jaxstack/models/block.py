"""One Transformer layer: attention and MLP around the residual stream."""

from typing import Any

import jax
from flax import nnx

from jaxstack.models.attention.layer import Attention, Context
from jaxstack.models.chunks import apply_in_chunks, count_chunks
from jaxstack.models.config import ModelConfig
from jaxstack.models.dropout import drop, split_key
from jaxstack.models.linear import add
from jaxstack.models.mlp import MLPS
from jaxstack.models.moe.layer import MoE
from jaxstack.models.norm import NORMS, Norm, as_input, beside
from jaxstack.models.remat import MATMULS_SAVED
from jaxstack.parallel import keep, shard


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with `post_norms` each sublayer's result is normalised too.

    `mixture`: the MLP is a mixture of experts.
    """

    def __init__(self, config: ModelConfig, window: int | None, rngs: nnx.Rngs, *, mixture: bool = False):
        def norm() -> Norm:
            return NORMS[config.norm](config.hidden_size, config.norm_eps)

        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = Attention(config, window, rngs)
        self.mlp = MoE(config, rngs) if mixture else MLPS[config.mlp](config, rngs)
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_post_norm = norm() if config.post_norms else None
        self.dropout = config.dropout
        self.width = None if mixture or config.remat in MATMULS_SAVED else config.feed_forward_size

    def __call__(
        self, x: jax.Array, context: Context, cache: Any = None, key: jax.Array | None = None
    ) -> tuple[jax.Array, Any, jax.Array | None]:
        """x [B, T, D] -> ([B, T, D], cache, the router's losses summed over tokens, or None for a dense block).

        `key`, one or one for each token, draws the dropout masks; without it there is no dropout.
        """
        keys = split_key(key if self.dropout else None)
        with jax.named_scope("attention"):
            y, x = beside(self.attention_norm, x)
            y, cache = self.attention(as_input(self.attention_norm, _residual(y), x), context, cache)
            x = self._join(x, y, self.attention_post_norm, keys[0])
        with jax.named_scope("mlp"):
            y, x, router_loss = self._feed_forward(x, decoding=cache is not None)
            x = self._join(x, y, self.mlp_post_norm, keys[1])
        return x, cache, router_loss

    def _feed_forward(self, x: jax.Array, *, decoding: bool) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """What is added to x, x, and the router's losses."""
        modules = [self.mlp_norm, self.mlp]
        count = 1 if self.width is None else count_chunks(modules, x, self.width)
        if count > 1:
            return apply_in_chunks(_apply_mlp, modules, x, count), x, None
        y, x = beside(self.mlp_norm, x)
        y, router_loss = _residual(y), None
        if isinstance(self.mlp, MoE):
            y, router_loss = self.mlp(y, decoding=decoding)
        else:
            y = self.mlp(as_input(self.mlp_norm, y, x))
        return y, x, router_loss

    def _join(self, x: jax.Array, y: jax.Array, norm: Norm | None, key: jax.Array | None) -> jax.Array:
        y = _residual(y)
        if norm is not None:
            y = norm(y)
        return keep(_residual(add(drop(y, self.dropout, key), x)))


def _apply_mlp(modules: list[Any], x: jax.Array) -> jax.Array:
    norm, mlp = modules
    return mlp(_residual(norm(x)))


def _residual(x: jax.Array) -> jax.Array:
    return shard(x, "batch", "residual_length", "act_embed")
