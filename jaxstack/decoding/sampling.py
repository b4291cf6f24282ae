"""Sampling of the next token from a model's logits."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings for sampling a token: temperature, and limits on the tokens to choose from.

    Limits apply in the order of the attributes, each to the tokens that the ones before it leave.

    Attributes:
      temperature: divisor of the logits; 0 takes the likeliest token.
      top_k: sample from this many likeliest tokens.
      top_p: sample from the likeliest tokens whose probabilities first reach this sum (Holtzman et al. 2020).
      min_p: sample from the tokens at least this many times as likely as the likeliest one (Nguyen et al. 2024,
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


def sample(logits: Float[Array, "B V"], key: Key[Array, ""] | Key[Array, " B"], sampling: Sampling) -> Int[Array, " B"]:
    """Sample the next token of each row of a batch from its logits.

    Args:
      logits: float32.
      key: one key for all rows, or one per row, so that the sample of a row does not depend on the others.
      sampling: temperature and limits.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = keep_likeliest(logits / sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    categorical = jax.vmap(jax.random.categorical) if key.ndim else jax.random.categorical
    return categorical(key, logits).astype(jnp.int32)


def keep_likeliest(
    logits: Float[Array, "B V"], top_k: int | None, top_p: float | None, min_p: float | None = None
) -> Float[Array, "B V"]:
    """Return the logits with -inf for the tokens that top-k, top-p or min-p exclude; at least one per row remains."""
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
