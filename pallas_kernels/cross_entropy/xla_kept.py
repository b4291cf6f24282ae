"""The head and loss in chunks of tokens, with the softmax kept in the dtype of `hidden` for the backward.

Costs T x V x 2 bytes in bfloat16 and saves the backward a third of its matmuls. Nothing is lost in precision against
recomputing: the gradient of the logits is rounded to that dtype before its matmuls anyway.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy import xla
from pallas_kernels.cross_entropy.logits import capped_logits, loss_of_logits
from pallas_kernels.cross_entropy.request import Options, Request

LARGEST_KEPT = 2**33
"""Bytes of probabilities that are kept at most; a tenth of the device's memory where that is less and known."""


def refuses(request: Request) -> str | None:
    """A soft cap: its gradient needs the logits too."""
    if request.options.soft_cap is not None:
        return "keeps the softmax only, and soft_cap needs the logits for its gradient; leave soft_cap out"
    return None


def yields(request: Request) -> str | None:
    """Where the softmax would take too much memory, or compute is scarcer than memory traffic (CPU)."""
    if request.target.platform != "cuda":
        return "trades memory for matmuls, which pays on GPUs"
    kept, limit = request.logit_bytes // 4 * request.hidden.dtype.itemsize, _limit()
    if kept > limit:
        return f"keeps the softmax: up to {limit / 2**30:.1f} GiB, here {kept / 2**30:.1f} GiB"
    return None


def _limit() -> int:
    if jax.default_backend() != "gpu":
        return LARGEST_KEPT
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 10 * LARGEST_KEPT)
    return min(LARGEST_KEPT, memory // 10)


def per_token_loss(request: Request) -> jax.Array:
    """Loss [...] in float32."""
    return xla.in_chunks(request, _differentiable)


def _forward_rule(options: Options, chunks: int, hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> tuple:
    matrix = weight.astype(hidden.dtype)

    def visit(carry: None, index: jax.Array) -> tuple:
        logits = capped_logits(xla.chunk_of(hidden, chunks, index), matrix, options)
        loss, lse, *_ = loss_of_logits(logits, xla.chunk_of(labels, chunks, index), options)
        return carry, (loss, lse, jnp.exp(logits - lse[..., None]).astype(hidden.dtype))

    _, (loss, lse, softmax) = jax.lax.scan(visit, None, jnp.arange(chunks))
    return xla.unchunk(loss), (hidden, weight, labels, lse, softmax)


_differentiable = jax.custom_vjp(xla.chunked_loss, nondiff_argnums=(0, 1))
_differentiable.defvjp(_forward_rule, xla.backward_rule)
