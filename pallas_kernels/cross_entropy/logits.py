"""Pieces that the XLA backends share: logits of some tokens, their loss, and the gradient of the logits.

Nothing here gathers along the vocabulary: the label's logit is a masked sum, so that a vocabulary sharded
over devices needs all-reduces of one number a token and no more.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy.request import Options


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def capped_logits(hidden: jax.Array, weight: jax.Array, options: Options) -> jax.Array:
    """Logits [..., V] in the accumulator dtype of hidden [..., D] and weight [D, V] of one dtype."""
    logits = jnp.matmul(hidden, weight, preferred_element_type=accumulator_dtype(hidden.dtype))
    if options.soft_cap is not None:
        logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
    return logits


def is_label(labels: jax.Array, vocabulary: int) -> jax.Array:
    """Boolean [..., V]: whether the entry of the vocabulary is the token's label."""
    return labels[..., None] == jnp.arange(vocabulary, dtype=labels.dtype)


def loss_of_logits(
    logits: jax.Array, labels: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Per-token loss and log-sum-exp [...], and the softmax as a quotient: exponentials [..., V] and total [...].

    The loss is nan where a label is out of range and not the ignored one.
    """
    maximum = logits.max(axis=-1)
    exponentials = jnp.exp(logits - maximum[..., None])
    total = exponentials.sum(axis=-1)
    lse = maximum + jnp.log(total)
    chosen = jnp.where(is_label(labels, logits.shape[-1]), logits, 0.0).sum(axis=-1)
    loss = lse - chosen + options.z_loss * jnp.square(lse)
    loss = jnp.where((labels >= 0) & (labels < logits.shape[-1]), loss, jnp.nan)
    loss = jnp.where(labels == options.ignore_index, 0.0, loss)
    return loss, lse, exponentials, total


def logits_gradient(
    exponentials: jax.Array,
    total: jax.Array,
    logits: jax.Array | None,
    lse: jax.Array,
    labels: jax.Array,
    d_loss: jax.Array,
    options: Options,
) -> jax.Array:
    """The gradient [..., V] of hidden @ weight, in the accumulator dtype, from the gradient d_loss [...].

    `logits` (capped) are only read where there is a soft cap.
    """
    d_loss = jnp.where(labels == options.ignore_index, 0.0, d_loss)
    d_lse = d_loss * (1.0 + 2.0 * options.z_loss * lse)
    gradient = exponentials * (d_lse / total)[..., None]
    gradient = jnp.where(is_label(labels, exponentials.shape[-1]), gradient - d_loss[..., None], gradient)
    if options.soft_cap is not None and logits is not None:
        gradient = gradient * (1.0 - jnp.square(logits / options.soft_cap))
    return gradient
