"""Activation and matmul in XLA; on a GPU only the activation's inputs are saved for the backward."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.fused_mlp.activations import ACTIVATIONS
from pallas_kernels.fused_mlp.request import ActivatedMatmulRequest


def unsupported_reason(request: ActivatedMatmulRequest) -> str | None:
    """Return None, as this backend computes every call."""
    del request
    return None


def multiply(request: ActivatedMatmulRequest) -> Float[Array, "*rows D"]:
    """Compute activation(*inputs) @ weight, [..., D], in XLA."""
    activation = ACTIVATIONS[request.activation].forward
    # A GPU recomputes the activation faster than it reads it from memory.
    activation = activation if request.target.platform == "cpu" else jax.checkpoint(activation)
    hidden = activation(*request.compute_inputs())
    width, columns = request.weight.shape
    return jnp.dot(hidden.reshape(-1, width), request.weight).reshape(*hidden.shape[:-1], columns)
