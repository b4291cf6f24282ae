"""Checked arguments of a call of `update_states`.

Dims: R rows, S slots, K key heads, N value heads, D key width, V value width.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import AnyArray
from pallas_kernels.target import Target, current_target


@dataclass(frozen=True)
class StateUpdateRequest:
    """Checked arguments of one call of `update_states`, arrays or shape structs, as its arguments are described there.

    Attributes:
        key_axis: dim of `states` that has the key channels, 2 or 3.
        target: the device that the call is lowered for.
    """

    states: jax.Array
    slots: jax.Array
    begins: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array | None
    key_axis: int
    target: Target

    def __str__(self) -> str:
        return f"states {list(self.states.shape)} q {list(self.q.shape)} v {list(self.v.shape)} on {self.target}"


def make_request(
    states: AnyArray,
    slots: AnyArray,
    begins: AnyArray,
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    log_decay: AnyArray,
    beta: AnyArray | None,
    *,
    key_axis: int,
) -> StateUpdateRequest:
    """Check the arguments of a call of `update_states`, and return them in one object.

    Raises:
        ValueError: an argument breaks a rule; the message gives the rule and the values.
    """
    states, slots, begins, q, k, v, log_decay = map(jnp.asarray, (states, slots, begins, q, k, v, log_decay))
    if not (q.ndim == v.ndim == 3 and states.ndim == 4 and key_axis in (2, 3)):
        raise ValueError(
            f"q, k and v must have three dims, states four, and key_axis be 2 or 3; got q {list(q.shape)}, "
            f"v {list(v.shape)}, states {list(states.shape)}, key_axis {key_axis}"
        )
    rows, heads, values = v.shape
    widths = (q.shape[2], values) if key_axis == 2 else (values, q.shape[2])
    rules = {
        "q and k must have one shape": q.shape == k.shape,
        "q and v must have the same rows, and their heads be multiples": q.shape[0] == rows and not heads % q.shape[1],
        "states must be [slots, value heads, key width, value width], or the last two the other way round for "
        "key_axis=3": states.shape[1:] == (heads, *widths),
        "slots and begins must have an entry for each row": slots.shape == begins.shape == (rows,),
        "log_decay must have a number for each value head, or for each of its key channels": log_decay.shape
        in ((rows, heads), (rows, heads, q.shape[2])),
        "beta must have a number for each value head": beta is None or jnp.shape(beta) == (rows, heads),
    }
    for rule, kept in rules.items():
        if not kept:
            raise ValueError(
                f"{rule}; got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}, states {list(states.shape)}, "
                f"slots {list(slots.shape)}, log_decay {list(log_decay.shape)}"
            )
    decays = log_decay.astype(states.dtype)
    shares = None if beta is None else jnp.asarray(beta, states.dtype)
    return StateUpdateRequest(states, slots, begins, q, k, v, decays, shares, key_axis, current_target())
