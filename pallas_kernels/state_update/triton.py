"""Triton backend of `update_states`: one kernel, which reads and writes each state once, in place."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.state_update.request import StateUpdateRequest
from pallas_kernels.triton_support import triton_call, unsupported_target

_LEAST_CAPABILITY = (8, 0)
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_BLOCK = 4096
"""Numbers of a state that a program holds: 32 in each of its 128 threads."""


@dataclasses.dataclass(frozen=True)
class StateUpdatePlan:
    """Compile-time constants of the Triton kernel.

    Attributes:
        slots, heads, key_heads, key_width, value_width: S, N, K, D and V.
        key_stride, value_stride: distance between two key channels, and two value channels, of a state.
        block_values: value channels of one program, a power of two.
        channels: decays are those of key channels.
        corrects: the state is corrected by the difference, see `update_states`.
    """

    slots: int
    heads: int
    key_heads: int
    key_width: int
    value_width: int
    key_stride: int
    value_stride: int
    block_values: int
    channels: bool
    corrects: bool

    @property
    def padded_keys(self) -> int:
        """Key width, rounded up to a power of two."""
        return 1 << (self.key_width - 1).bit_length()


def unsupported_reason(request: StateUpdateRequest) -> str | None:
    """Return the first reason why the Triton kernel cannot compute this call, or None if it can."""
    if reason := unsupported_target(request.target, _LEAST_CAPABILITY):
        return reason
    if request.states.dtype != jnp.float32:
        return f"needs states in float32; got {request.states.dtype}"
    for name, array in (("q", request.q), ("k", request.k), ("v", request.v)):
        if array.dtype not in _DTYPES:
            return f"needs {name} in bfloat16, float16 or float32; got {array.dtype}"
    return None


def make_plan(request: StateUpdateRequest) -> StateUpdatePlan:
    """Choose the compile-time constants of the kernel for a call."""
    keys = request.q.shape[2]
    heads, values = request.v.shape[1:]
    plan = StateUpdatePlan(
        request.states.shape[0],
        heads,
        request.q.shape[1],
        keys,
        values,
        *((values, 1) if request.key_axis == 2 else (1, keys)),
        block_values=1,
        channels=request.log_decay.ndim == 3,
        corrects=request.beta is not None,
    )
    widest = 1 << (values - 1).bit_length()
    return dataclasses.replace(plan, block_values=max(1, min(widest, _BLOCK // plan.padded_keys)))


def update(request: StateUpdateRequest) -> tuple[jax.Array, jax.Array]:
    """Compute `update_states` with the Triton kernel: outputs [R, N, V], and the states."""
    from pallas_kernels.state_update.triton_kernel import update_kernel

    plan = make_plan(request)
    major, minor = request.target.compute_capability or (0, 0)
    # XLA must not merge the call with slices of stacked states: it would forget that a result is an operand.
    states = jax.lax.optimization_barrier(request.states)
    results = triton_call(
        request.q,
        request.k,
        request.v,
        request.log_decay,
        request.log_decay if request.beta is None else request.beta,
        jnp.where(request.begins, -1 - request.slots, request.slots).astype(jnp.int32),
        states,
        kernel=update_kernel,
        out_shape=(
            jax.ShapeDtypeStruct(request.v.shape, request.v.dtype),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ),
        input_output_aliases={6: 1},
        grid=(request.v.shape[0], plan.heads, -(-plan.value_width // plan.block_values)),
        name="update_states",
        num_warps=4,
        num_stages=1,
        compute_capability=10 * major + minor,
        plan=plan,
    )
    return jax.lax.optimization_barrier(tuple(results))
