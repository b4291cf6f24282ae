"""Batch-invariant sums over the last dim of an array: each row's terms are added in an order that depends on no other.

Dims: R rows, D and V their width.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.batch_invariant.mode import is_batch_invariant
from pallas_kernels.dispatch import Backend, select
from pallas_kernels.target import Target, current_target
from pallas_kernels.triton_support import triton_call, unsupported_target

_ELEMENTS = 4096
"""Elements that a program of a kernel reduces at a time."""


def sum_row(x: Float[Array, "*R n"]) -> Float[Array, "*R 1"]:
    """Sum over the last dim, by adding halves to each other; for few elements, as XLA keeps each sum in memory."""
    # Terms that are products must not be fused with the sums: some of them would be multiplied and added at once.
    x = jax.lax.optimization_barrier(x)
    width = 1 << (x.shape[-1] - 1).bit_length()
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x


def row_total(x: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
    """Sum over a small dim, which stays with the size 1; in the context `batch_invariant` by `sum_row`."""
    if not is_batch_invariant():
        return x.sum(axis=axis, keepdims=True)
    return jnp.moveaxis(sum_row(jnp.moveaxis(x, axis, -1)), -1, axis)


def softmax(x: Float[Array, "*R n"]) -> Float[Array, "*R n"]:
    """Return the softmax over the last dim, which is small; in the context `batch_invariant` by `sum_row`."""
    if not is_batch_invariant():
        return jax.nn.softmax(x, axis=-1)
    exponentials = jnp.exp(x - jax.lax.stop_gradient(x.max(axis=-1, keepdims=True)))
    return exponentials / sum_row(exponentials)


@dataclass(frozen=True)
class NormRequest:
    """Arguments of a norm over the last dim: RMSNorm, or LayerNorm if there is a bias.

    Attributes:
        x: [R, D].
        gain, bias: float32 [D].
        epsilon: added to the mean square.
        target: the device that the call is lowered for.
    """

    x: jax.Array
    gain: jax.Array
    bias: jax.Array | None
    epsilon: float
    target: Target

    def __str__(self) -> str:
        return f"{self.x.dtype.name} {list(self.x.shape)} on {self.target}"


@dataclass(frozen=True)
class NormPlan:
    """Compile-time constants of the norm's kernel: rows of a program, of all programs, and the width D."""

    rows: int
    count: int
    width: int
    padded: int
    epsilon: float
    centered: bool


@dataclass(frozen=True)
class SumPlan:
    """Compile-time constants of the kernel of log-sum-exp: width V, and how much of it is read at a time."""

    width: int
    block: int


def normalize(
    x: Float[Array, "*R D"], gain: Float[Array, " D"], bias: Float[Array, " D"] | None, epsilon: float
) -> Float[Array, "*R D"]:
    """Return the RMSNorm of x, or its LayerNorm if there is a bias; computed in float32. It has no gradient of its own.

    Args:
        x: [..., D].
        gain, bias: float32 [D].
        epsilon: added to the mean square.
    """
    request = NormRequest(x.reshape(-1, x.shape[-1]), gain, bias, epsilon, current_target())
    return select("batch_invariant_norm", _NORM_BACKENDS, None, request).call(request).reshape(x.shape)


def log_sum_exp(x: Float[Array, "R V"]) -> Float[Array, " R"]:
    """Return the logarithm of each row's sum of exponentials, for float32 logits. It has no gradient of its own."""
    request = _SumRequest(x, current_target())
    return select("batch_invariant_log_sum_exp", _SUM_BACKENDS, None, request).call(request)


def log_probabilities(logits: Float[Array, "R V"], tokens: Array) -> Float[Array, " R"]:
    """Return the log-probability of a token of each row, from float32 logits. It has no gradient of its own."""
    logits = jax.lax.optimization_barrier(logits)  # XLA fuses what computes them differently with each of its uses
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return chosen - log_sum_exp(logits)


@dataclass(frozen=True)
class _SumRequest:
    x: jax.Array
    target: Target

    def __str__(self) -> str:
        return f"{self.x.dtype.name} {list(self.x.shape)} on {self.target}"


def _normalize_by_xla(request: NormRequest) -> jax.Array:
    wide = request.x.astype(jnp.float32)
    size = wide.shape[-1]
    if request.bias is not None:
        wide = wide - sum_row(wide) / size
    inverse = jax.lax.rsqrt(sum_row(jnp.square(wide)) / size + request.epsilon)
    result = jax.lax.optimization_barrier(wide * inverse * request.gain)
    return (result if request.bias is None else result + request.bias).astype(request.x.dtype)


def _normalize_by_triton(request: NormRequest) -> jax.Array:
    from pallas_kernels.batch_invariant.triton_kernel import norm_kernel

    count, width = request.x.shape
    padded = 1 << (width - 1).bit_length()
    rows = max(1, _ELEMENTS // 2 // padded)
    plan = NormPlan(rows, count, width, padded, request.epsilon, request.bias is not None)
    return triton_call(
        request.x,
        request.gain,
        request.gain if request.bias is None else request.bias,
        kernel=norm_kernel,
        out_shape=jax.ShapeDtypeStruct(request.x.shape, request.x.dtype),
        grid=(-(-count // rows),),
        name="batch_invariant_norm",
        num_warps=4,
        num_stages=1,
        compute_capability=_capability(request.target),
        plan=plan,
    )


def _sum_by_xla(request: _SumRequest) -> jax.Array:
    x = request.x
    highest = x.max(axis=-1, keepdims=True)
    return (highest + jnp.log(sum_row(jnp.exp(x - highest))))[:, 0]


def _sum_by_triton(request: _SumRequest) -> jax.Array:
    from pallas_kernels.batch_invariant.triton_kernel import log_sum_exp_kernel

    count, width = request.x.shape
    return triton_call(
        request.x,
        kernel=log_sum_exp_kernel,
        out_shape=jax.ShapeDtypeStruct((count,), jnp.float32),
        grid=(count,),
        name="batch_invariant_log_sum_exp",
        num_warps=8,
        num_stages=3,
        compute_capability=_capability(request.target),
        plan=SumPlan(width, _ELEMENTS),
    )


def _capability(target: Target) -> int:
    major, minor = target.compute_capability or (0, 0)
    return 10 * major + minor


def _unsupported_by_triton(request: NormRequest | _SumRequest) -> str | None:
    return unsupported_target(request.target, (8, 0))


_NORM_BACKENDS = (
    Backend("triton", "reads every array once", _unsupported_by_triton, _normalize_by_triton, opaque=True),
    Backend("xla", "sums halves, on every device", lambda _: None, _normalize_by_xla),
)
_SUM_BACKENDS = (
    Backend("triton", "reads every array once", _unsupported_by_triton, _sum_by_triton, opaque=True),
    Backend("xla", "sums halves, on every device", lambda _: None, _sum_by_xla),
)
