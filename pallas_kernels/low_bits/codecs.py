"""Codecs that store vectors, such as the keys of one head, in few bits along their last dim."""

import dataclasses
from abc import ABC, abstractmethod

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.low_bits.block_float import block_exponents, round_to_steps
from pallas_kernels.weight_only.formats import powers_of_two
from pallas_kernels.weight_only.rounding_grid import Grid

Parts = tuple[jax.Array, ...]
"""The arrays that store one array: each has its leading dims, and a last dim that may differ."""
_SCALE_BITS = 16
"""Bits of a scale, which is a bfloat16."""


class Codec(ABC):
    """Interface of a codec that stores vectors [..., H] in few bits. Subclasses are frozen dataclasses."""

    @abstractmethod
    def encode(self, x: Float[Array, "*dims H"]) -> Parts:
        """Encode x into the tuple of arrays that are stored."""

    @abstractmethod
    def decode(self, parts: Parts) -> Float[Array, "*dims H"]:
        """Decode the stored arrays to float32 [..., H]."""

    def unsupported_reason(self, width: int) -> str | None:
        """Return why vectors of this width cannot be stored, or None."""
        del width
        return None


@dataclasses.dataclass(frozen=True)
class Fp8Codec(Codec):
    """Stores values as e4m3 numbers without scales (Micikevicius et al. 2022, arXiv:2209.05433); saturates at 448."""

    def encode(self, x: Float[Array, "*dims H"]) -> Parts:
        largest = float(jnp.finfo(jnp.float8_e4m3fn).max)
        return (jnp.clip(x.astype(jnp.float32), -largest, largest).astype(jnp.float8_e4m3fn),)

    def decode(self, parts: Parts) -> Float[Array, "*dims H"]:
        return parts[0].astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class IntegerCodec(Codec):
    """Stores values as integers, with a bfloat16 scale per vector or per group of its values.

    Attributes:
      grid: 8 bits, or 4, of which two values share a byte; and the size of groups.
    """

    grid: Grid

    def encode(self, x: Float[Array, "*dims H"]) -> Parts:
        rows = x.reshape(-1, x.shape[-1])
        scales = self.grid.scales(rows).astype(jnp.bfloat16)
        q = self.grid.quantize(rows, scales.astype(jnp.float32)).reshape(x.shape)
        return _pack(q, self.grid.bits), scales.reshape(*x.shape[:-1], -1)

    def decode(self, parts: Parts) -> Float[Array, "*dims H"]:
        q = _unpack(parts[0], self.grid.bits)
        scales = parts[1]
        values = self.grid.dequantize(
            q.reshape(-1, q.shape[-1]), scales.reshape(-1, scales.shape[-1]).astype(jnp.float32)
        )
        return values.reshape(q.shape)

    def unsupported_reason(self, width: int) -> str | None:
        return _block_problem(self.grid.group_size or 1, width)


@dataclasses.dataclass(frozen=True)
class Int8Codec(Codec):
    """Stores values as 8-bit integers that contain the bfloat16 scale of their vector: exactly 8 bits a value.

    The 16 bits of the scale are the lowest bits of the vector's first 16 integers. These have 7 bits left for their
    values, and so twice the rounding error of the others.
    """

    def encode(self, x: Float[Array, "*dims H"]) -> Parts:
        rows = x.reshape(-1, x.shape[-1])
        scales = Grid(8).scales(rows)
        bits = jax.lax.bitcast_convert_type(scales.astype(jnp.bfloat16), jnp.uint16)
        scale_bits = ((bits >> jnp.arange(_SCALE_BITS, dtype=jnp.uint16)) & 1).astype(jnp.int8)
        first = Grid(7).quantize(rows[:, :_SCALE_BITS], 2 * scales)
        rest = Grid(8).quantize(rows[:, _SCALE_BITS:], scales)
        return (jnp.concatenate([2 * first + scale_bits, rest], axis=-1).reshape(x.shape),)

    def decode(self, parts: Parts) -> Float[Array, "*dims H"]:
        q = parts[0]
        scale_bits = (q[..., :_SCALE_BITS] & 1).astype(jnp.uint16) << jnp.arange(_SCALE_BITS, dtype=jnp.uint16)
        bits = scale_bits.sum(-1, keepdims=True, dtype=jnp.uint16)
        scales = jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)
        values = jnp.where(jnp.arange(q.shape[-1]) < _SCALE_BITS, q & -2, q)
        return values.astype(jnp.float32) * scales

    def unsupported_reason(self, width: int) -> str | None:
        return None if width >= _SCALE_BITS else f"a scale of {_SCALE_BITS} bits does not fit into {width} values"


@dataclasses.dataclass(frozen=True)
class BlockFloatCodec(Codec):
    """Stores values in block floating point: integers that share a power of two per block (one exponent byte).

    Attributes:
      bits: bits of an integer, its sign included: 8, or 4, of which two values share a byte.
      block: number of neighbouring values that share an exponent.
    """

    bits: int
    block: int

    def encode(self, x: Float[Array, "*dims H"]) -> Parts:
        blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, self.block)
        exponents = block_exponents(jnp.abs(blocks).max(-1), self.bits)
        q = round_to_steps(blocks, exponents[..., None], self.bits).reshape(x.shape)
        return _pack(q, self.bits), exponents

    def decode(self, parts: Parts) -> Float[Array, "*dims H"]:
        q = _unpack(parts[0], self.bits)
        exponents = parts[1]
        blocks = q.astype(jnp.float32).reshape(*exponents.shape, self.block)
        return (blocks * powers_of_two(exponents)[..., None]).reshape(q.shape)

    def unsupported_reason(self, width: int) -> str | None:
        return _block_problem(self.block, width)


def pack_nibbles(q: Int[Array, "*dims H"]) -> UInt8[Array, "*dims half"]:
    """Pack signed 4-bit integers into bytes: the first half of the last dim in the low bits, the second in the high."""
    low, high = jnp.split(q.astype(jnp.uint8), 2, axis=-1)
    return (low & 15) | (high << 4)


def unpack_nibbles(packed: UInt8[Array, "*dims half"]) -> Int[Array, "*dims H"]:
    """Unpack two signed 4-bit integers from each byte, in the order of `pack_nibbles`, as int8."""
    signed = jax.lax.bitcast_convert_type(packed, jnp.int8)
    return jnp.concatenate([(signed << 4) >> 4, signed >> 4], axis=-1)


def _pack(q: jax.Array, bits: int) -> jax.Array:
    return pack_nibbles(q) if bits == 4 else q


def _unpack(stored: jax.Array, bits: int) -> jax.Array:
    return unpack_nibbles(stored) if bits == 4 else stored


def _block_problem(block: int, width: int) -> str | None:
    if width % 2 == 0 and width % block == 0:
        return None
    return f"its blocks of {block} values do not divide vectors of {width}"
