"""The activated matmul as XLA makes it: of the activation only the inputs are kept on a GPU."""

import jax
import jax.numpy as jnp

from pallas_kernels.fused_mlp.activations import ACTIVATIONS
from pallas_kernels.fused_mlp.request import ActivatedMatmulRequest


def unsupported_reason(request: ActivatedMatmulRequest) -> str | None:
    """Nothing."""
    del request
    return None


def multiply(request: ActivatedMatmulRequest) -> jax.Array:
    """[..., D]."""
    activation = ACTIVATIONS[request.activation].forward
    # A GPU's memory is slower than its arithmetic.
    activation = activation if request.target.platform == "cpu" else jax.checkpoint(activation)
    hidden = activation(*request.inputs)
    width, columns = request.weight.shape
    return jnp.dot(hidden.reshape(-1, width), request.weight).reshape(*hidden.shape[:-1], columns)
