"""The one dense layer: any dims in, any dims out, logical axes on its kernel, a replaceable dot_general."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxstack.models.initialization import Initializer
from jaxstack.parallel.rules import is_sharded


class Linear(nnx.Module):
    """`y[..., out] = x[..., in] @ kernel[in, out] + bias[out]`, where `in` and `out` may be several dims.

    Args:
      inputs, outputs: sizes of the contracted and of the produced dims.
      axes: logical axes of the kernel, inputs first.
      dot_general: the matmul itself; precision recipes replace it.
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        axes: tuple[str, ...],
        *,
        rngs: nnx.Rngs,
        initialize: Initializer,
        bias: bool = False,
        dot_general: Callable[..., jax.Array] = jax.lax.dot_general,
    ):
        shape = (*inputs, *outputs)
        self.kernel = nnx.Param(initialize(rngs.params(), shape, math.prod(inputs)), logical_axes=axes)
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32), logical_axes=axes[len(inputs) :]) if bias else None
        self.contracted = len(inputs)
        self.dot_general = dot_general

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...].astype(x.dtype)
        rows, outputs = x.shape[: x.ndim - self.contracted], kernel.shape[self.contracted :]
        contracted = self.contracted
        if not is_sharded():
            # One plain matmul: of a batched one XLA's CPU backend transposes the activations for the weight gradient.
            # Sharded dims must stay apart.
            width = math.prod(kernel.shape[:contracted])
            x, kernel, contracted = x.reshape(-1, width), kernel.reshape(width, -1), 1
        dims = (tuple(range(x.ndim - contracted, x.ndim)), tuple(range(contracted)))
        y = self.dot_general(x, kernel, (dims, ((), ()))).reshape(*rows, *outputs)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)
