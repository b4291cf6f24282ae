"""Computes recurrent mixers on sequences that are split over the devices of `context`.

By an all-to-all each device gets whole sequences of a part of the heads; or each device computes its parts of the
sequences, of all heads, and all devices gather what each part does to the states (`pallas_kernels.sequence_shards`).
"""

from collections.abc import Callable
from functools import partial

import jax
from jaxtyping import Array, Float

from jaxstack.models.attention.base import context_method
from jaxstack.models.layer import SegmentIds
from jaxstack.models.mixers.short_convolution import short_convolution
from jaxstack.models.recurrent import PARTS_OF_DEVICE, Recurrent
from pallas_kernels.sequence_shards import SequenceShards, tokens_before


def gathers_states(axis: str, kind: Recurrent, x: Float[Array, "B T N _"]) -> bool:
    """Return True if devices should gather the maps of the states, False if they should exchange heads.

    `parallel.context_method` decides; `auto` takes what sends fewer bytes, and gathers if the devices do not divide the
    heads, see `StateExchange`.

    Args:
      axis: the mesh axis that sequences are split over, inside a `shard_map`.
      kind: the mixer.
      x: values of the tokens and heads of the device.

    Raises:
      ValueError: states were asked for, and a part is shorter than what the convolution sees of the part before.
    """
    length, heads = x.shape[1:3]
    method = context_method()
    fits = kind.fits_parts(length)
    if method == "all_gather" and not fits:
        raise ValueError(
            f"parallel.context_method all_gather needs parts of at least {kind.conv_kernel - 1} tokens (conv_kernel - "
            f"1); found {length // PARTS_OF_DEVICE}. Take longer sequences, fewer devices of context, or all_to_all."
        )
    if method is not None or not fits:
        return method == "all_gather"
    devices = jax.lax.axis_size(axis)
    exchange = kind.exchange(kind.num_heads // heads)
    return exchange.gathers_states(length, heads, devices, x.dtype.itemsize)


def convolve_parts(
    axis: str,
    x: Float[Array, "B T *channels"],
    taps: Float[Array, " W *channels"],
    bias: Float[Array, "*channels"] | None = None,
    *,
    segment_ids: SegmentIds = None,
) -> Float[Array, "B T *channels"]:
    """Apply `short_convolution` to a device's parts of sequences, given the tokens before them by other devices."""
    shards = SequenceShards(axis)
    ids = None if segment_ids is None else shards.split(segment_ids)
    parts = shards.split(x)
    tail = tokens_before(shards, parts, taps.shape[0] - 1, ids)
    return shards.join(short_convolution(parts, taps, bias, segment_ids=ids, tail=tail))


def convolution_over(axis: str | None) -> Callable[..., jax.Array]:
    """Return `short_convolution` for whole sequences, or for their parts on the devices of an axis."""
    return short_convolution if axis is None else partial(convolve_parts, axis)
