"""The state of delayed scaling: the largest magnitudes of the last steps (Micikevicius et al., arXiv:2209.05433).

It travels as a differentiable argument: the gradient of a call with respect to its state is this step's amax (in the
newest place, zeros behind it). So it comes out of `jax.grad` through scans, rematerialisation and accumulation; from
several microbatches or devices the maximum is to be taken, and `updated_fp8_state` then makes the next step's state.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

ROLES = ("input", "weight", "gradient")
_FIRST_AMAX = (16.0, 1.0, 1.0)
"""Assumed in the first step: powers of two above what normalised inputs, weights and gradients have."""


def empty_fp8_state(history: int = 16) -> jax.Array:
    """A fresh state, float32 [3, history]: rows as `ROLES`, newest first, 0 where nothing was seen yet.

    Raises:
        ValueError: `history` is less than 1.
    """
    if history < 1:
        raise ValueError(f"history must be at least 1 step; got {history}")
    return jnp.zeros((len(ROLES), history), jnp.float32)


def updated_fp8_state(state: jax.Array, gradient: jax.Array) -> jax.Array:
    """The state after a step: [..., 3, history] with the newest maxima in front; those that are not finite count as 0.

    Args:
        state: the state that the step ran with.
        gradient: the gradient with respect to it, combined over microbatches and devices by maximum.
    """
    newest = jnp.where(jnp.isfinite(gradient[..., :1]), gradient[..., :1], 0.0)
    return jnp.concatenate([newest, state[..., :-1]], axis=-1)


class AmaxHistory(NamedTuple):
    """The magnitudes that one role's next tensor is scaled for."""

    state: jax.Array
    """[3, history]"""
    role: int

    @property
    def default_amax(self) -> float:
        """Taken where nothing was seen yet."""
        return _FIRST_AMAX[self.role]

    @property
    def amax(self) -> jax.Array:
        """The largest [], of which the scale is made."""
        largest = jnp.max(self.state[self.role])
        return jnp.where(largest > 0, largest, self.default_amax)


def state_gradient(state: jax.Array, maxima: Sequence[jax.Array]) -> jax.Array:
    """What stands for the gradient of `state`: the largest of each role's `maxima` [...] in the newest place."""
    return jnp.zeros_like(state).at[:, 0].set(jnp.stack([x.max() for x in maxima]))
