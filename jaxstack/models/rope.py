"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its scalings for longer contexts.

Element i of the first half of the rotated channels is paired with element i of the second half, as in Llama's Hugging
Face layout.
"""

import math
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from pydantic import Field, model_validator

from jaxstack.config.base import Component
from jaxstack.models.layer import Angles

_POSITIONS_PER_RUN = 1024

REQUIRED: Any = object()
"""Stands in `SCALINGS` for the default of a key that must be given."""
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": REQUIRED},
    "llama3": {
        "factor": REQUIRED,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "factor": REQUIRED,
        "original_max_position_embeddings": REQUIRED,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
    },
    "longrope": {
        "factor": REQUIRED,
        "original_max_position_embeddings": REQUIRED,
        "short_factor": REQUIRED,
        "long_factor": REQUIRED,
        "attention_factor": None,
    },
    "proportional": {"factor": 1.0, "partial_rotary_factor": 1.0},
}
"""The keys of each `rope_type` with their defaults."""


class RopeScaling(Component):
    """Configuration of RoPE scaling, for contexts longer than the one that the model was trained on.

    Each `rope_type` has its own keys, and refuses those of the others. A key that is left out gets the type's default.
    """

    rope_type: Literal["linear", "llama3", "yarn", "longrope", "proportional"]
    """`linear`: divide all frequencies by `factor`; `llama3`: depending on their wavelength, as in Llama 3.1; `yarn`:
    depending on their number of turns over the original context (Peng et al. 2023, arXiv:2309.00071); `longrope`: by a
    list of divisors (Ding et al. 2024, arXiv:2402.13753); `proportional`: all by `factor`, and only the fastest pairs
    of channels rotate (Gemma 4)."""
    factor: float = Field(gt=0)
    """Ratio of the new context to the original one. `proportional`: left out, 1."""
    original_max_position_embeddings: int | None = Field(default=None, ge=2)
    """Context of the original training, in tokens. `llama3`: left out, 8192."""
    low_freq_factor: float | None = None
    """Number of turns over the original context below which `llama3` divides a frequency by `factor`; left out: 1."""
    high_freq_factor: float | None = None
    """Number of turns over the original context above which `llama3` leaves a frequency unchanged; left out: 4."""
    beta_fast: float | None = Field(default=None, gt=0)
    """Number of turns over the original context above which `yarn` leaves a frequency unchanged; left out: 32."""
    beta_slow: float | None = Field(default=None, gt=0)
    """Number of turns over the original context below which `yarn` divides a frequency by `factor`; left out: 1."""
    truncate: bool | None = None
    """`yarn`: round the ends of the ramp between these two to whole pairs of channels; left out: true."""
    attention_factor: float | None = Field(default=None, gt=0)
    """Factor of the cosines and sines, and so of both queries and keys. `yarn`: left out, g(mscale) / g(mscale_all_dim)
    if both are given, or else g(1), with g(m) = 0.1 m ln(factor) + 1. `longrope`: left out, sqrt(1 + ln(factor) /
    ln(original_max_position_embeddings)), or 1 if factor is below 1."""
    mscale: float | None = Field(default=None, ge=0)
    """See `attention_factor`; 0 is the same as left out."""
    mscale_all_dim: float | None = Field(default=None, ge=0)
    """See `attention_factor`; 0 is the same as left out."""
    partial_rotary_factor: float | None = Field(default=None, gt=0, le=1)
    """Share of the pairs of channels that `proportional` rotates, those of the highest frequencies; left out: 1. Unlike
    the model's key of this name it changes neither the frequencies nor which channels are a pair."""
    short_factor: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    """Divisors of the frequencies, one for each pair of channels that rotates, which `longrope` uses for a model whose
    `max_position_embeddings` is at most `original_max_position_embeddings`."""
    long_factor: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    """Divisors that `longrope` uses for a model whose `max_position_embeddings` is larger. The lengths of the sequences
    do not matter: keys in a cache were rotated by one of the lists, and would be wrong once a sequence grows past the
    border between the two. For short sequences set the model's `max_position_embeddings` to the original length."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        kind = values.get("rope_type") if isinstance(values, dict) else None
        if not isinstance(kind, str) or kind not in SCALINGS:
            return values  # the field's type names the problem
        known = SCALINGS[kind]
        # The fields are strict, and take no lists once the values are Python's.
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if v is not None}
        foreign = [key for key in given if key in cls.model_fields and key not in ("rope_type", *known)]
        if foreign:
            raise ValueError(
                f"rope_type {kind} has the keys {', '.join(known)}; remove {', '.join(foreign)}, or set it to null."
            )
        return {key: default for key, default in known.items() if default is not REQUIRED} | given

    @model_validator(mode="after")
    def _check(self) -> "RopeScaling":
        missing = [key for key, default in SCALINGS[self.rope_type].items() if default is REQUIRED]
        missing = [key for key in missing if getattr(self, key) is None]
        if missing:
            raise ValueError(f"rope_type {self.rope_type} needs {', '.join(missing)}.")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            least = getattr(self, low)
            most = getattr(self, high)
            if least is not None and least > most:
                raise ValueError(f"{low} ({least}) must be at most {high} ({most}).")
        return self

    @property
    def angle_factor(self) -> float:
        """Factor of the cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "longrope":
            assert self.original_max_position_embeddings is not None
            growth_of_context = math.log(self.factor) / math.log(self.original_max_position_embeddings)
            return math.sqrt(1 + max(growth_of_context, 0))
        if self.rope_type != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def score_factor(self) -> float:
        """Factor of the scores of latent attention, only a part of whose channels are rotated (DeepSeek-V2)."""
        return self._growth(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _growth(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1 if self.factor > 1 else 1.0


class Rotation(NamedTuple):
    """Rotary positions of the queries and keys of some layers."""

    width: int
    """Number of channels of a head that rotate, the first ones."""
    theta: float
    """Base of the frequencies."""
    scaling: RopeScaling | None = None
    """Scaling of the frequencies."""
    length: int | None = None
    """Longest sequence in tokens, by which `longrope` chooses its divisors."""

    def frequencies(self) -> Float[np.ndarray, " pairs"]:
        """Compute the rotation frequency, in radians per position, of each pair of channels."""
        return rope_frequencies(*self)

    @property
    def factor(self) -> float:
        """Factor of the cosines and sines."""
        return 1.0 if self.scaling is None else self.scaling.angle_factor


def rope_frequencies(
    width: int, theta: float, scaling: RopeScaling | None = None, length: int | None = None
) -> Float[np.ndarray, " pairs"]:
    """Compute the rotation frequency, in radians per position, of each of the width / 2 channel pairs.

    See `Rotation` for the arguments.
    """
    frequencies = theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type == "proportional":
        rotating = int((scaling.partial_rotary_factor or 1) * width // 2)
        return np.where(np.arange(width // 2) < rotating, frequencies / scaling.factor, 0.0)
    original = scaling.original_max_position_embeddings
    assert original is not None
    if scaling.rope_type == "yarn":
        ramp = _yarn_ramp(width, theta, original, scaling)
        return frequencies * ((1 - ramp) + ramp / scaling.factor)
    if scaling.rope_type == "longrope":
        assert length is not None
        return frequencies / np.asarray(scaling.long_factor if length > original else scaling.short_factor)
    # Llama 3.1: long wavelengths are stretched by `factor`, short ones are unchanged, with a linear ramp in between.
    assert scaling.low_freq_factor is not None and scaling.high_freq_factor is not None
    turns = original * frequencies / (2 * math.pi)
    # Llama 4 Scout has the same number for both, and no ramp.
    ramp = max(scaling.high_freq_factor - scaling.low_freq_factor, 1e-9)
    unscaled = np.clip((turns - scaling.low_freq_factor) / ramp, 0.0, 1.0)
    return frequencies * (unscaled + (1 - unscaled) / scaling.factor)


def _yarn_ramp(width: int, theta: float, original: int, scaling: RopeScaling) -> Float[np.ndarray, " pairs"]:
    """Compute the share by which YaRN divides each frequency by the factor: from 0 for fast pairs to 1 for slow ones.

    The ramp is linear in the number of the pair, between the pairs that make `beta_fast` and `beta_slow` turns over the
    original context.
    """
    assert scaling.beta_fast is not None and scaling.beta_slow is not None

    def pair(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair(scaling.beta_fast)
    high = pair(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, width - 1)  # the last channel, not the last pair, as in the reference code
    return np.clip((np.arange(width // 2) - low) / max(high - low, 0.001), 0.0, 1.0)


def rope_cos_sin(
    positions: Int[Array, "*B T"], frequencies: Float[np.ndarray, " pairs"], factor: float = 1.0
) -> Angles:
    """Compute the cosines and sines of the rotations at the given positions, multiplied by `factor`, in float32.

    In float32 the product of a position of a million and a frequency is off by 0.03 radians. So positions are split
    into runs of 1024, and the whole turns of a run are removed beforehand, in float64.
    """
    runs, offsets = (x[..., None].astype(jnp.float32) for x in jnp.divmod(positions, _POSITIONS_PER_RUN))
    run_angles = np.mod(frequencies * _POSITIONS_PER_RUN, 2 * math.pi)
    angles = runs * jnp.asarray(run_angles, jnp.float32) + offsets * jnp.asarray(frequencies, jnp.float32)
    cos = jnp.cos(angles)[..., None, :]
    sin = jnp.sin(angles)[..., None, :]
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def apply_rope(x: Float[Array, "B T N H"], angles: Angles) -> Float[Array, "B T N H"]:
    """Apply rotary embedding to queries or keys x, computed in float32; the result has the dtype of x.

    With angles of fewer than H / 2 pairs the first channels of a head rotate, and the others stay as they are.
    """
    cos, sin = angles
    width = 2 * cos.shape[-1]
    first, second = jnp.split(x[..., :width].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), -1).astype(x.dtype)
    return rotated if width == x.shape[-1] else jnp.concatenate((rotated, x[..., width:]), -1)
