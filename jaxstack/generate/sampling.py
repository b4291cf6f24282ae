"""From logits to the next token."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
      temperature: logits are divided by it; 0 takes the likeliest token.
      top_k: draw among so many likeliest tokens only.
      top_p: draw among the likeliest tokens whose probabilities first reach this sum (Holtzman et al. 2020).
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0; found {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1; found {self.top_k}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1; found {self.top_p}.")


def sample(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Token ids int32 [B] drawn from logits float32 [B, V]."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = keep_likeliest(logits / sampling.temperature, sampling.top_k, sampling.top_p)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def keep_likeliest(logits: jax.Array, top_k: int | None, top_p: float | None) -> jax.Array:
    """logits [B, V] with -inf for all tokens but those that top_k and top_p leave; at least one is left a row."""
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if top_p is not None and top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered, -1), -1) - jax.nn.softmax(ordered, -1)
        least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), -1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return logits
