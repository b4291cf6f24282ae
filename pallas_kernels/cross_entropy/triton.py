"""Backend with a Triton kernel: each chunk's logits are turned into their gradient in one pass over memory.

XLA fuses this into two passes: one reads the logits for the log-sum-exp, the other reads and overwrites them.
"""

import importlib.util

from jaxtyping import Array, Float

from pallas_kernels.cross_entropy import xla
from pallas_kernels.cross_entropy.request import CrossEntropyRequest

_LEAST_CAPABILITY = (8, 0)


def unsupported_reason(request: CrossEntropyRequest) -> str | None:
    """Return the first reason why the Triton kernel cannot compute this call, or None if it can."""
    capability = request.target.compute_capability
    vocabulary = request.weight.shape[1]
    if not all(importlib.util.find_spec(name) for name in ("triton", "jax_triton")):
        return "needs Triton: pip install 'jaxstack[cuda]'"
    if capability is None or capability < _LEAST_CAPABILITY:
        return f"needs an NVIDIA GPU of compute capability 8.0 or newer, got {request.target}"
    if request.options.soft_cap is not None:
        return f"has no soft cap, got {request.options.soft_cap}"
    if request.options.axis_name is not None:
        return f"needs the whole vocabulary on one device, but it is sharded over {request.options.axis_name!r}"
    if request.hidden.dtype.itemsize != 2 or vocabulary % 8:
        return f"takes 16-bit logits whose number is a multiple of 8, got {vocabulary} of {request.hidden.dtype}"
    return None


def loss_sum(request: CrossEntropyRequest) -> Float[Array, ""]:
    """Compute the sum of the tokens' losses in float32 with the Triton kernel."""
    major, minor = request.target.compute_capability or (0, 0)
    return xla.chunked_loss_sum(request, 10 * major + minor)
