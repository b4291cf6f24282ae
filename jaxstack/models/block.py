"""One Transformer layer: attention and MLP around the residual stream."""

from typing import Any

import jax
from flax import nnx

from jaxstack.models.attention import Attention, Context
from jaxstack.models.chunks import apply_in_chunks
from jaxstack.models.config import ModelConfig
from jaxstack.models.mlp import MLPS
from jaxstack.models.moe.layer import MoE
from jaxstack.models.norm import NORMS
from jaxstack.models.remat import MATMULS_SAVED
from jaxstack.parallel import keep, shard
from jaxstack.parallel.rules import is_sharded


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with `post_norms` each sublayer's result is normalised too.

    `mixture`: the MLP is a mixture of experts.
    """

    def __init__(self, config: ModelConfig, window: int | None, rngs: nnx.Rngs, *, mixture: bool = False):
        def norm() -> nnx.Module:
            return NORMS[config.norm](config.hidden_size, config.norm_eps)

        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = Attention(config, window, rngs)
        self.mlp = MoE(config, rngs) if mixture else MLPS[config.mlp](config, rngs)
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_post_norm = norm() if config.post_norms else None
        self.dropout = config.dropout
        self.width = None if config.remat in MATMULS_SAVED else config.feed_forward_size

    def __call__(
        self, x: jax.Array, context: Context, cache: Any = None, key: jax.Array | None = None
    ) -> tuple[jax.Array, Any, jax.Array | None]:
        """x [B, T, D] -> ([B, T, D], cache, the router's losses summed over tokens, or None for a dense block).

        `key` draws the dropout masks; without it there is no dropout.
        """
        keys = jax.random.split(key) if key is not None and self.dropout else (None, None)
        with jax.named_scope("attention"):
            y, cache = self.attention(_residual(self.attention_norm(x)), context, cache)
            x = self._join(x, y, self.attention_post_norm, keys[0])
        with jax.named_scope("mlp"):
            y, router_loss = self._feed_forward(x, decoding=cache is not None)
            x = self._join(x, y, self.mlp_post_norm, keys[1])
        return x, cache, router_loss

    def _feed_forward(self, x: jax.Array, *, decoding: bool) -> tuple[jax.Array, jax.Array | None]:
        if isinstance(self.mlp, MoE):
            return self.mlp(_residual(self.mlp_norm(x)), decoding=decoding)
        modules = [self.mlp_norm, self.mlp]
        if self.width is None:
            return _apply_mlp(modules, x), None
        return apply_in_chunks(_apply_mlp, modules, x, self.width), None

    def _join(self, x: jax.Array, y: jax.Array, norm: nnx.Module | None, key: jax.Array | None) -> jax.Array:
        y = _residual(y)
        if norm is not None:
            y = norm(y)
        return keep(_residual(_add(x, drop(y, self.dropout, key))))


def _apply_mlp(modules: list[Any], x: jax.Array) -> jax.Array:
    norm, mlp = modules
    return mlp(_residual(norm(x)))


def _residual(x: jax.Array) -> jax.Array:
    return shard(x, "batch", "residual_length", "act_embed")


def _add(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y. With the matmul's own two dims: XLA then adds x while it multiplies, without copying x before."""
    if is_sharded():
        return x + y
    rows = (-1, x.shape[-1])
    return (x.reshape(rows) + y.reshape(rows)).reshape(x.shape)


def drop(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Inverted dropout (Srivastava et al. 2014); the identity without a key."""
    if key is None or rate == 0:
        return x
    return jax.numpy.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)
