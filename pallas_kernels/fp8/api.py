"""`fp8_dot_general`: a `dot_general` in FP8 for any layer, differentiable, with a choice of how operands are scaled."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import select
from pallas_kernels.fp8.backends import BACKENDS, Fp8Request
from pallas_kernels.fp8.formats import GRADIENT_FORMATS, Quantized
from pallas_kernels.fp8.options import Fp8Options

RECIPES = tuple(BACKENDS)
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class QuantizedWeight(NamedTuple):
    """A weight that is in FP8 already, e.g. because it was gathered over devices as such.

    Attributes:
        carrier: what the gradient of the weight goes to; its value is not used.
        quantized: E4M3, scaled as the recipe does.
    """

    carrier: jax.Array
    quantized: Quantized

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weight."""
        return self.carrier.shape

    def reshape(self, *shape: int) -> "QuantizedWeight":
        """The weight with its dims merged; summed dims stay apart from the others."""
        values, inverse_scale = self.quantized
        return QuantizedWeight(self.carrier.reshape(*shape), Quantized(values.reshape(*shape), inverse_scale))


@dataclasses.dataclass(frozen=True)
class NormalisedInput:
    """The RMSNorm of x, for a product that may compute it while it rounds, so that it is never stored.

    Attributes:
        carrier: what `rms_norm` returned [..., D]: where the gradient goes to. Its value is used where no kernel fits.
        x: [..., D], not differentiated.
        gain: [D], with the norm's offset, not differentiated.
        epsilon: of the norm.
    """

    carrier: jax.Array
    x: jax.Array
    gain: jax.Array
    epsilon: float

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the input."""
        return self.carrier.shape

    def reshape(self, *shape: int) -> "NormalisedInput":
        """With its rows in other dims."""
        return dataclasses.replace(self, carrier=self.carrier.reshape(*shape), x=self.x.reshape(*shape))


def fp8_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: Any = None,
    *,
    recipe: str = "current",
    gradients: str = "e5m2",
    state: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`jax.lax.dot_general` of an activation and a weight, both in E4M3, sums in float32; gradients in FP8 too.

    Linen and NNX layers take it as it is: `nnx.Linear(..., dot_general=fp8_dot_general)`. On Hopper GPUs give XLA
    `xla_gpu_enable_triton_gemm=False` (a compiler option), or it may not use its FP8 matmul.

    Args:
        lhs: the activation, bfloat16 or float32.
        rhs: the weight, of the same dtype, or float32: then that is rounded, and its gradient is float32 too.
        dimension_numbers: as `jax.lax.dot_general`'s, without batch dims.
        precision: not used: it is given by the formats.
        preferred_element_type: of the result; default: the dtype of `lhs`.
        out_sharding: must be None: a layout is chosen by constraints around the call.
        recipe: "current": one scale a tensor, from its largest magnitude; "delayed": the same, from the magnitudes of
            the last steps in `state`; "blockwise": one scale for 128 values of an activation or gradient and for
            128 x 128 of a weight (DeepSeek-V3, arXiv:2412.19437).
        gradients: the format of the incoming gradient, "e5m2" (more range) or "e4m3" (more digits; blockwise: always).
        state: of delayed scaling, from `empty_fp8_state`; the gradient with respect to it makes the next one
            (`updated_fp8_state`).
        implementation: a name of the recipe's backends; None takes the first that fits.

    Returns:
        What `dot_general` returns: the free dims of lhs, then those of rhs.

    Raises:
        ValueError: an argument breaks a rule. `NotSupported` (a ValueError): the named implementation cannot do it.
    """
    del precision
    (lhs_dims, rhs_dims), batch = dimension_numbers
    _check(lhs, rhs, batch, out_sharding)
    x = _move(lhs, lhs_dims, to_end=True)
    weight = _move(rhs, rhs_dims, to_end=False)
    (out,) = fp8_multiply(
        x,
        (weight,),
        contracted=len(lhs_dims),
        output=preferred_element_type,
        recipe=recipe,
        gradients=gradients,
        states=(state,),
        implementation=implementation,
    )
    return out


def fp8_multiply(
    x: jax.Array | NormalisedInput,
    weights: Sequence[jax.Array | QuantizedWeight],
    *,
    contracted: int = 1,
    output: jax.typing.DTypeLike | None = None,
    recipe: str = "current",
    gradients: str = "e5m2",
    states: Sequence[jax.Array | None] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """x [rows, D] times each weight [D, outputs], as `fp8_dot_general`; x is quantised once for all.

    Args:
        x: the input, or what it is the norm of.
        contracted: the number of dims that D stands for.
        output: dtype of the results; default: that of x.
        states: one a weight with delayed scaling.
    """
    inner = x.shape[len(x.shape) - contracted :]
    if any(w.shape[:contracted] != inner for w in weights):
        raise ValueError(f"summed dims differ: x has {inner}, the weights {[w.shape[:contracted] for w in weights]}")
    return _call(x, weights, contracted, output, recipe, gradients, states, implementation)


def fp8_swiglu_mlp(
    x: jax.Array | NormalisedInput,
    gate: jax.Array | QuantizedWeight,
    up: jax.Array | QuantizedWeight,
    down: jax.Array | QuantizedWeight,
    *,
    recipe: str = "current",
    gradients: str = "e5m2",
    states: Sequence[jax.Array | None] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """swiglu(x @ gate, x @ up) @ down with products in FP8, as `fp8_multiply` and `swiglu` give.

    SwiGLU and its gradients are rounded where they are computed: they are in memory in FP8 only.

    Args:
        x: [rows, D], where `rows` stands for one or several dims.
        gate, up: [D, F].
        down: [F, outputs].
        states: of gate, up and down, with delayed scaling.
    """
    (inner, width), shapes = gate.shape, (gate.shape, up.shape, down.shape)
    if x.shape[-1] != inner or up.shape != gate.shape or len(down.shape) != 2 or down.shape[0] != width:
        raise ValueError(
            f"x [rows, D], gate and up [D, F] and down [F, outputs] belong together; got {x.shape} and "
            f"{', '.join(map(str, shapes))}"
        )
    return _call(x, (gate, up, down), 1, None, recipe, gradients, states, implementation, mlp=True)[0]


def _call(
    x: jax.Array | NormalisedInput,
    weights: Sequence[jax.Array | QuantizedWeight],
    contracted: int,
    output: jax.typing.DTypeLike | None,
    recipe: str,
    gradients: str,
    states: Sequence[jax.Array | None] | None,
    implementation: str | None,
    *,
    mlp: bool = False,
) -> tuple[jax.Array, ...]:
    norm_inputs, epsilon = (), None
    if isinstance(x, NormalisedInput):
        whole = contracted == 1
        norm_inputs = (lax.stop_gradient(x.x), lax.stop_gradient(x.gain).astype(jnp.float32)) if whole else ()
        x, epsilon = x.carrier, x.epsilon if whole else None
    states = tuple(states or [None] * len(weights))
    _check_recipe(recipe, gradients, states)
    carriers = tuple(w.carrier if isinstance(w, QuantizedWeight) else w for w in weights)
    quantized = tuple(w.quantized if isinstance(w, QuantizedWeight) else None for w in weights)
    if x.dtype not in (jnp.bfloat16, jnp.float32) or any(w.dtype not in (x.dtype, jnp.float32) for w in carriers):
        shown = ", ".join(str(w.dtype) for w in carriers)
        raise ValueError(
            f"FP8 products take bfloat16 or float32, of a weight that of x or float32; got {x.dtype} times {shown}; "
            "cast them"
        )
    gradients = "e4m3" if recipe == "blockwise" else gradients
    options = Fp8Options(contracted, x.dtype.name, jnp.dtype(output or x.dtype).name, gradients, epsilon)
    request = Fp8Request(options, x, norm_inputs, carriers, quantized, states, mlp)
    return select("fp8_dot_general", BACKENDS[recipe], implementation, request).call(request)


def _check_recipe(recipe: str, gradients: str, states: tuple[jax.Array | None, ...]) -> None:
    if recipe not in BACKENDS:
        raise ValueError(f"recipe must be one of {', '.join(map(repr, RECIPES))}; got {recipe!r}")
    if gradients not in GRADIENT_FORMATS:
        raise ValueError(f"gradients must be one of {', '.join(map(repr, GRADIENT_FORMATS))}; got {gradients!r}")
    given = sum(state is not None for state in states)
    if given != (len(states) if recipe == "delayed" else 0):
        raise ValueError(
            f"a state is for recipe 'delayed' and only for it; got recipe {recipe!r} with {given} states "
            f"for {len(states)} weights; make one with empty_fp8_state()"
        )


def _check(lhs: jax.Array, rhs: jax.Array, batch: Any, out_sharding: Any) -> None:
    if any(batch):
        raise ValueError(f"fp8_dot_general has no batch dims, got {batch}; use jax.vmap, or a plain dot_general here")
    if out_sharding is not None:
        raise ValueError(f"fp8_dot_general takes no out_sharding, got {out_sharding}; constrain its result instead")
    if 0 in (math.prod(lhs.shape), math.prod(rhs.shape)):
        raise ValueError(f"empty operands have no scale: got {list(lhs.shape)} and {list(rhs.shape)}")


def _move(x: jax.Array, dims: Sequence[int], *, to_end: bool) -> jax.Array:
    """Brings the summed dims to one end, in the order of `dims`."""
    dims = [d % x.ndim for d in dims]
    rest = [d for d in range(x.ndim) if d not in dims]
    order = [*rest, *dims] if to_end else [*dims, *rest]
    return x if order == list(range(x.ndim)) else jnp.transpose(x, order)
