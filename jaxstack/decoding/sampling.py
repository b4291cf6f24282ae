"""From logits to the next token."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn. The limits apply in the order in which they stand here, each to what is left.

    Attributes:
      temperature: logits are divided by it; 0 takes the likeliest token.
      top_k: draw among so many likeliest tokens only.
      top_p: draw among the likeliest tokens whose probabilities first reach this sum (Holtzman et al. 2020).
      min_p: draw among the tokens that are at least this many times as likely as the likeliest one (Nguyen et al. 2024,
        arXiv:2407.01082).
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 and finite; found {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1; found {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1; found {self.top_p}.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be at least 0 and at most 1; found {self.min_p}.")


def sample(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Token ids int32 [B] drawn from logits float32 [B, V].

    Args:
      key: one for all rows, or one a row, [B]: then a row's draw does not depend on the others.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = keep_likeliest(logits / sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    draw = jax.vmap(jax.random.categorical) if key.ndim else jax.random.categorical
    return draw(key, logits).astype(jnp.int32)


def keep_likeliest(logits: jax.Array, top_k: int | None, top_p: float | None, min_p: float | None = None) -> jax.Array:
    """logits [B, V] with -inf for all tokens but those that the limits leave; at least one is left a row."""
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p is not None and top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered, -1), -1) - jax.nn.softmax(ordered, -1)
        least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if min_p:
        least = logits.max(-1, keepdims=True) + jnp.log(min_p)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits
