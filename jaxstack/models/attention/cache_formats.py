"""Low-bit formats of the KV cache: the choices of `precision.kv_cache`.

Every query sees the stored keys and values, its own included, in evaluations without a cache too: their loss is that of
decoding with it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxstack.parallel import shard
from pallas_kernels.low_bits.codecs import BlockFloatCodec, Codec, Fp8Codec, Int8Codec, IntegerCodec
from pallas_kernels.low_bits.encoded import Encoded, Stored, round_trip
from pallas_kernels.weight_only.rounding_grid import Grid


@dataclasses.dataclass(frozen=True)
class CacheFormat:
    """Low-bit format in which a cache stores keys and values.

    Attributes:
      key, value: codecs of one head's vectors.
      sorts_channels: True if the channels of keys are sorted by magnitude, so that those of a block are similar.
    """

    key: Codec
    value: Codec
    sorts_channels: bool = False

    @property
    def stores_numbers(self) -> bool:
        """True if keys and values are stored as numbers of FP8, without scales: a kernel may write and read them."""
        return isinstance(self.key, Fp8Codec) and isinstance(self.value, Fp8Codec) and not self.sorts_channels

    def unsupported_reason(self, head_dim: int) -> str | None:
        """Return why heads of `head_dim` channels cannot be stored in this format, or None if they can."""
        return self.key.unsupported_reason(head_dim) or self.value.unsupported_reason(head_dim)


_BLOCK = 32
"""Values that share a scale or an exponent where a value has 4 bits."""

CACHE_FORMATS: dict[str, CacheFormat] = {
    "int8": CacheFormat(Int8Codec(), Int8Codec()),
    "fp8": CacheFormat(Fp8Codec(), Fp8Codec()),
    "int4": CacheFormat(IntegerCodec(Grid(4, _BLOCK)), IntegerCodec(Grid(4, _BLOCK))),
    "k8v4": CacheFormat(Int8Codec(), IntegerCodec(Grid(4, _BLOCK))),
    "bfp12": CacheFormat(BlockFloatCodec(4, _BLOCK), BlockFloatCodec(8, _BLOCK), sorts_channels=True),
}
"""Formats by the name that `precision.kv_cache` has for them. bfp12 (4-bit integers, 8-bit exponents, sorted channels)
follows Trukhanov & Soloveychik 2024, arXiv:2403.20137; its values have 8-bit integers."""


def empty_keys_and_values(
    format: CacheFormat | None,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    dtype: jax.typing.DTypeLike,
) -> tuple[Stored, Stored]:
    """Create the zero-filled arrays of a cache for keys and values, in a low-bit format if one is given.

    Args:
      format: how they are stored; None: as numbers of `dtype`.
      shape: shape of each, which ends with head_dim.
      axes: logical axes of the dims of `shape`.
    """

    def empty(codec: Codec | None) -> Stored:
        if codec is None:
            return shard(jnp.zeros(shape, dtype), *axes)
        parts = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct(shape, dtype))
        return Encoded(tuple(shard(jnp.zeros(part.shape, part.dtype), *axes) for part in parts), None, codec)

    return (empty(None), empty(None)) if format is None else (empty(format.key), empty(format.value))


def as_stored(
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    format: CacheFormat | None,
    order: Int[Array, "K H"] | None,
) -> tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]:
    """Return keys and values with the rounding error of a low-bit cache format: encoded and decoded again.

    Args:
      order: order of the channels in which keys are stored, see `magnitude_order`.
    """
    if format is None:
        return k, v
    return round_trip(k, format.key, order), round_trip(v, format.value)


def magnitude_order(kernel: Float[Array, "*layers D K H"], *, rotated: int) -> Int[Array, "*layers K H"]:
    """Return, per head, the order that sorts the channels of keys by the norm of their projection weights.

    Args:
      kernel: projection from D inputs to the keys.
      rotated: number of channels, the first ones, that get rotary positions: over a text the two channels of a pair
        have one magnitude then.
    """
    squares = jnp.square(kernel.astype(jnp.float32)).sum(-3)
    first, second = jnp.split(squares[..., :rotated], 2, axis=-1)
    squares = jnp.concatenate([*[(first + second) / 2] * 2, squares[..., rotated:]], axis=-1)
    return jnp.argsort(squares, axis=-1).astype(jnp.int32)
