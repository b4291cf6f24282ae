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
from pallas_kernels.sequence_shards import SequenceShards, tokens_before


def gathers_states(axis: str, length: int, heads: int, conv_kernel: int, token_bytes: int, state_bytes: int) -> bool:
    """Return True if devices should gather the maps of the states, False if they should exchange heads.

    `parallel.context_method` decides; `auto` takes what sends fewer bytes, and gathers if the devices do not divide the
    heads.

    Args:
      axis: the mesh axis that sequences are split over, inside a `shard_map`.
      length: number of tokens of a sequence on a device.
      heads: number of heads of the device.
      conv_kernel: number of tokens that the convolution sees.
      token_bytes: bytes of a token's inputs and outputs, of all these heads.
      state_bytes: bytes of the map of a part of a sequence.

    Raises:
      ValueError: states were asked for, and a part is shorter than what the convolution sees of the part before.
    """
    devices = jax.lax.axis_size(axis)
    parts = SequenceShards(axis).count
    method = context_method()
    fits = length // parts >= conv_kernel - 1
    if method == "all_gather" and not fits:
        raise ValueError(
            f"parallel.context_method all_gather needs parts of at least {conv_kernel - 1} tokens (conv_kernel - 1); "
            f"found {length // parts}. Take longer sequences, fewer devices of context, or all_to_all."
        )
    if method is not None or not fits:
        return method == "all_gather"
    return heads % devices != 0 or length * token_bytes / devices > parts * state_bytes


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
