"""The state space layer in Hopper kernels, with its gradients.

The forward is one kernel, a program for each head, or several where heads are few. The backward is two: one computes
the states before all chunks once more, and the gradients of the states after them, one chunk after the other; then the
other one computes all other gradients, of all chunks at once. Nothing but the inputs is saved for it.

Dims: those of `pallas_kernels.ssd.request`; the kernels see heads of 64 channels, of which wider heads have several.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.hopper.replay import count_programs
from pallas_kernels.hopper.target import unsupported_target
from pallas_kernels.hopper.wgmma import TILE_ROWS
from pallas_kernels.ssd.mosaic_forward import forward
from pallas_kernels.ssd.mosaic_gradients import GradientInputs, gradients
from pallas_kernels.ssd.mosaic_parts import CHANNELS, CHUNK, Sequences, SsdPlan, make_factors
from pallas_kernels.ssd.mosaic_states import StateInputs, chunk_states
from pallas_kernels.ssd.request import SsdRequest

# Tests set this to run the kernels on a CPU.
INTERPRET = False
_WIDTHS = (64, 128)
"""State widths."""
_FORWARD_STAGES = 4
_STATE_STAGES = 4
_GRADIENT_STAGES = 3
"""Chunks, or heads, in flight from global memory."""
_FEWEST_PROGRAMS = 396
"""Programs of the kernel of the gradients: three for each multiprocessor."""


def unsupported_reason(request: SsdRequest) -> str | None:
    """Return the first reason why the Hopper kernels cannot compute this call, or None if they can."""
    reason = unsupported_target(request.target, INTERPRET)
    if reason is not None:
        return reason
    if request.x.dtype != jnp.bfloat16:
        return f"takes bfloat16, got {request.x.dtype}"
    channels, width = request.x.shape[3], request.b.shape[3]
    if channels % CHANNELS or width not in _WIDTHS:
        return f"P must be a multiple of {CHANNELS} and S one of {_WIDTHS}, got {channels} and {width}"
    if request.chunk not in (None, CHUNK):
        return f"has chunks of {CHUNK} tokens, got {request.chunk}; leave the choice to the backend with chunk=None"
    return None


def compute(request: SsdRequest) -> tuple[Float[Array, "B T N P"], Float[Array, "B N P S"]]:
    """Return the outputs [B, T, N, P] in the dtype of x, and the state after the last token, float32 [B, N, P, S]."""
    x, state = request.x, request.state
    factors, documents = make_factors(request.dt, request.decay, request.documents)
    share = x.shape[3] // CHANNELS
    heads = x.shape[2] * share
    tokens = _for_tma(x.reshape(*x.shape[:2], heads, CHANNELS))
    factors = jnp.repeat(factors, share, axis=1)
    inputs = Sequences(tokens, _for_tma(request.b), _for_tma(request.c), factors, documents)
    programs = count_programs(x.shape[0] * heads, factors.shape[2])
    plan = SsdPlan(1, _FORWARD_STAGES, programs, INTERPRET)
    y, last = _run_kernels(plan, inputs, state.reshape(state.shape[0], heads, CHANNELS, -1))
    return y[:, : x.shape[1]].reshape(x.shape), last.reshape(state.shape)


@functools.partial(jax.jit, static_argnums=0)  # Equal calls, one a layer, are traced and lowered once.
def _forward(plan: SsdPlan, inputs: Sequences, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    return forward(plan, inputs, state)


def _forward_rule(plan: SsdPlan, inputs: Sequences, state: jax.Array) -> tuple:
    return _forward(plan, inputs, state), (inputs, state)


@functools.partial(jax.jit, static_argnums=0)
def _backward_rule(forward_plan: SsdPlan, saved: tuple[Sequences, jax.Array], cotangents: tuple) -> tuple:
    inputs, state = saved
    interpret = forward_plan.interpret
    d_y, d_last = cotangents
    d_y = d_y.astype(inputs.x.dtype)
    plan = SsdPlan(1, _STATE_STAGES, interpret=interpret)
    states, d_states, d_state = chunk_states(plan, StateInputs(inputs, d_y, state, d_last))
    plan = SsdPlan(2, _GRADIENT_STAGES, interpret=interpret)
    found = gradients(plan, GradientInputs(inputs, d_y, states, d_states), _head_parts(inputs))
    length = inputs.b.shape[1]
    d_b, d_c = (z.sum(axis=0)[:, :length].astype(inputs.b.dtype) for z in (found.b, found.c))
    return Sequences(found.x, d_b, d_c, found.factors, None), d_state


def _head_parts(inputs: Sequences) -> int:
    """Return among how many programs the heads of a group are divided, so that the programs fill a GPU."""
    batch, _, heads, _ = inputs.x.shape
    groups = inputs.b.shape[2]
    programs = batch * groups * inputs.factors.shape[2]
    share = heads // groups
    counts = [count for count in range(1, share + 1) if share % count == 0]
    return next((count for count in counts if programs * count >= _FEWEST_PROGRAMS), share)


_run_kernels = jax.custom_vjp(_forward, nondiff_argnums=(0,))
_run_kernels.defvjp(_forward_rule, _backward_rule)


def _for_tma(x: jax.Array) -> jax.Array:
    """Pad the length to at least one chunk, the least that TMA copies, and to a multiple of `TILE_ROWS`.

    Beyond the end of an array TMA reads zeros, so whole chunks are not needed.
    """
    length = max(-(-x.shape[1] // TILE_ROWS) * TILE_ROWS, CHUNK)
    missing = length - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2))) if missing else x
