"""`Encoded`: an array of vectors quantized to few bits, as one pytree node; its functions take plain arrays too."""

import dataclasses
import math
from collections.abc import Callable
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.low_bits.codecs import Codec, Parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """Vectors [*dims, H], quantized to a few bits per value.

    Attributes:
      parts: the stored arrays, with the same leading dims.
      order: channel of each stored value, int32 [K, H], where the dims of the values end with the K heads and H; None:
        values are in their own order.
      codec: their format.
    """

    parts: Parts
    order: Int[Array, "*layers K H"] | None
    codec: Codec = dataclasses.field(metadata={"static": True})


Stored: TypeAlias = jax.Array | Encoded
"""An array of vectors, plain or in few bits."""


def map_stored(function: Callable[..., jax.Array], *stored: Stored) -> Stored:
    """Apply `function`, which must keep the last dim, to plain arrays, or to each stored part of `Encoded` ones."""
    if not isinstance(stored[0], Encoded):
        return function(*stored)
    columns = zip(*(cast(Encoded, one).parts for one in stored), strict=True)
    return dataclasses.replace(stored[0], parts=tuple(function(*column) for column in columns))


def with_numbers(stored: Stored, numbers: jax.Array) -> Stored:
    """Return `stored`, of which all is one array, with these numbers in its place."""
    return map_stored(lambda old: numbers.reshape(old.shape), stored)


def encode_like(stored: Stored, x: Float[Array, "*dims K H"]) -> Stored:
    """Return x in the form of `stored`: cast to its dtype, or quantized by its codec in its channel order."""
    if not isinstance(stored, Encoded):
        return x.astype(stored.dtype)
    return dataclasses.replace(stored, parts=stored.codec.encode(sort_channels(x, stored.order)))


def decode(stored: Stored, dtype: jax.typing.DTypeLike) -> Float[Array, "*dims H"]:
    """Dequantize an encoded array to `dtype`; its channels stay in the order in which they are stored.

    A plain array is returned as it is.
    """
    return stored.codec.decode(stored.parts).astype(dtype) if isinstance(stored, Encoded) else stored


def sort_channels(x: Float[Array, "*dims N H"], order: Int[Array, "K H"] | None) -> Float[Array, "*dims N H"]:
    """Permute the channels (last dim) of N heads by `order` [K, H]; N / K consecutive heads share a row of it."""
    if order is None:
        return x
    heads, width = order.shape
    grouped = x.reshape(*x.shape[:-2], heads, -1, width)
    return jnp.take_along_axis(grouped, order[(None,) * (x.ndim - 2)][..., None, :], axis=-1).reshape(x.shape)


def permute_query_channels(q: Float[Array, "*dims N H"], keys: Stored) -> Float[Array, "*dims N H"]:
    """Put the channels of queries into the order of the channels of `keys`; every score q . k stays the same."""
    return sort_channels(q, keys.order if isinstance(keys, Encoded) else None)


def without_order(stored: Stored) -> Stored:
    """Return `stored` with its channel order dropped: channels then count as being in the order of storage."""
    return dataclasses.replace(stored, order=None) if isinstance(stored, Encoded) else stored


def round_trip(
    x: Float[Array, "*dims K H"], codec: Codec, order: Int[Array, "K H"] | None = None
) -> Float[Array, "*dims K H"]:
    """Quantize x by a codec and dequantize it, with channels permuted by `order` while quantized."""
    decoded = codec.decode(codec.encode(sort_channels(x, order))).astype(x.dtype)
    return sort_channels(decoded, None if order is None else jnp.argsort(order, axis=-1))


def stored_bytes(stored: Stored) -> int:
    """Return the size of a stored array in bytes, not counting its channel order."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(without_order(stored)))
