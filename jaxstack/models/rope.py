"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

Element i of the first half of a head is paired with element i of the second, as in Llama's Hugging Face layout.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxstack.models.config import RopeScaling
from jaxstack.models.mixer import Angles

_POSITIONS_PER_RUN = 1024


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Float[np.ndarray, " pairs"]:
    """Compute the rotation frequency, in radians per position, of each of the head_dim / 2 channel pairs."""
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    # Llama 3.1: long wavelengths are stretched by `factor`, short ones are unchanged, with a linear ramp in between.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    unscaled = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    unscaled = np.clip(unscaled, 0.0, 1.0)
    return frequencies * (unscaled + (1 - unscaled) / scaling.factor)


def rope_cos_sin(positions: Int[Array, "*B T"], frequencies: Float[np.ndarray, " pairs"]) -> Angles:
    """Compute the cosines and sines of the rotations at the given positions.

    In float32 the product of a position of a million and a frequency is off by 0.03 radians. So positions are split
    into runs of 1024, and the whole turns of a run are removed beforehand, in float64.
    """
    runs, offsets = (x[..., None].astype(jnp.float32) for x in jnp.divmod(positions, _POSITIONS_PER_RUN))
    run_angles = np.mod(frequencies * _POSITIONS_PER_RUN, 2 * math.pi)
    angles = runs * jnp.asarray(run_angles, jnp.float32) + offsets * jnp.asarray(frequencies, jnp.float32)
    return jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]


def apply_rope(x: Float[Array, "B T N H"], angles: Angles) -> Float[Array, "B T N H"]:
    """Apply rotary embedding to queries or keys x, computed in float32; the result has the dtype of x."""
    cos, sin = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), -1).astype(x.dtype)
