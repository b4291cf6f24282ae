"""The one dense layer: any dims in, any dims out, logical axes on its kernel, a replaceable dot_general."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
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
        return apply_together(x, self)[0]

    def add_bias(self, y: jax.Array) -> jax.Array:
        """y plus the bias, where there is one."""
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


def apply_together(x: jax.Array, *layers: Linear) -> list[jax.Array]:
    """The layers' results for one input; as a single matmul where no dim is sharded.

    One wide matmul reads x once instead of once a layer. It is also a plain two-dimensional one: of a batched matmul XLA's
    CPU backend transposes the activations for the weight gradient. Sharded dims must stay apart.
    """
    contracted = layers[0].contracted
    rows = x.shape[: x.ndim - contracted]
    kernels = [layer.kernel[...].astype(x.dtype) for layer in layers]
    if is_sharded():
        dims = (tuple(range(x.ndim - contracted, x.ndim)), tuple(range(contracted)))
        results = [layer.dot_general(x, kernel, (dims, ((), ()))) for layer, kernel in zip(layers, kernels, strict=True)]
    else:
        width = math.prod(kernels[0].shape[:contracted])
        flat = [kernel.reshape(width, -1) for kernel in kernels]
        wide = flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=1)
        y = layers[0].dot_general(x.reshape(-1, width), wide, (((1,), (0,)), ((), ())))
        ends = np.cumsum([kernel.shape[1] for kernel in flat])[:-1]
        parts = jnp.split(y, ends, axis=1)
        shapes = [(*rows, *kernel.shape[contracted:]) for kernel in kernels]
        results = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    return [layer.add_bias(y) for layer, y in zip(layers, results, strict=True)]
