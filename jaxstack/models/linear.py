"""The dense layer, with any input and output dims, logical axes, and a replaceable matmul (such as FP8).

Dims: B batch, T sequence, D model, F feed-forward.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float

from jaxstack.models.initialization import Initializer
from jaxstack.models.norm import LayerInput, gradient_carrier
from jaxstack.parallel import (
    gather_project,
    gather_project_scatter,
    packed_product,
    project_scatter,
    project_sum,
    save_for_backward,
    shard,
)
from jaxstack.parallel.rules import KEEP_FLOAT32
from jaxstack.parallel.sharding_context import is_sharded
from jaxstack.precision import Fp8Matmul
from pallas_kernels import (
    BiasedProduct,
    NormalisedInput,
    PackedWeight,
    QuantizedWeight,
    activated_matmul,
    swiglu,
)
from pallas_kernels.batch_invariant.mode import is_batch_invariant
from pallas_kernels.batch_invariant.product import matmul
from pallas_kernels.target import current_target
from pallas_kernels.weight_only.float8_mlp import float8_mlp, rounds_to_float8
from pallas_kernels.weight_only.packed import concatenate_outputs, is_packed

Kernel: TypeAlias = jax.Array | QuantizedWeight | PackedWeight
"""A layer's matrix. In FP8 it may have been quantized before it was gathered; in a compressed model it is packed."""

DotGeneral = Callable[..., jax.Array]
"""A function like `jax.lax.dot_general`."""


class Linear(nnx.Module):
    """Dense layer `y[..., out] = x[..., in] @ kernel[in, out] + bias[out]`; `in` and `out` may be several dims.

    Args:
      inputs, outputs: sizes of the contracted and of the produced dims.
      axes: logical axes of the kernel, inputs first.
      bias: True if the layer has a bias.
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
        dot_general: DotGeneral = jax.lax.dot_general,
    ):
        shape = (*inputs, *outputs)
        self.kernel = nnx.Param(initialize(rngs.params(), shape, math.prod(inputs)), logical_axes=axes)
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32), logical_axes=axes[len(inputs) :]) if bias else None
        self.contracted = len(inputs)
        self.dot_general = dot_general
        self.scaling: nnx.Variable | None = nnx.data(None)
        """FP8 scaling state, for recipes that have one."""
        self.adapter: Any = nnx.data(None)
        """`jaxstack.models.adapters.Adapter`, which changes the product before the bias is added; None: no adapter."""

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return apply_together(x, self)[0]

    def finish(self, x: Float[Array, "..."], y: Float[Array, "..."]) -> Float[Array, "..."]:
        """Add the adapter's output and the bias, where the layer has them, to y = x @ kernel."""
        return self.add_bias(y if self.adapter is None else self.adapter(x, y, self.kernel.get_value()))

    def whole_kernel(self) -> Float[Array, "..."]:
        """Return the matrix that the layer multiplies with, unpacked, and with its adapter merged."""
        stored = self.kernel.get_value()
        kernel = stored.dense() if isinstance(stored, PackedWeight) else stored
        if (adapter := self.adapter) is None:
            return kernel
        magnitude = None if adapter.magnitude is None else adapter.magnitude[...]
        return adapter.merge(kernel, adapter.a[...], adapter.b[...], magnitude)

    def add_bias(self, y: Float[Array, "..."]) -> Float[Array, "..."]:
        """Add the bias to y, if the layer has one."""
        if self.bias is None:
            return y
        bias = self.bias[...].astype(y.dtype)
        if is_sharded():
            return y + bias
        # With the matmul's own two dims XLA fuses the addition into the matmul.
        return (y.reshape(-1, bias.size) + bias.reshape(-1)).reshape(y.shape)


def join_layers(layers: Sequence[Linear], axis: int, parts: int = 1) -> Linear | None:
    """Merge dense layers of the same input into the first, with outputs concatenated along `axis`; None if impossible.

    Args:
      layers: dense layers, or stacks of them; the first is changed in place.
      axis: the dim of the outputs, counted from the last (-1).
      parts: number of devices among which the outputs are divided. The joined outputs are in the order of the devices,
        each with its share of every layer, as `split_outputs` takes them apart.

    Returns:
      The first layer, now with the kernels and biases of all; None, with no layer changed, where that is not possible:
      with adapters, with matmuls of a precision recipe, with kernels packed in formats that do not concatenate, or
      with outputs that the parts do not divide.
    """
    first = layers[0]
    if any(layer.adapter is not None or layer.dot_general is not jax.lax.dot_general for layer in layers):
        return None
    kernels = [layer.kernel.get_value() for layer in layers]
    packed = any(isinstance(kernel, PackedWeight) for kernel in kernels)
    if any(kernel.shape[axis] % parts for kernel in kernels):
        return None
    kernel = (
        concatenate_outputs(kernels, axis, functools.partial(_concatenate, axis=-2, parts=parts))
        if packed
        else _concatenate(kernels, axis, parts)
    )
    if kernel is None:
        return None
    first.kernel = cast(nnx.Param, first.kernel.replace(kernel))
    if first.bias is not None:
        biases = [layer.bias[...] for layer in layers if layer.bias is not None]
        first.bias = cast(nnx.Param, first.bias.replace(_concatenate(biases, axis, parts)))
    return first


def split_outputs(y: Float[Array, "..."], sizes: Sequence[int], axis: int, parts: int = 1) -> list[Float[Array, "..."]]:
    """Split the output of a joined layer into those of its layers.

    Args:
      y: the output of the layer that `join_layers` returned.
      sizes: the layers' sizes of the dim `axis`.
      axis: the dim of the outputs, counted from the last (-1).
      parts: as in `join_layers`.
    """
    if parts == 1:
        return jnp.split(y, np.cumsum(sizes)[:-1], axis)
    dim = y.ndim + axis
    # The dim of the devices stays in front, so that XLA splits each device's outputs where they are.
    by_part = y.reshape(*y.shape[:dim], parts, -1, *y.shape[dim + 1 :])
    cuts = np.cumsum([size // parts for size in sizes])[:-1]
    whole = zip(jnp.split(by_part, cuts, dim + 1), sizes, strict=True)
    return [part.reshape(*y.shape[:dim], size, *y.shape[dim + 1 :]) for part, size in whole]


def _concatenate(arrays: Sequence[jax.Array], axis: int, parts: int) -> jax.Array:
    """Concatenate arrays along `axis`, or the first of `parts` pieces of each, then the second of each, and so on."""
    if parts == 1:
        return jnp.concatenate(arrays, axis)
    dim = arrays[0].ndim + axis

    def interleave(*arrays: jax.Array) -> jax.Array:
        pieces = [x.reshape(*x.shape[:dim], parts, -1, *x.shape[dim + 1 :]) for x in arrays]
        return jnp.concatenate(pieces, dim + 1).reshape(*arrays[0].shape[:dim], -1, *arrays[0].shape[dim + 1 :])

    traced = isinstance(arrays[0], Tracer)
    sharding = None if traced else arrays[0].sharding
    return jax.jit(interleave, out_shardings=sharding)(*arrays)


def apply_together(x: LayerInput, *layers: Linear) -> list[jax.Array]:
    """Apply several dense layers to the same input, sharing work where that is faster; return their outputs.

    On a CPU they are computed by one wide matmul, which reads x once. On a GPU that costs more than it saves: the
    gradients would have to be concatenated first (16 of 600 ms for llama3-1b on an H200).
    """
    contracted = layers[0].contracted
    dot_general = layers[0].dot_general
    if any(map(is_packed, _stored_kernels(layers))):
        return [
            _apply_packed(x, layer) if is_packed(layer.kernel.get_value()) else apply_together(x, layer)[0]
            for layer in layers
        ]
    if any(layer.dot_general != dot_general for layer in layers):
        return [apply_together(x, layer)[0] for layer in layers]
    if isinstance(dot_general, Fp8Matmul):
        return _apply_fp8(x, layers, dot_general)
    x = save_for_backward(gradient_carrier(x))
    kernels = [_operand(layer, x.dtype) for layer in layers]
    if len(layers) > 1 and not is_sharded() and current_target().platform == "cpu":
        results = _multiply_wide(dot_general, x, kernels, contracted)
    else:
        inputs = cast(tuple[jax.Array, ...], fan_out(x, len(layers)))
        results = [multiply(dot_general, x, k, contracted) for x, k in zip(inputs, kernels, strict=True)]
    return [layer.finish(x, y) for layer, y in zip(layers, results, strict=True)]


def apply_gathered(x: LayerInput, *layers: Linear) -> list[jax.Array]:
    """Apply dense layers to the residual stream, overlapping its all-gather (sequence parallelism) with the matmuls.

    With sequence parallelism its all-gather overlaps the matmuls where a kernel can do that.
    """
    whole = gradient_carrier(x)
    results = gather_project(whole, _cast_kernels(whole, layers), _not_fusable_reason(layers))
    if results is None:
        return apply_together(x, *layers)
    return [layer.add_bias(y) for layer, y in zip(layers, results, strict=True)]


def apply_scattered(y: Float[Array, "B T ..."], layer: Linear) -> Float[Array, "B T D"]:
    """Apply the dense layer that ends a sublayer, overlapping its matmul with the output's reduce-scatter.

    With sequence parallelism the matmul overlaps its reduce-scatter where a kernel can do that.
    """
    (kernel,) = _cast_kernels(y, (layer,))
    out = project_scatter(y, kernel, _not_fusable_reason((layer,)))
    return apply_and_sum(y, layer) if out is None else layer.add_bias(out)


def apply_and_sum(y: Float[Array, "B T ..."], layer: Linear) -> Float[Array, "B T D"]:
    """Apply the dense layer that ends a sublayer; where it is faster, a kernel of ours sums over `tensor`."""
    (kernel,) = _cast_kernels(y, (layer,))
    out = project_sum(y, kernel, _not_fusable_reason((layer,)))
    return layer(y) if out is None else layer.add_bias(out)


def apply_mlp(
    x: LayerInput,
    first_layers: tuple[Linear, ...],
    activation: Callable[..., jax.Array],
    last: Linear,
    fused_name: str | None,
) -> Float[Array, "B T D"]:
    """Apply an MLP to the residual stream: last(activation(*first_layers(x))), fused where kernels allow it.

    Args:
      activation: elementwise function of the first layers' outputs.
      fused_name: name of the activation in `activated_matmul`; None: that kernel does not support it.
    """
    whole = gradient_carrier(x)
    biases = [None if layer.bias is None else layer.bias[...].astype(whole.dtype) for layer in first_layers]
    kernels = _cast_kernels(whole, (*first_layers, last))
    pairs = list(zip(kernels[:-1], biases, strict=True))
    reason = _not_fusable_reason((*first_layers, last))
    out = gather_project_scatter(whole, pairs, activation, kernels[-1], reason)
    if out is not None:
        return last.add_bias(out)
    matmul = last.dot_general
    if activation is swiglu and isinstance(matmul, Fp8Matmul) and _is_fp8_mlp(matmul, first_layers, last):
        return last.add_bias(_apply_fp8_mlp(x, (*first_layers, last), matmul))
    if is_sharded():
        fused_name = None
    bias = first_layers[0].bias
    if fused_name is not None and reason is None and bias is not None and len(first_layers) == 1:
        # A kernel computes the first layer, its bias and the activation together.
        product = BiasedProduct(save_for_backward(whole), kernels[0], bias[...])
        return last.add_bias(activated_matmul(product, kernels[-1], fused_name))
    inner = [shard(y, "batch", "length", "act_mlp") for y in apply_together(x, *first_layers)]
    if fused_name is None or _not_fusable_reason((last,)) is not None:
        return apply_and_sum(activation(*inner), last)
    return last.add_bias(activated_matmul(inner, kernels[-1], fused_name))


def is_packed_float8_mlp(*layers: Linear) -> bool:
    """Return True if `apply_packed_float8_mlp` can compute an MLP of these layers.

    Their weights must be packed in FP8 W8A8, without bias or adapter, and not sharded.
    """
    plain = all(layer.adapter is None and layer.bias is None for layer in layers)
    replaced = any(layer.dot_general is not jax.lax.dot_general for layer in layers)
    return plain and not replaced and not is_sharded() and all(map(rounds_to_float8, _stored_kernels(layers)))


def apply_packed_float8_mlp(x: LayerInput, gate_up: Linear, down: Linear) -> Float[Array, "B T D"]:
    """Apply a SwiGLU MLP whose gate and up projection are one layer, see `is_packed_float8_mlp`."""
    whole = save_for_backward(gradient_carrier(x))
    first, last = (cast(PackedWeight, layer.kernel.get_value()) for layer in (gate_up, down))
    return float8_mlp(whole, first, last)


def add(x: Float[Array, "... D"], y: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """Add y to the matmul output x in a form that XLA can fuse into the matmul.

    With the matmul's own two dims XLA adds y within the matmul, without copying y first.
    """
    if is_sharded():
        return x + y
    rows = (-1, x.shape[-1])
    return (x.reshape(rows) + y.reshape(rows)).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def fan_out(x: Float[Array, "..."], count: int) -> tuple[Float[Array, "..."], ...]:
    """Return x `count` times, one per matmul, so that XLA can fuse the sum of its gradients into the backward matmuls.

    In the backward pass each matmul then adds to the running sum: the sum is the second operand of the addition (in
    JAX's own order it is the first), because XLA fuses only an addition whose first operand is the matmul.
    """
    return (x,) * count


def _fan_out_backward(count: int, _: None, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array]:
    total = gradients[-1]
    for gradient in gradients[-2::-1]:
        total = add(gradient, total)
    return (total,)


# All results are the same array: if the forward rule called `fan_out` itself, a pipeline stage would save each result
# as a separate array.
fan_out.defvjp(lambda x, count: ((x,) * count, None), _fan_out_backward)


def multiply(
    dot_general: DotGeneral,
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    contracted: int,
    dtype: jax.typing.DTypeLike | None = None,
) -> Float[Array, "..."]:
    """Multiply x by a kernel, contracting the last `contracted` dims of x with the first ones of the kernel.

    Without sharding this is a plain two-dimensional matmul: for the weight gradient of a batched one XLA's CPU backend
    transposes the activations. Sharded dims must stay separate. `dtype` is that of the result; None: that of x.
    """
    rows = x.shape[: x.ndim - contracted]
    outputs = kernel.shape[contracted:]
    if not is_sharded():
        width = math.prod(x.shape[len(rows) :])
        x = x.reshape(-1, width)
        kernel = kernel.reshape(width, -1)
        contracted = 1
        if is_batch_invariant():
            return matmul(x, kernel, dtype).reshape(*rows, *outputs)
    dims = (tuple(range(x.ndim - contracted, x.ndim)), tuple(range(contracted)))
    options = {} if dtype is None else {"preferred_element_type": dtype}
    return dot_general(x, kernel, (dims, ((), ())), **options).reshape(*rows, *outputs)


def _multiply_wide(
    dot_general: DotGeneral, x: jax.Array, kernels: Sequence[jax.Array], contracted: int
) -> list[jax.Array]:
    """Multiply x with several kernels by one wide matmul, and split the result."""
    width = math.prod(kernels[0].shape[:contracted])
    flat = [kernel.reshape(width, -1) for kernel in kernels]
    rows = x.shape[: x.ndim - contracted]
    y = multiply(dot_general, x.reshape(*rows, width), jnp.concatenate(flat, axis=1), 1)
    boundaries = np.cumsum([kernel.shape[1] for kernel in flat])[:-1]
    shapes = [(*rows, *kernel.shape[contracted:]) for kernel in kernels]
    return [part.reshape(shape) for part, shape in zip(jnp.split(y, boundaries, axis=-1), shapes, strict=True)]


def is_plain_product(layer: Linear) -> bool:
    """Return True if the layer is only a product with its kernel, cast to the dtype of the input."""
    uncast = layer.kernel.get_metadata().get(KEEP_FLOAT32)
    return layer.bias is None and not uncast and _not_fusable_reason((layer,)) is None


def _not_fusable_reason(layers: tuple[Linear, ...]) -> str | None:
    """Return why these layers cannot use kernels that fuse a matmul with other work, or None if they can."""
    if is_batch_invariant():
        return "the order of sums is fixed"
    if any(layer.adapter is not None for layer in layers):
        return "the layers have adapters"
    if any(map(is_packed, _stored_kernels(layers))):
        return "the weights are packed in few bits"
    if all(layer.dot_general is jax.lax.dot_general for layer in layers):
        return None
    matmul = next(layer.dot_general for layer in layers if layer.dot_general is not jax.lax.dot_general)
    return f"the layers replace the matmul by {getattr(matmul, '__name__', matmul)}"


def _cast_kernels(x: jax.Array, layers: tuple[Linear, ...]) -> list[jax.Array]:
    """Return the layers' kernels cast to the dtype of x; quantized and packed ones are left unchanged."""
    values = _stored_kernels(layers)
    return [v.astype(x.dtype) if isinstance(v, jax.Array) else cast(jax.Array, v) for v in values]


def _operand(layer: Linear, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return a layer's kernel in the compute dtype, or in float32 if its metadata has `KEEP_FLOAT32`."""
    kernel = layer.kernel[...]
    return kernel if layer.kernel.get_metadata().get(KEEP_FLOAT32) else kernel.astype(dtype)


def _stored_kernels(layers: tuple[Linear, ...]) -> list[Kernel]:
    return [layer.kernel.get_value() for layer in layers]


def _unpacked_kernels(layers: tuple[Linear, ...]) -> list[jax.Array | QuantizedWeight]:
    """Return the layers' kernels, typed as not packed: the caller has excluded weights packed in few bits."""
    return cast(list[jax.Array | QuantizedWeight], _stored_kernels(layers))


def _apply_packed(x: LayerInput, layer: Linear) -> jax.Array:
    if layer.dot_general is not jax.lax.dot_general:
        raise ValueError(f"packed weights have their own matmul; {layer.dot_general} needs plain weights.")
    whole = save_for_backward(gradient_carrier(x))
    weight = cast(PackedWeight, layer.kernel.get_value())
    return layer.finish(whole, packed_product(whole, weight, layer.kernel.get_metadata().get("logical_axes")))


def _scaling_states(layers: tuple[Linear, ...]) -> list[jax.Array | None]:
    return [None if layer.scaling is None else layer.scaling[...] for layer in layers]


def _save_input(x: LayerInput) -> LayerInput:
    return x if isinstance(x, NormalisedInput) else save_for_backward(x)


def _apply_fp8(x: LayerInput, layers: tuple[Linear, ...], matmul: Fp8Matmul) -> list[jax.Array]:
    """Apply FP8 dense layers to one input, which is quantized once; kernels may be quantized already."""
    contracted = layers[0].contracted
    kernels = _unpacked_kernels(layers)
    states = _scaling_states(layers)
    whole = save_for_backward(gradient_carrier(x))
    rows = whole.shape[: whole.ndim - contracted]
    outputs = [kernel.shape[contracted:] for kernel in kernels]
    if is_sharded():
        x = whole
    else:
        width = math.prod(whole.shape[len(rows) :])
        x = _save_input(x).reshape(-1, width)
        kernels = [k.reshape(width, -1) for k in kernels]
        contracted = 1
    results = matmul.together(x, kernels, contracted, states)
    shaped = zip(layers, results, outputs, strict=True)
    return [layer.finish(whole, y.reshape(*rows, *dims)) for layer, y, dims in shaped]


def _is_fp8_mlp(matmul: Fp8Matmul, first_layers: tuple[Linear, ...], last: Linear) -> bool:
    """Return True if the fused FP8 SwiGLU function can compute this MLP: one recipe, no adapters, not sharded."""
    layers = (*first_layers, last)
    plain = all(layer.adapter is None and layer.contracted == 1 for layer in layers)
    unbiased = all(layer.bias is None for layer in first_layers)
    return all(layer.dot_general == matmul for layer in layers) and plain and unbiased and not is_sharded()


def _apply_fp8_mlp(x: LayerInput, layers: tuple[Linear, ...], matmul: Fp8Matmul) -> jax.Array:
    rows = _save_input(x).reshape(-1, x.shape[-1])
    out = matmul.swiglu_mlp(rows, _unpacked_kernels(layers), _scaling_states(layers))
    return out.reshape(*x.shape[:-1], -1)
