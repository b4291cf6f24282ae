"""`fp8_dot_general`: a differentiable `dot_general` in FP8 for any layer, with a choice of how operands are scaled."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from pallas_kernels.dispatch import select
from pallas_kernels.fp8.backends import BACKENDS, Fp8Request
from pallas_kernels.fp8.formats import GRADIENT_FORMATS, Quantized
from pallas_kernels.fp8.options import Fp8Options

AmaxState = Float32[Array, "3 history"]
"""State of delayed scaling, from `empty_fp8_state`."""
RECIPES = tuple(BACKENDS)
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class QuantizedWeight(NamedTuple):
    """A weight that the caller has already quantized to FP8, e.g. to all-gather it in FP8.

    Attributes:
        carrier: array that receives the gradient of the weight; its values are not used.
        quantized: the weight in E4M3, scaled as the recipe requires.
    """

    carrier: jax.Array
    quantized: Quantized

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.carrier.shape

    def reshape(self, *shape: int) -> "QuantizedWeight":
        """Return the weight reshaped to `shape`, which must not merge contracted dims with output dims."""
        values, inverse_scale = self.quantized
        return QuantizedWeight(self.carrier.reshape(*shape), Quantized(values.reshape(*shape), inverse_scale))


@dataclasses.dataclass(frozen=True)
class NormalisedInput:
    """Input of an FP8 matmul that is an RMSNorm of x, so that a kernel can fuse the norm with the quantization.

    Attributes:
        carrier: the result of `rms_norm` [..., D]. It receives the gradient, and its values are used if no kernel can
            fuse the norm.
        x: the input of the norm [..., D], not differentiated.
        gain: the norm's weight [D], offset included, not differentiated.
        epsilon: epsilon of the norm.
    """

    carrier: jax.Array
    x: jax.Array
    gain: jax.Array
    epsilon: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the normalised input."""
        return self.carrier.shape

    def reshape(self, *shape: int) -> "NormalisedInput":
        """Return the input reshaped to `shape`, which must keep the last dim: the norm is computed over it."""
        return dataclasses.replace(self, carrier=self.carrier.reshape(*shape), x=self.x.reshape(*shape))


def fp8_dot_general(
    lhs: Float[Array, "..."],
    rhs: Float[Array, "..."],
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: jax.sharding.NamedSharding | jax.sharding.PartitionSpec | None = None,
    *,
    recipe: str = "current",
    gradients: str = "e5m2",
    state: AmaxState | None = None,
    implementation: str | None = None,
) -> Float[Array, "..."]:
    """Compute `jax.lax.dot_general` of an activation and a weight in E4M3 with float32 sums; gradients use FP8 too.

    Linen and NNX layers take it directly: `nnx.Linear(..., dot_general=fp8_dot_general)`. On Hopper GPUs set the
    compiler option `xla_gpu_enable_triton_gemm=False`, otherwise XLA may not use its FP8 matmul.

    Args:
        lhs: the activation, bfloat16 or float32.
        rhs: the weight, of the same dtype or float32. A float32 weight is quantized directly, and its gradient is
            float32.
        dimension_numbers: as in `jax.lax.dot_general`, without batch dims.
        precision: ignored: the formats determine it.
        preferred_element_type: dtype of the result; default: the dtype of `lhs`.
        out_sharding: must be None: constrain the layout around the call.
        recipe: "current": one scale per tensor, from its largest magnitude; "delayed": one scale per tensor, from the
            largest magnitudes of the last steps in `state`; "blockwise": one scale per 128 values of an activation or
            gradient and per 128 x 128 values of a weight (DeepSeek-V3, arXiv:2412.19437).
        gradients: format of the incoming gradient, "e5m2" (more range) or "e4m3" (more precision; always with
            blockwise).
        state: state of delayed scaling [3, history], from `empty_fp8_state`. Its gradient gives the next state
            (`updated_fp8_state`).
        implementation: name of one of the recipe's backends; None takes the first that supports the call.

    Returns:
        The result of `dot_general`: the free dims of lhs, then those of rhs.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
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
    x: Float[Array, "..."] | NormalisedInput,
    weights: Sequence[Float[Array, "..."] | QuantizedWeight],
    *,
    contracted: int = 1,
    output: jax.typing.DTypeLike | None = None,
    recipe: str = "current",
    gradients: str = "e5m2",
    states: Sequence[AmaxState | None] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "..."], ...]:
    """Multiply x [rows, D] with each weight [D, outputs] in FP8, quantizing x once for all weights.

    Args:
        x: the input, or the norm that makes it; `rows` may be several dims.
        weights: the weights, each [D, outputs].
        contracted: number of dims that D represents.
        output: dtype of the results; default: the dtype of x.
        recipe, gradients, implementation: as in `fp8_dot_general`.
        states: one state per weight with delayed scaling.

    Returns:
        One result [rows, outputs] per weight.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    inner = x.shape[len(x.shape) - contracted :]
    if any(w.shape[:contracted] != inner for w in weights):
        raise ValueError(f"summed dims differ: x has {inner}, the weights {[w.shape[:contracted] for w in weights]}")
    return _select_and_call(x, weights, contracted, output, recipe, gradients, states, implementation)


def fp8_swiglu_mlp(
    x: Float[Array, "*rows D"] | NormalisedInput,
    gate: Float[Array, "D F"] | QuantizedWeight,
    up: Float[Array, "D F"] | QuantizedWeight,
    down: Float[Array, "F outputs"] | QuantizedWeight,
    *,
    recipe: str = "current",
    gradients: str = "e5m2",
    states: Sequence[AmaxState | None] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*rows outputs"]:
    """Compute the feed-forward layer swiglu(x @ gate, x @ up) @ down with its three matmuls in FP8.

    SwiGLU and its gradients are quantized where they are computed: they are stored in FP8 only.

    Args:
        x: the input [rows, D], or the norm that makes it; `rows` may be several dims.
        gate, up: weights [D, F].
        down: weight [F, outputs].
        recipe, gradients, implementation: as in `fp8_dot_general`.
        states: the states of gate, up and down with delayed scaling.

    Returns:
        [rows, outputs] in the dtype of x.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    (inner, width), shapes = gate.shape, (gate.shape, up.shape, down.shape)
    if x.shape[-1] != inner or up.shape != gate.shape or len(down.shape) != 2 or down.shape[0] != width:
        raise ValueError(
            f"x [rows, D], gate and up [D, F] and down [F, outputs] belong together; got {x.shape} and "
            f"{', '.join(map(str, shapes))}"
        )
    return _select_and_call(x, (gate, up, down), 1, None, recipe, gradients, states, implementation, mlp=True)[0]


def _select_and_call(
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
    norm_inputs = ()
    epsilon = None
    if isinstance(x, NormalisedInput):
        # The kernels can normalise while they quantize only if the norm's dim is the contracted one.
        fusible = contracted == 1
        norm_inputs = (lax.stop_gradient(x.x), lax.stop_gradient(x.gain).astype(jnp.float32)) if fusible else ()
        x, epsilon = x.carrier, x.epsilon if fusible else None
    states = tuple(states or [None] * len(weights))
    _check_recipe(recipe, gradients, states)
    carriers = tuple(w.carrier if isinstance(w, QuantizedWeight) else w for w in weights)
    quantized = tuple(w.quantized if isinstance(w, QuantizedWeight) else None for w in weights)
    if x.dtype not in (jnp.bfloat16, jnp.float32) or any(w.dtype not in (x.dtype, jnp.float32) for w in carriers):
        shown = ", ".join(str(w.dtype) for w in carriers)
        raise ValueError(
            f"FP8 matmuls take x in bfloat16 or float32, and weights in the dtype of x or in float32; "
            f"got {x.dtype} times {shown}; cast them"
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


def _check(lhs: jax.Array, rhs: jax.Array, batch: Sequence[Sequence[int]], out_sharding: object) -> None:
    if any(batch):
        raise ValueError(f"fp8_dot_general has no batch dims, got {batch}; use jax.vmap, or a plain dot_general here")
    if out_sharding is not None:
        raise ValueError(f"fp8_dot_general takes no out_sharding, got {out_sharding}; constrain its result instead")
    if 0 in (math.prod(lhs.shape), math.prod(rhs.shape)):
        raise ValueError(f"empty operands have no scale: got {list(lhs.shape)} and {list(rhs.shape)}")


def _move(x: jax.Array, dims: Sequence[int], *, to_end: bool) -> jax.Array:
    """Return x transposed so that its contracted dims, `dims`, come last if `to_end`, else first."""
    dims = [d % x.ndim for d in dims]
    others = [d for d in range(x.ndim) if d not in dims]
    order = [*others, *dims] if to_end else [*dims, *others]
    return x if order == list(range(x.ndim)) else jnp.transpose(x, order)
