"""The state space layer as its recurrence: the definition, and one step of decoding.

Dims: R = N // G heads of a group; all else as in `pallas_kernels.ssd.request`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.ssd.request import SsdRequest


def lower_priority_reason(request: SsdRequest) -> str | None:
    """Return why the recurrence is not the first choice: it is serial, and reads the state at each token."""
    tokens = request.x.shape[1]
    return None if tokens == 1 else f"takes one token after the other ({tokens}), chunks take many at once"


def compute(request: SsdRequest) -> tuple[Float[Array, "B T N P"], Float[Array, "B N P S"]]:
    """Return h_t C_t [B, T, N, P] for h_t = exp(dt_t a) h_(t-1) + dt_t x_t B_t^T, and the last h [B, N, P, S]."""
    wide = request.dt.dtype
    keep = jnp.exp(request.decay)
    if request.documents is not None:
        begins = request.documents[:, 1:] != request.documents[:, :-1]
        keep = jnp.where(jnp.pad(begins, ((0, 0), (1, 0)))[..., None], 0, keep)
    batch, length, groups, width = request.b.shape
    heads, channels = request.x.shape[2:]
    by_group = (batch, groups, heads // groups, channels, width)

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        keep, x, b, c = token
        keep, x = (z.reshape(*by_group[:3], *z.shape[2:]) for z in (keep, x))
        state = state * keep[..., None, None] + x[..., None] * b[:, :, None, None]
        return state, (state * c[:, :, None, None]).sum(-1)

    tokens = (keep, request.x.astype(wide) * request.dt[..., None], request.b.astype(wide), request.c.astype(wide))
    start = request.state.reshape(by_group)
    if length == 1:
        last, y = step(start, tuple(z[:, 0] for z in tokens))
        y = y[:, None]
    else:
        last, y = jax.lax.scan(step, start, tuple(jnp.moveaxis(z, 1, 0) for z in tokens))
        y = jnp.moveaxis(y, 0, 1)
    return y.reshape(request.x.shape).astype(request.x.dtype), last.reshape(request.state.shape)
