"""`float8_mlp`: a SwiGLU MLP of FP8 weights (W8A8) that computes and rounds its hidden values in one pass.

Between the two products a token's hidden values are scaled, gated, and rounded to FP8 with a scale from the largest of
them. XLA needs three passes over them, and stores them in the dtype of the activations between these.
"""

import dataclasses
import functools
import math
from typing import TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.array_types import AnyArray
from pallas_kernels.dispatch import Backend, select
from pallas_kernels.pointwise.gated import swiglu
from pallas_kernels.target import Target, current_target
from pallas_kernels.triton_support import triton_call, unsupported_target
from pallas_kernels.weight_only.api import packed_matmul
from pallas_kernels.weight_only.float8_products import MOST_EXACT_ROWS, quantize_tokens, scale_sums, sum_products
from pallas_kernels.weight_only.formats import RoundedInputFloat8Format
from pallas_kernels.weight_only.packed import PackedWeight, is_packed

_LEAST_CAPABILITY = (8, 9)
"""Compute capability of the oldest GPUs that have instructions for FP8."""
_DTYPES = (jnp.bfloat16, jnp.float32)
_MOST_HIDDEN = 32768
"""Largest number of hidden values that a program of the kernel keeps in registers."""
_VALUES_OF_A_WARP = 1024
"""Hidden values of a warp, 32 for each thread, up to 16 warps: with twice as many a thread needs 100 registers."""


@dataclasses.dataclass(frozen=True)
class Float8MlpRequest:
    """Checked arguments of a call of `float8_mlp`.

    Attributes:
        x: inputs [rows, in].
        gate_up: matrix [2 * hidden, in], the gate's outputs first.
        down: matrix [out, hidden].
        target: the device that the call is lowered for.
    """

    x: jax.Array
    gate_up: PackedWeight
    down: PackedWeight
    target: Target

    def __str__(self) -> str:
        return f"x {list(self.x.shape)} {self.x.dtype.name} hidden {math.prod(self.down.inputs)} on {self.target}"


@dataclasses.dataclass(frozen=True)
class SwigluPlan:
    """Compile-time constants of the Triton kernel that gates and rounds the hidden values of a token.

    Attributes:
        width: hidden values of a token.
        largest: largest magnitude of a rounded value.
    """

    width: int
    largest: float = float(jnp.finfo(jnp.float8_e4m3fn).max)

    @property
    def padded(self) -> int:
        """`width` rounded up to a power of two."""
        return 1 << (self.width - 1).bit_length()

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return min(16, max(4, self.padded // _VALUES_OF_A_WARP))


def _unsupported_reason(request: Float8MlpRequest) -> str | None:
    """Return the first reason why the kernel cannot compute this call, or None if it can."""
    if reason := unsupported_target(request.target, _LEAST_CAPABILITY):
        return reason
    if (rows := len(request.x)) <= MOST_EXACT_ROWS:
        return f"inputs of up to {MOST_EXACT_ROWS} rows are not rounded; got {rows}"
    if request.x.dtype not in _DTYPES:
        return f"x must be bfloat16 or float32, got {request.x.dtype}"
    hidden = math.prod(request.down.inputs)
    return f"takes at most {_MOST_HIDDEN} hidden values, got {hidden}" if hidden > _MOST_HIDDEN else None


def round_swiglu(
    sums: Float[Array, "rows both"],
    token_scales: Float[Array, "rows 1"],
    scales: Float[Array, "both 1"],
    target: Target,
) -> tuple[Float[Array, "rows hidden"], Float[Array, "rows 1"]]:
    """Return swiglu(gate, up) rounded to FP8, as `quantize_tokens` rounds it, by the Triton kernel.

    Args:
      sums: sums of products that are still to be scaled, those of the gate first.
      token_scales: their float32 scales by token.
      scales: their scales by output.
      target: the device that the call is lowered for.

    Returns:
      The FP8 numbers, and the float32 scales of the tokens.
    """
    from pallas_kernels.weight_only.triton_swiglu import round_swiglu_kernel

    rows, both = sums.shape
    plan = SwigluPlan(both // 2)
    major, minor = target.compute_capability or (0, 0)
    rounded, hidden_scales = triton_call(
        sums,
        token_scales,
        scales,
        kernel=round_swiglu_kernel,
        out_shape=(
            jax.ShapeDtypeStruct((rows, plan.width), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((rows, 1), jnp.float32),
        ),
        grid=(rows,),
        name="round_swiglu",
        num_warps=plan.warps,
        num_stages=1,
        compute_capability=10 * major + minor,
        plan=plan,
    )
    return rounded, hidden_scales


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _by_kernel(x: jax.Array, gate_up: PackedWeight, down: PackedWeight, target: Target) -> jax.Array:
    first, last = gate_up.arrays, down.arrays
    rounded, token_scales = quantize_tokens(x)
    sums = sum_products(rounded, first["q"], x.dtype)
    rounded, token_scales = round_swiglu(sums, token_scales, first["scales"], target)
    return scale_sums(sum_products(rounded, last["q"], x.dtype), token_scales, last["scales"]).astype(x.dtype)


def _two_products(x: jax.Array, gate_up: PackedWeight, down: PackedWeight) -> jax.Array:
    hidden = swiglu(*jnp.split(packed_matmul(x, gate_up).reshape(len(x), -1), 2, axis=-1))
    return packed_matmul(hidden.reshape(len(x), *down.inputs), down).reshape(len(x), -1)


_by_kernel.defvjp(
    lambda x, gate_up, down, target: (_by_kernel(x, gate_up, down, target), (x, gate_up, down)),
    lambda target, saved, d_y: jax.vjp(_two_products, *saved)[1](d_y),
)

BACKENDS: tuple[Backend[Float8MlpRequest], ...] = (
    Backend(
        "triton",
        "reads the sums of the first product once, and writes the rounded hidden values only",
        _unsupported_reason,
        lambda request: _by_kernel(request.x, request.gate_up, request.down, request.target),
        opaque=True,
    ),
    Backend(
        "xla",
        "every call on every device",
        lambda request: None,
        lambda request: _two_products(request.x, request.gate_up, request.down),
    ),
)


def rounds_to_float8(weight: object) -> TypeGuard[PackedWeight]:
    """Return True if a weight is one matrix packed in FP8 whose inputs are rounded to FP8."""
    return is_packed(weight) and isinstance(weight.format, RoundedInputFloat8Format) and not weight.stack


def float8_mlp(
    x: Float[AnyArray, "*batch in"], gate_up: PackedWeight, down: PackedWeight, *, implementation: str | None = None
) -> Float[Array, "*batch out"]:
    """Compute swiglu(x @ gate, x @ up) @ down with weights in FP8 whose inputs are rounded to FP8 (W8A8).

    Values and gradients are those of two calls of `packed_matmul` with `swiglu` between them, up to rounding.

    Args:
        x: inputs.
        gate_up: the gate's and the up projection's weight as one, `packed.concatenate_outputs` of the two.
        down: weight of the last product.
        implementation: name of a backend in `BACKENDS`; None takes the first that supports the call.

    Returns:
        The MLP's output, in the dtype of x.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    x = jnp.asarray(x)
    if not all(map(rounds_to_float8, (gate_up, down))):
        found = [f"{list(weight.shape)} in {weight.format}" for weight in (gate_up, down)]
        raise ValueError(f"gate_up and down must be single matrices in {RoundedInputFloat8Format()}; got {found}")
    if math.prod(gate_up.outputs) != 2 * math.prod(down.inputs) or x.shape[-1:] != gate_up.inputs:
        raise ValueError(
            f"gate_up must map the last dim of x to twice the inputs of down; got x {list(x.shape)}, "
            f"gate_up {list(gate_up.shape)}, down {list(down.shape)}"
        )
    request = Float8MlpRequest(x.reshape(-1, x.shape[-1]), gate_up, down, current_target())
    y = select("float8_mlp", BACKENDS, implementation, request).call(request)
    return y.reshape(*x.shape[:-1], *down.outputs)
