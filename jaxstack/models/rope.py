"""Rotary position embedding (Su et al. 2021), halves paired as in Llama's Hugging Face layout."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.models.config import RopeScaling


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Radians a position for each of the head_dim / 2 pairs, float64."""
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    # Llama 3.1: wavelengths beyond the original context are stretched by `factor`, short ones kept, a ramp in between.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)


_RUN = 1024


def rope_angles(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), each float32 [..., T, 1, head_dim / 2], of integer positions [..., T] >= 0.

    The product of a position of a million and a frequency is off by 0.03 radians in float32. So whole turns are taken
    off beforehand, in float64, for runs of 1024 positions.
    """
    runs, rest = (x[..., None].astype(jnp.float32) for x in jnp.divmod(positions, _RUN))
    turned = np.mod(frequencies * _RUN, 2 * math.pi)
    angles = runs * jnp.asarray(turned, jnp.float32) + rest * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]


def apply_rope(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates x [B, T, heads, head_dim] in float32; returns x's dtype."""
    cos, sin = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), -1).astype(x.dtype)
