"""Configurations of token mixers with a recurrent state; `jaxstack.models.mixers` computes them.

They are here because `ModelConfig` has a key for each, and the mixers import `ModelConfig`.
"""

import dataclasses
from typing import Annotated, Literal

from pydantic import Field, model_validator

from jaxstack.models.attention.base import AttentionSpec
from jaxstack.models.layer import Mixer
from pallas_kernels.attention.context_layout import chunks_per_device

PARTS_OF_DEVICE = chunks_per_device("zigzag")
"""Parts of a sequence on each device of `context`, an early and a late one."""


@dataclasses.dataclass(frozen=True)
class StateExchange:
    """Sizes of the two ways in which devices that split a sequence compute a recurrent layer together.

    They exchange heads, so that each has whole sequences of some of them (all-to-all); or each tells the others how its
    part of the sequence changes the states of all heads (all-gather of maps of states).

    Attributes:
      token_numbers: how many numbers the inputs and outputs of one token have, of a device's heads.
      state_bytes: bytes of the map of a part of a sequence, of a device's heads.
      recomputes: True if the map costs the recurrence a second time.
    """

    token_numbers: int
    state_bytes: int
    recomputes: bool

    def gathers_states(self, length: int, heads: int, devices: int, itemsize: int) -> bool:
        """Return True if the all-gather sends fewer bytes than the all-to-all, or the devices do not divide the heads.

        Args:
          length: number of tokens of a sequence on a device.
          heads: number of heads of a device.
          devices: number of devices of `context`.
          itemsize: bytes of a number of a token.
        """
        sent = length * self.token_numbers * itemsize / devices
        return heads % devices != 0 or sent > PARTS_OF_DEVICE * self.state_bytes


class Recurrent(Mixer):
    """Base of the mixers with a state, which layers have by their type."""

    num_heads: int = Field(default=8, ge=1, le=2**16)
    """Number of heads, each with a state."""
    conv_kernel: int = Field(default=4, ge=2, le=64)
    """Number of tokens that the convolution in front of the recurrence sees, the token itself included."""

    @property
    def described(self) -> str:
        return f"layer_types {self.title}"

    @property
    def own_heads(self) -> int:
        return self.num_heads

    def context_parallel_problem(self, method: str | None) -> str | None:
        if method != "ring":
            return None
        return f"{self.described} takes parallel.context_method all_gather, all_to_all or auto; found {method}."

    def exchanges_heads(self, method: str | None) -> bool:
        return method == "all_to_all"

    def exchange(self, shards: int = 1) -> StateExchange:
        """Return what the devices of `context` may send for a layer, each with 1 / `shards` of the heads."""
        raise NotImplementedError

    def fits_parts(self, length: int) -> bool:
        """Return True if the parts of `length` tokens of a device are as long as what the convolution sees before."""
        return length // PARTS_OF_DEVICE >= self.conv_kernel - 1


class StateSpace(Recurrent):
    """State space layers (Mamba-2; Dao & Gu 2024, arXiv:2405.21060), which `layer_types` ssd and ssd_only have.

    Each head has a state of head_dim x state_size numbers, which fades by a learned amount with every token.
    """

    name: Literal["ssd"] = "ssd"
    head_dim: int = Field(default=64, ge=1, le=2**16)
    """Number of channels of a head; num_heads x head_dim is 2 x hidden_size in most models."""
    state_size: int = Field(default=128, ge=1, le=2**16)
    """Numbers in the state for each channel."""
    n_groups: int = Field(default=1, ge=1, le=2**16)
    """Number of groups of heads; a group shares what is written to the states and read from them, and a norm."""
    use_conv_bias: bool = True
    """Add a bias in the convolution."""
    use_bias: bool = False
    """Add biases to the input and output projections."""
    time_step_min: float = Field(default=0.001, gt=0)
    """Smallest initial step size dt, by which a state fades and is written to."""
    time_step_max: float = Field(default=0.1, gt=0)
    """Largest initial step size; those of the heads are spread evenly in their logarithm."""
    time_step_limit: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)] | None] = (0.0, None)
    """Step sizes below the first number or above the second are replaced by it; null: there is no such limit."""

    @model_validator(mode="after")
    def _check(self) -> "StateSpace":
        if self.num_heads % self.n_groups:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be divisible by n_groups ({self.n_groups}), the number of groups."
            )
        if self.time_step_min > self.time_step_max:
            raise ValueError(
                f"time_step_min ({self.time_step_min}) must be at most time_step_max ({self.time_step_max}); exchange "
                "them."
            )
        low, high = self.time_step_limit
        if high is not None and low > high:
            raise ValueError(f"time_step_limit must be [smallest, largest]; found [{low}, {high}]; exchange them.")
        return self

    def layer_heads(self, heads: AttentionSpec) -> AttentionSpec:
        return dataclasses.replace(
            heads, num_heads=self.num_heads, num_kv_heads=self.n_groups, head_dim=self.head_dim, window=None
        )

    def exchange(self, shards: int = 1) -> StateExchange:
        heads = self.num_heads // shards
        groups = max(self.n_groups // shards, 1)
        numbers = 2 * groups * self.state_size + heads * (2 * self.head_dim + 1)
        return StateExchange(numbers, 4 * heads * (self.head_dim * self.state_size + 1), recomputes=False)


class GatedDelta(Recurrent):
    """Gated DeltaNet layers (Yang et al., arXiv:2412.06464), which `layer_types` delta has (Qwen3-Next, Qwen 3.5).

    Each head has a state of key_head_dim x head_dim numbers, which fades by a learned amount with every token, and from
    which the token's value is corrected.
    """

    name: Literal["delta"] = "delta"
    head_dim: int = Field(default=128, ge=1, le=2**16)
    """Number of channels of a head of values."""
    num_key_heads: int = Field(default=4, ge=1, le=2**16)
    """Number of heads of queries and keys; each is used by num_heads / num_key_heads heads of values."""
    key_head_dim: int = Field(default=128, ge=1, le=2**16)
    """Number of channels of a head of queries and keys."""
    allow_neg_eigval: bool = False
    """True lets the share of a value that is corrected lie between 0 and 2, not 1: it may overshoot (OLMo Hybrid)."""
    norm_eps: float | None = Field(default=None, gt=0)
    """Epsilon of the norm of a head's output; left out: that of the model's norms."""

    @model_validator(mode="after")
    def _check(self) -> "GatedDelta":
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be divisible by num_key_heads ({self.num_key_heads}), the number "
                "of heads of queries and keys."
            )
        return self

    def layer_heads(self, heads: AttentionSpec) -> AttentionSpec:
        return dataclasses.replace(
            heads,
            num_heads=self.num_heads,
            num_kv_heads=self.num_key_heads,
            head_dim=self.head_dim,
            window=None,
        )

    @property
    def decays(self) -> int:
        """Number of decays of a head: 1, or one for each channel of the keys."""
        return 1

    def exchange(self, shards: int = 1) -> StateExchange:
        heads = self.num_heads // shards
        keys = max(self.num_key_heads // shards, 1) * self.key_head_dim
        numbers = 2 * keys + heads * (2 * self.head_dim + 1 + self.decays)
        state = self.key_head_dim * (self.key_head_dim + self.head_dim)
        return StateExchange(numbers, 4 * heads * state, recomputes=True)


class KimiDelta(GatedDelta):
    """Kimi Delta Attention (Kimi Linear, arXiv:2510.26692), which `layer_types` kda has.

    Gated DeltaNet in which each row of a head's state, a channel of the keys, fades by an amount of its own. These
    amounts and the gate of the output are projected through `head_dim` channels.
    """

    name: Literal["kda"] = "kda"  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def decays(self) -> int:
        return self.key_head_dim
