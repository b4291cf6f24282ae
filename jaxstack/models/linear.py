"""The one dense layer: any dims in, any dims out, logical axes on its kernel, a replaceable dot_general."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxstack.models.initialization import Initializer
from jaxstack.parallel import gather_project, gather_project_scatter, keep, project_scatter, shard
from jaxstack.parallel.context import is_sharded
from jaxstack.precision.recipe import Fp8Matmul
from pallas_kernels import NormalisedInput, QuantizedWeight, activated_matmul, swiglu
from pallas_kernels.target import current_target

Input = jax.Array | NormalisedInput
"""Of a layer: an array, which a norm may have left to the layer to compute."""


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
        self.scaling: nnx.Variable | None = nnx.data(None)
        self.adapter: Any = nnx.data(None)
        """Changes the product before the bias is added: see `jaxstack.models.adapters`."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return apply_together(x, self)[0]

    def finish(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The result for x, from its product y with the kernel."""
        return self.add_bias(y if self.adapter is None else self.adapter(x, y, self.kernel.get_value()))

    def add_bias(self, y: jax.Array) -> jax.Array:
        """y plus the bias, where there is one."""
        if self.bias is None:
            return y
        bias = self.bias[...].astype(y.dtype)
        if is_sharded():
            return y + bias
        # With the matmul's own two dims XLA makes it part of the matmul.
        return (y.reshape(-1, bias.size) + bias.reshape(-1)).reshape(y.shape)


def apply_together(x: Input, *layers: Linear) -> list[jax.Array]:
    """The layers' results for one input.

    On a CPU as a single wide matmul, which reads x once. On a GPU that costs more than it saves: the gradients would
    have to be copied side by side first (16 of 600 ms for llama3-1b on an H200).
    """
    contracted, dot_general = layers[0].contracted, layers[0].dot_general
    if any(layer.dot_general != dot_general for layer in layers):
        return [apply_together(x, layer)[0] for layer in layers]
    if isinstance(dot_general, Fp8Matmul):
        return _apply_fp8(x, layers, dot_general)
    x = keep(_computed(x))
    kernels: list[Any] = [layer.kernel[...].astype(x.dtype) for layer in layers]
    wide = len(layers) > 1 and not is_sharded() and current_target().platform == "cpu"
    if wide:
        width = math.prod(kernels[0].shape[:contracted])
        flat = [kernel.reshape(width, -1) for kernel in kernels]
        rows = x.shape[: x.ndim - contracted]
        y = multiply(dot_general, x.reshape(*rows, width), jnp.concatenate(flat, axis=1), 1)
        ends = np.cumsum([kernel.shape[1] for kernel in flat])[:-1]
        shapes = [(*rows, *kernel.shape[contracted:]) for kernel in kernels]
        results = [part.reshape(shape) for part, shape in zip(jnp.split(y, ends, axis=-1), shapes, strict=True)]
    else:
        inputs: Any = fan_out(x, len(layers))
        results = [multiply(dot_general, x, k, contracted) for x, k in zip(inputs, kernels, strict=True)]
    return [layer.finish(x, y) for layer, y in zip(layers, results, strict=True)]


def apply_gathered(x: Input, *layers: Linear) -> list[jax.Array]:
    """`apply_together` for what reads the residual stream [B, T, D]."""
    whole = _computed(x)
    results = gather_project(whole, _kernels(whole, layers), _unsuitable(layers))
    if results is None:
        return apply_together(x, *layers)
    return [layer.add_bias(y) for layer, y in zip(layers, results, strict=True)]


def apply_scattered(y: jax.Array, layer: Linear) -> jax.Array:
    """layer(y) for what is added to the residual stream."""
    (kernel,) = _kernels(y, (layer,))
    out = project_scatter(y, kernel, _unsuitable((layer,)))
    return layer(y) if out is None else layer.add_bias(out)


def apply_mlp(
    x: Input, firsts: tuple[Linear, ...], between: Callable[..., jax.Array], last: Linear, activation: str | None
) -> jax.Array:
    """last(between(*firsts(x))) from and to the residual stream.

    `between` is elementwise; `activation` is what `activated_matmul` calls it, if it knows it.
    """
    whole = _computed(x)
    biases = [None if layer.bias is None else layer.bias[...].astype(whole.dtype) for layer in firsts]
    kernels = _kernels(whole, (*firsts, last))
    pairs = list(zip(kernels[:-1], biases, strict=True))
    out = gather_project_scatter(whole, pairs, between, kernels[-1], _unsuitable((*firsts, last)))
    if out is not None:
        return last.add_bias(out)
    if between is swiglu and _in_one_fp8(*firsts, last):
        return last.add_bias(_apply_fp8_mlp(x, (*firsts, last)))
    inner = [shard(y, "batch", "length", "act_mlp") for y in apply_together(x, *firsts)]
    if activation is None or is_sharded() or _unsuitable((last,)) is not None:
        return last(between(*inner))
    return last.add_bias(activated_matmul(inner, kernels[-1], activation))


def _unsuitable(layers: tuple[Linear, ...]) -> str | None:
    if any(layer.adapter is not None for layer in layers):
        return "the layers have adapters"
    if all(layer.dot_general is jax.lax.dot_general for layer in layers):
        return None
    return f"the matmuls are those of a precision recipe ({layers[0].dot_general})"


def _kernels(x: jax.Array, layers: tuple[Linear, ...]) -> list[Any]:
    values = _stored_kernels(layers)
    return [value if isinstance(value, QuantizedWeight) else value.astype(x.dtype) for value in values]


def _stored_kernels(layers: tuple[Linear, ...]) -> list[Any]:
    return [layer.kernel.get_value() for layer in layers]


def _apply_fp8(x: Input, layers: tuple[Linear, ...], matmul: Fp8Matmul) -> list[jax.Array]:
    """The layers' results, with the input quantised once; kernels may come quantised (`gather_weights`)."""
    contracted, kernels = layers[0].contracted, _stored_kernels(layers)
    states = [None if layer.scaling is None else layer.scaling[...] for layer in layers]
    whole = keep(_computed(x))
    rows = whole.shape[: whole.ndim - contracted]
    outputs = [kernel.shape[contracted:] for kernel in kernels]
    if is_sharded():
        x = whole
    else:
        width = math.prod(whole.shape[len(rows) :])
        x, kernels, contracted = _kept(x).reshape(-1, width), [k.reshape(width, -1) for k in kernels], 1
    results = matmul.together(x, kernels, contracted, states)
    shaped = zip(layers, results, outputs, strict=True)
    return [layer.finish(whole, y.reshape(*rows, *dims)) for layer, y, dims in shaped]


def _in_one_fp8(*layers: Linear) -> bool:
    """Whether three layers make an FP8 MLP of one piece: one recipe, nothing but SwiGLU between the products."""
    matmul = layers[-1].dot_general
    plain = all(layer.adapter is None and layer.contracted == 1 for layer in layers)
    between = all(layer.bias is None for layer in layers[:-1])
    alike = isinstance(matmul, Fp8Matmul) and all(layer.dot_general == matmul for layer in layers)
    return alike and plain and between and not is_sharded()


def _apply_fp8_mlp(x: Input, layers: tuple[Linear, ...]) -> jax.Array:
    states = [None if layer.scaling is None else layer.scaling[...] for layer in layers]
    out = layers[-1].dot_general.swiglu_mlp(_kept(x).reshape(-1, x.shape[-1]), _stored_kernels(layers), states)
    return out.reshape(*x.shape[:-1], -1)


def _computed(x: Input) -> jax.Array:
    return x.carrier if isinstance(x, NormalisedInput) else x


def _kept(x: Input) -> Input:
    return x if isinstance(x, NormalisedInput) else keep(x)


def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """x + y [..., D]; the one that a matmul gives is better x.

    With the matmul's own two dims XLA adds y while it multiplies, and does not copy y before.
    """
    if is_sharded():
        return x + y
    rows = (-1, x.shape[-1])
    return (x.reshape(rows) + y.reshape(rows)).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def fan_out(x: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """x for each of `count` matmuls. Each of their gradients but the first is a sum that the next matmul adds to.

    In JAX's own order the sum comes first in every addition: XLA then takes only the first sum into a matmul.
    """
    return (x,) * count


def _fan_out_backward(count: int, _: None, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array]:
    total = gradients[-1]
    for gradient in gradients[-2::-1]:
        total = add(gradient, total)
    return (total,)


# The same array for all: results of another call would each be kept for the backward pass of a pipeline's stage.
fan_out.defvjp(lambda x, count: ((x,) * count, None), _fan_out_backward)


def multiply(dot_general: Callable[..., jax.Array], x: jax.Array, kernel: jax.Array, contracted: int) -> jax.Array:
    """x [..., in] times kernel, whose output dims follow its inputs, of which x has `contracted`.

    Without sharding as a plain two-dimensional matmul: of a batched one XLA's CPU backend transposes the activations
    for the weight gradient. Sharded dims must stay apart.
    """
    rows, outputs = x.shape[: x.ndim - contracted], kernel.shape[contracted:]
    if not is_sharded():
        width = math.prod(x.shape[len(rows) :])
        x, kernel, contracted = x.reshape(-1, width), kernel.reshape(width, -1), 1
    dims = (tuple(range(x.ndim - contracted, x.ndim)), tuple(range(contracted)))
    return dot_general(x, kernel, (dims, ((), ()))).reshape(*rows, *outputs)
