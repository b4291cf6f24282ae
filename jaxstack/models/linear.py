"""The one dense layer: any dims in, any dims out, logical axes on its kernel, a replaceable dot_general."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxstack.models.initialization import Initializer


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
        first = x.ndim - self.contracted
        dims = (tuple(range(first, x.ndim)), tuple(range(self.contracted)))
        kernel = self.kernel[...].astype(x.dtype)
        y = self.dot_general(x, kernel, (dims, ((), ())))
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)
