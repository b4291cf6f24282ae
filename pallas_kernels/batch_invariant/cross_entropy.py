"""Batch-invariant cross-entropy of tokens from hidden states, with the gradient of `linear_cross_entropy`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.batch_invariant.mode import with_gradient_of
from pallas_kernels.batch_invariant.product import matmul
from pallas_kernels.batch_invariant.rows import log_probabilities
from pallas_kernels.cross_entropy.api import linear_cross_entropy

_CHUNK = 1024
"""Tokens whose logits are in memory at a time."""


def invariant_cross_entropy(
    hidden: Float[Array, "*B D"],
    weight: Float[Array, "D V"],
    labels: Int[Array, "*B"],
    *,
    ignore_index: int,
    soft_cap: float | None = None,
    temperature: float = 1.0,
) -> Float[Array, "*B"]:
    """Return the cross-entropy of each token, float32, 0 where the label is `ignore_index`.

    Args:
        hidden, weight, labels, soft_cap: as those of `linear_cross_entropy`.
        ignore_index: label of tokens that do not count.
        temperature: divisor of the logits.
    """

    def usual(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        cap = None if soft_cap is None else soft_cap / temperature  # of logits that are divided before it
        return linear_cross_entropy(hidden / temperature, weight, labels, ignore_index=ignore_index, soft_cap=cap)

    def invariant(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
        matrix = weight.astype(hidden.dtype)
        # A constant divisor would become a factor, which rounds otherwise than the sampler's division.
        divisor = jnp.where(labels.ravel()[0] < -(2**30), 1.0, temperature)

        def losses(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
            rows, labels = chunk
            logits = matmul(rows, matrix, jnp.float32)
            logits = logits if soft_cap is None else jnp.tanh(logits / soft_cap) * soft_cap
            found = log_probabilities(logits / divisor, jnp.maximum(labels, 0))
            return jnp.where(labels == ignore_index, 0.0, -found)

        rows = hidden.reshape(-1, hidden.shape[-1])
        size = min(_CHUNK, len(rows))
        lacking = -len(rows) % size
        rows = jnp.pad(rows, ((0, lacking), (0, 0))).reshape(-1, size, rows.shape[-1])
        padded = jnp.pad(labels.ravel(), (0, lacking)).reshape(-1, size)
        return jax.lax.map(losses, (rows, padded)).ravel()[: labels.size].reshape(labels.shape)

    return with_gradient_of(usual, invariant)(hidden, weight, labels)
