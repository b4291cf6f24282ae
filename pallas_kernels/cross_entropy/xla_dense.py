"""The head and loss with the whole softmax held: the fastest where it is small, no recomputation."""

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy.logits import capped_logits, logits_gradient, loss_of_logits
from pallas_kernels.cross_entropy.request import Options, Request

LARGEST_LOGITS = 2**27


def refuses(request: Request) -> str | None:
    """Nothing: every call is computed, at the memory of its logits."""
    del request
    return None


def yields(request: Request) -> str | None:
    """Large logits belong to the chunked backend."""
    if request.logit_bytes > LARGEST_LOGITS:
        return f"holds the logits: up to {LARGEST_LOGITS >> 20} MiB, here {request.logit_bytes / 2**20:.0f} MiB"
    return None


def per_token_loss(request: Request) -> jax.Array:
    """Loss [...] in float32."""
    return _differentiable(request.options, request.hidden, request.weight, request.labels)


def _loss(options: Options, hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    return loss_of_logits(capped_logits(hidden, weight.astype(hidden.dtype), options), labels, options)[0]


def _forward_rule(options: Options, hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> tuple:
    logits = capped_logits(hidden, weight.astype(hidden.dtype), options)
    loss, lse, exponentials, total = loss_of_logits(logits, labels, options)
    # Keeping the exponentials rather than the logits spares the backward an exponential of every logit.
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
