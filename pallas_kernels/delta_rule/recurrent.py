"""The gated delta rule as its recurrence: the definition, and one step of decoding.

Dims: B batch, T tokens, K key heads, N value heads, D key width, V value width.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.delta_rule.request import DeltaRuleRequest


def lower_priority_reason(request: DeltaRuleRequest) -> str | None:
    """Return why the recurrence is not the first choice: it is serial, and reads the state at each token."""
    tokens = request.v.shape[1]
    return None if tokens == 1 else f"takes one token after the other ({tokens}), chunks take many at once"


def apply(request: DeltaRuleRequest) -> tuple[Float[Array, "B T N V"], Float[Array, "B N D V"]]:
    """Return the outputs [B, T, N, V] in the dtype of v, and the state [B, N, D, V] after the last token."""
    dtype = request.state.dtype
    group = request.v.shape[2] // request.k.shape[2]
    q, k = (jnp.repeat(x.astype(dtype), group, axis=2) for x in (request.q, request.k))
    begins = jnp.zeros(q.shape[:2], bool)
    if request.documents is not None:
        begins = jnp.pad(request.documents[:, 1:] != request.documents[:, :-1], ((0, 0), (1, 0)))
    tokens = (q * request.scale, k, request.v.astype(dtype), request.log_decay, request.beta, begins)
    if q.shape[1] == 1:
        state, out = _step(request.state, tuple(x[:, 0] for x in tokens))
        return out[:, None].astype(request.v.dtype), state
    state, out = jax.lax.scan(_step, request.state, tuple(jnp.moveaxis(x, 1, 0) for x in tokens))
    return jnp.moveaxis(out, 0, 1).astype(request.v.dtype), state


def _step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Add one token of each row to the state; return it, and the token's output [B, N, V].

    Sums over the key width are elementwise products that XLA fuses: each reads the state once.
    """
    q, k, v, log_decay, beta, begins = token
    kept = jnp.exp(log_decay).reshape(*v.shape[:2], -1, 1)
    state = jnp.where(begins[:, None, None, None], 0, state * kept)
    found = (state * k[..., None]).sum(-2)
    state = state + k[..., None] * (beta[..., None] * (v - found))[..., None, :]
    return state, (state * q[..., None]).sum(-2)
