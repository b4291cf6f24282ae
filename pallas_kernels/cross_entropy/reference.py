"""Head and loss written out in float32, with all logits: the definition that every backend is tested against."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.cross_entropy.request import CrossEntropyRequest


def unsupported_reason(request: CrossEntropyRequest) -> str | None:
    """Return why the reference cannot compute this call (its vocabulary is sharded), or None if it can."""
    if request.options.axis_name is not None:
        return "it reads the whole vocabulary; gather the weight and leave axis_name out"
    return None


def per_token_loss(request: CrossEntropyRequest) -> Float[Array, "*tokens"]:
    """Compute each token's loss [...] in float32 (float64 for float64 inputs)."""
    options = request.options
    labels = request.labels
    dtype = jnp.promote_types(request.hidden.dtype, jnp.float32)
    logits = jnp.matmul(request.hidden.astype(dtype), request.weight.astype(dtype), precision="highest")
    if options.soft_cap is not None:
        logits = options.soft_cap * jnp.tanh(logits / options.soft_cap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    inside = (labels >= 0) & (labels < logits.shape[-1])
    chosen = jnp.take_along_axis(logits, jnp.where(inside, labels, 0)[..., None], axis=-1)[..., 0]
    loss = jnp.where(inside, lse - chosen, jnp.nan) + options.z_loss * jnp.square(lse)
    return jnp.where(labels == options.ignore_index, 0.0, loss)


def loss_sum(request: CrossEntropyRequest) -> Float[Array, ""]:
    """Compute the sum of the tokens' losses in float32 (float64 for float64 inputs)."""
    losses = per_token_loss(request)
    return jnp.sum(losses if request.token_weights is None else losses * request.token_weights)
