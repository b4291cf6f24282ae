"""Backend for Hopper GPUs: head and loss in chunks of tokens; its matmul stores exponentials of logits, not logits.

The product and the pass over the logits are one kernel. If the exponentials overflow (`mosaic_chunk`), everything is
computed once more from logits.
"""

import jax

from pallas_kernels.cross_entropy import mosaic_chunk, triton, xla
from pallas_kernels.cross_entropy.request import CrossEntropyRequest


def unsupported_reason(request: CrossEntropyRequest) -> str | None:
    """Return the first reason why the Hopper kernel cannot compute this call, or None if it can."""
    reason = mosaic_chunk.unsupported_reason(request)
    return reason or next(filter(None, map(mosaic_chunk.unsupported_rows, xla.chunk_token_counts(request))), None)


def loss_sum(request: CrossEntropyRequest) -> jax.Array:
    """Compute the sum of the tokens' losses in float32 with the Hopper kernel."""
    major, minor = request.target.compute_capability or (0, 0)
    capability = None if triton.unsupported_reason(request) else 10 * major + minor
    return xla.chunked_loss_sum(request, capability, exponentials=True)
