"""Packing of integers of few bits into bytes for files: value i takes the bits i * bits to (i + 1) * bits - 1."""

import numpy as np
from jaxtyping import Int, UInt8

_CHUNK = 2**20
"""Values that are packed at once; a multiple of 8, so that each chunk fills whole bytes."""


def pack_bits(values: Int[np.ndarray, "..."], bits: int) -> UInt8[np.ndarray, " bytes"]:
    """Pack the lowest `bits` (1 to 8) of each int8 or uint8 value into bytes, in C order, the lowest bit first."""
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    if bits == 8:
        return flat
    if bits == 4 and flat.size % 2 == 0:
        return (flat[::2] & 15) | (flat[1::2] << 4)
    parts = [flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK)]
    streams = [np.packbits(_bits_of(part)[:, :bits], bitorder="little") for part in parts]
    return np.concatenate(streams) if streams else np.zeros(0, np.uint8)


def unpack_bits(
    stream: UInt8[np.ndarray, " bytes"], bits: int, shape: tuple[int, ...], *, signed: bool
) -> Int[np.ndarray, "..."]:
    """Unpack `bits`-bit integers from the bytes of `pack_bits`: int8 if `signed` (two's complement), else uint8."""
    count = int(np.prod(shape))
    flat = stream[:count] if bits == 8 else np.empty(count, np.uint8)
    if bits == 4:
        flat[::2], flat[1::2] = stream[: -(-count // 2)] & 15, stream[: count // 2] >> 4
    elif bits < 8:
        for start in range(0, count, _CHUNK):
            size = min(_CHUNK, count - start)
            part = stream[start * bits // 8 : -(-(start + size) * bits // 8)]
            found = np.unpackbits(part, bitorder="little")[: size * bits].reshape(size, bits)
            flat[start : start + size] = np.packbits(found, axis=1, bitorder="little")[:, 0]
    if not signed:
        return flat.reshape(shape)
    shift = 8 - bits
    return ((flat << shift).view(np.int8) >> shift).reshape(shape)


def _bits_of(values: UInt8[np.ndarray, " n"]) -> UInt8[np.ndarray, "n 8"]:
    return np.unpackbits(values[:, None], axis=1, bitorder="little")
