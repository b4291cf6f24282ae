"""State of delayed FP8 scaling: recent maxima of input, weight and gradient (Micikevicius et al., arXiv:2209.05433).

The state is a differentiable argument whose gradient is defined as this step's amax, in the newest place, followed by
zeros. In this way it leaves `jax.grad` through scans, rematerialisation and accumulation. Combine the gradients of
several microbatches or devices by their maximum; `updated_fp8_state` then computes the next step's state.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

ROLES = ("input", "weight", "gradient")
_FIRST_AMAX = (16.0, 1.0, 1.0)
"""Amax assumed in the first step: powers of two above typical normalised inputs, weights and gradients."""


def empty_fp8_state(history: int = 16) -> Float32[Array, "3 {history}"]:
    """Return the initial state of delayed scaling: zeros, float32 [3, history], for the maxima of the last steps.

    Rows are as in `ROLES`; the newest step is first, and 0 marks a step that has not run yet.

    Args:
        history: number of steps whose magnitudes are kept.

    Raises:
        ValueError: `history` is less than 1.
    """
    if history < 1:
        raise ValueError(f"history must be at least 1 step; got {history}")
    return jnp.zeros((len(ROLES), history), jnp.float32)


def updated_fp8_state(
    state: Float32[Array, "*layers 3 history"], gradient: Float32[Array, "*layers 3 history"]
) -> Float32[Array, "*layers 3 history"]:
    """Return the next delayed-scaling state: this step's maxima (0 if not finite) in column 0, older ones shifted.

    Its shape is [..., 3, history].

    Args:
        state: the state that the step used.
        gradient: the gradient with respect to it, combined over microbatches and devices by their maximum.
    """
    newest = jnp.where(jnp.isfinite(gradient[..., :1]), gradient[..., :1], 0.0)
    return jnp.concatenate([newest, state[..., :-1]], axis=-1)


class AmaxHistory(NamedTuple):
    """Largest magnitudes (amax) of an input, weight or gradient in the last steps, which set its next scale."""

    state: jax.Array
    """State [3, history]."""
    role: int
    """Row of the state: index into `ROLES`."""

    @property
    def default_amax(self) -> float:
        """Largest magnitude that is assumed while the history is empty."""
        return _FIRST_AMAX[self.role]

    @property
    def amax(self) -> jax.Array:
        """Largest magnitude in the history (a scalar array), or the default if it is empty; it determines the scale."""
        largest = jnp.max(self.state[self.role])
        return jnp.where(largest > 0, largest, self.default_amax)


def state_gradient(
    state: Float32[Array, "3 history"], maxima: Sequence[Float[Array, "..."]]
) -> Float32[Array, "3 history"]:
    """Return a delayed-scaling state's gradient, defined as this step's maxima in column 0 and zeros elsewhere."""
    return jnp.zeros_like(state).at[:, 0].set(jnp.stack([x.max() for x in maxima]))
