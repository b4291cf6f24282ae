"""Output head and loss with all logits at once: the fastest backend for few logits, as nothing is recomputed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.cross_entropy.request import CrossEntropyRequest, Options
from pallas_kernels.cross_entropy.xla_common import accumulator_dtype, capped, label_mask, logits_gradient, loss_shares

MAX_LOGITS_BYTES = 2**27
"""Size of float32 logits up to which this backend is preferred to chunks."""


def unsupported_reason(request: CrossEntropyRequest) -> str | None:
    """Return None, as this backend computes every cross-entropy call, with memory for all logits."""
    del request
    return None


def lower_priority_reason(request: CrossEntropyRequest) -> str | None:
    """Return why the backend that works in chunks is preferred (the logits are large), or None."""
    size = 4 * request.logit_count
    if size > MAX_LOGITS_BYTES:
        return f"stores the logits: up to {MAX_LOGITS_BYTES >> 20} MiB, here {size / 2**20:.0f} MiB"
    return None


def per_token_loss(request: CrossEntropyRequest) -> Float[Array, "*tokens"]:
    """Compute each token's loss [...] in float32; if the vocabulary is sharded, this device's summand of it."""
    return _differentiable(request.options, request.hidden, request.weight, request.labels)


def loss_sum(request: CrossEntropyRequest) -> Float[Array, ""]:
    """Compute the sum of the tokens' losses in float32; if the vocabulary is sharded, this device's summand."""
    losses = per_token_loss(request)
    return jnp.sum(losses if request.token_weights is None else losses * request.token_weights)


def _loss(options: Options, hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    return _forward_rule(options, hidden, weight, labels)[0]


def _forward_rule(options: Options, hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> tuple:
    dtype = accumulator_dtype(hidden.dtype)
    logits = capped(jnp.matmul(hidden, weight.astype(hidden.dtype), preferred_element_type=dtype), options)
    maximum = logits.max(axis=-1)
    if options.axis_name is not None:
        maximum = jax.lax.pmax(maximum, options.axis_name)
    exponentials = jnp.exp(logits - maximum[..., None])
    total = exponentials.sum(axis=-1)
    if options.axis_name is not None:
        total = jax.lax.psum(total, options.axis_name)
    lse = maximum + jnp.log(total)
    chosen = jnp.where(label_mask(labels, logits.shape[-1], options), logits, 0.0).sum(axis=-1)
    loss = loss_shares(lse, chosen, labels, logits.shape[-1], options)
    # The exponentials are saved rather than the logits, so that the backward does not recompute them.
    kept_logits = None if options.soft_cap is None else logits
    return loss, (hidden, weight, labels, exponentials, total, kept_logits, lse)


def _backward_rule(options: Options, residuals: tuple, d_loss: jax.Array) -> tuple:
    hidden, weight, labels, exponentials, total, logits, lse = residuals
    gradient = logits_gradient(exponentials, total, logits, lse, labels, d_loss, options).astype(hidden.dtype)
    d_hidden = jnp.einsum("...v,dv->...d", gradient, weight.astype(hidden.dtype)).astype(hidden.dtype)
    d_weight = jnp.einsum("...d,...v->dv", hidden, gradient, preferred_element_type=lse.dtype)
    return d_hidden, d_weight.astype(weight.dtype), None


_differentiable = jax.custom_vjp(_loss, nondiff_argnums=(0,))
_differentiable.defvjp(_forward_rule, _backward_rule)
