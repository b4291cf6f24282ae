"""Tables of 16 fixed values with a scale for each block of inputs: MXFP4, as in gpt-oss, and NF4, as in QLoRA."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxstack.compress.base import AfterTraining, Format
from jaxstack.compress.formats.integer_grid import group_size_problem
from jaxstack.compress.formats.lookup_table import nearest_centers
from pallas_kernels.weight_only.formats import FP4_VALUES, powers_of_two
from pallas_kernels.weight_only.packed import PackedWeight, pack_lookup

MXFP4_BLOCK = 32
"""Inputs that share a power of two (OCP Microscaling Formats (MX) Specification 1.0, 2023)."""
NF4_BLOCK = 64
"""Inputs that share a scale (section 3 of arXiv:2305.14314)."""
NF4_VALUES = np.array([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
], np.float32)  # fmt: skip
"""Values of NF4: quantiles of the normal distribution, scaled to [-1, 1], with an exact 0 (appendix E of QLoRA)."""
_EMAX = 2
"""Exponent of the largest value of FP4 (E2M1), 6 = 1.5 x 2^2."""
_MIDDLES = (FP4_VALUES[1:8] + FP4_VALUES[:7]) / 2


def fp4_codes(x: Float[Array, "..."]) -> Int[Array, "..."]:
    """Return the code of the FP4 (E2M1) value nearest to each number, ties to the even code; beyond 6 it is 6."""
    above = jnp.abs(x)[..., None]
    odd = np.arange(len(_MIDDLES)) % 2 == 1
    codes = jnp.sum(jnp.where(odd, above >= _MIDDLES, above > _MIDDLES), axis=-1)
    return codes + 8 * (x < 0)


@dataclasses.dataclass(frozen=True)
class Mxfp4Format(Format):
    """FP4 numbers (E2M1) with one power of two for each 32 inputs.

    Attributes:
      fitted: True chooses for each block, of the power of two of the specification and the next larger one, that with
        the smaller squared error.
    """

    fitted: bool

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        del outputs
        return group_size_problem(MXFP4_BLOCK, inputs, "the block of MXFP4")

    def pack(self, w: Float[Array, "out in"]) -> PackedWeight:
        blocks = w.astype(jnp.float32).reshape(w.shape[0], -1, MXFP4_BLOCK)
        _, exponents = jnp.frexp(jnp.max(jnp.abs(blocks), axis=-1))  # the largest magnitude is below 2^exponent
        exponents = jnp.clip(exponents - 1 - _EMAX, -126, 127)
        codes, error = _rounded(blocks, exponents)
        if self.fitted:
            larger = jnp.minimum(exponents + 1, 127)
            other, other_error = _rounded(blocks, larger)
            better = other_error < error
            codes = jnp.where(better[..., None], other, codes)
            exponents = jnp.where(better, larger, exponents)
        table = jnp.asarray(FP4_VALUES)[None]
        return pack_lookup(4, codes.reshape(w.shape), table, exponents=exponents)


def _rounded(
    blocks: Float[Array, "out blocks size"], exponents: Int[Array, "out blocks"]
) -> tuple[Int[Array, "out blocks size"], Float[Array, "out blocks"]]:
    """Return the FP4 codes of blocks with given exponents, and the squared error of each block."""
    scales = powers_of_two(exponents)[..., None]
    codes = fp4_codes(blocks / scales)
    return codes, jnp.sum(jnp.square(jnp.asarray(FP4_VALUES)[codes] * scales - blocks), axis=-1)


@dataclasses.dataclass(frozen=True)
class Nf4Format(Format):
    """Indices into the table of NF4, and for each 64 inputs a float32 scale, the largest magnitude among them."""

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        del outputs
        return group_size_problem(NF4_BLOCK, inputs, "the block of NF4")

    def pack(self, w: Float[Array, "out in"]) -> PackedWeight:
        blocks = w.astype(jnp.float32).reshape(w.shape[0], -1, NF4_BLOCK)
        scales = jnp.max(jnp.abs(blocks), axis=-1)
        values = jnp.asarray(NF4_VALUES)
        indices = nearest_centers(blocks / jnp.where(scales > 0, scales, 1.0)[..., None], values)
        return pack_lookup(4, indices.reshape(w.shape), values[None], scales=scales)


class Mxfp4(AfterTraining):
    """Rounds weights to MXFP4: FP4 numbers (E2M1) with one power of two for each 32 inputs, 4.25 bits a weight.

    Experts in this format are exported as gpt-oss's own files (`mxfp4`). Needs no calibration text.
    """

    method: Literal["mxfp4"] = "mxfp4"
    scales: Literal["largest", "fitted"] = "largest"
    """`largest`: the power of two that the specification derives from the largest magnitude of a block; `fitted`: that,
    or the next larger one where its squared error is smaller."""

    @property
    def format(self) -> Mxfp4Format:
        return Mxfp4Format(self.scales == "fitted")


class Nf4(AfterTraining):
    """Rounds weights to NF4 (QLoRA, Dettmers et al. 2023): 16 quantiles of a normal distribution, 4.5 bits a weight.

    The values are those of bitsandbytes without double quantization: a float32 scale for each 64 inputs. Needs no
    calibration text.
    """

    method: Literal["nf4"] = "nf4"

    @property
    def format(self) -> Nf4Format:
        return Nf4Format()
