"""Sampling with the same settings for all rows, by sorting: what `sample_rows` is compared with."""

import jax
import jax.numpy as jnp

from jaxstack.decoding.sampling import Sampling


def sample(logits: jax.Array, keys: jax.Array, sampling: Sampling) -> jax.Array:
    """The next token of each row, from its own key."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, -1).astype(jnp.int32)
    logits = keep_likeliest(logits / sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def keep_likeliest(logits: jax.Array, top_k: int | None, top_p: float | None, min_p: float | None) -> jax.Array:
    """The logits, with -inf for the tokens that top-k, top-p or min-p exclude."""
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
