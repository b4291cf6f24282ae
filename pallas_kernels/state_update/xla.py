"""`update_states` in XLA: a gather of the rows' states, a few passes over them, and a scatter."""

import jax
import jax.numpy as jnp

from pallas_kernels.state_update.request import StateUpdateRequest


def update(request: StateUpdateRequest) -> tuple[jax.Array, jax.Array]:
    """Compute `update_states` in XLA: outputs [R, N, V], and the states.

    Sums over the key width are elementwise products that XLA fuses: each reads the state once.
    """
    states = request.states
    group = request.v.shape[1] // request.k.shape[1]
    q, k = (jnp.repeat(x.astype(states.dtype), group, axis=1)[..., None] for x in (request.q, request.k))
    kept = jnp.exp(request.log_decay).reshape(*request.v.shape[:2], -1, 1)
    state = states[jnp.minimum(request.slots, states.shape[0] - 1)]
    state = state if request.key_axis == 2 else jnp.swapaxes(state, 2, 3)
    state = jnp.where(request.begins[:, None, None, None], 0, state) * kept
    new = request.v.astype(states.dtype)
    if request.beta is not None:
        new = request.beta[..., None] * (new - (state * k).sum(-2))
    state = state + k * new[..., None, :]
    out = (state * q).sum(-2).astype(request.v.dtype)
    state = state if request.key_axis == 2 else jnp.swapaxes(state, 2, 3)
    return out, states.at[request.slots].set(state, mode="drop")
