"""The state space layer in Hopper kernels: one for the forward, and the backward by XLA.

Dims: those of `pallas_kernels.ssd.request`; the kernels see heads of 64 channels, of which wider heads have several.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.hopper.target import unsupported_target
from pallas_kernels.hopper.wgmma import TILE_ROWS
from pallas_kernels.ssd import xla
from pallas_kernels.ssd.mosaic_forward import forward
from pallas_kernels.ssd.mosaic_parts import CHANNELS, CHUNK, Sequences, SsdPlan, make_factors
from pallas_kernels.ssd.request import SsdRequest

# Tests set this to run the kernels on a CPU.
INTERPRET = False
_WIDTHS = (64, 128)
"""State widths."""
_STAGES = 3


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
    return _run(request, request.x, request.dt, request.decay, request.b, request.c, request.state)


def _run(request: SsdRequest, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, dt, decay, b, c, state = arrays
    factors, documents = make_factors(dt, decay, request.documents)
    share = x.shape[3] // CHANNELS
    heads = x.shape[2] * share
    x_parts = _for_tma(x.reshape(*x.shape[:2], heads, CHANNELS))
    factors = jnp.repeat(factors, share, axis=1)
    inputs = Sequences(x_parts, _for_tma(b), _for_tma(c), factors, documents)
    plan = SsdPlan(1, _STAGES, INTERPRET)
    y, last = forward(plan, inputs, state.reshape(state.shape[0], heads, CHANNELS, -1))
    return y[:, : x.shape[1]].reshape(x.shape), last.reshape(state.shape)


def _for_tma(x: jax.Array) -> jax.Array:
    """Pad the length to at least one chunk, the least that TMA copies, and to a multiple of `TILE_ROWS`.

    Beyond the end of an array TMA reads zeros, so whole chunks are not needed.
    """
    length = max(-(-x.shape[1] // TILE_ROWS) * TILE_ROWS, CHUNK)
    missing = length - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2))) if missing else x
