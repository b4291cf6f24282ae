"""Attention to keys that are collected first: all of them (all-gather), or, from neighbours, what a window reaches.

Each of this device's chunks of queries gets keys that end with its own chunk, so that its mask is the plain causal one.
Where the sequence has fewer chunks before it, the rest carries a segment id of its own, and its tiles are skipped.

What is collected is not kept for the backward pass, but collected again. Gradients go home in float32.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.attention.context_layout import chunk_order, chunks_per_device, own_chunks, permute, split
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.part import PartOptions, attend_part, part_gradients
from pallas_kernels.attention.remat import name_outputs
from pallas_kernels.attention.scores import accumulator_dtype, row_delta

_NO_SEGMENT = np.iinfo(np.int32).min
"""Segment id of keys that are not there."""


@dataclasses.dataclass(frozen=True)
class KeyGather:
    """The static part of a call.

    Attributes:
        reach: how many chunks before its own a chunk of queries sees at most.
        use_all_gather: whether keys come by an all-gather, or chunk by chunk from their holders.
    """

    axis_name: str
    devices: int
    causal: bool
    window: int | None
    layout: str
    reach: int
    use_all_gather: bool
    options: PartOptions

    @property
    def mask(self) -> Mask:
        return Mask(self.causal, self.window)


def count_reached_chunks(window: int | None, chunk: int, chunks: int) -> int:
    """How many chunks before its own the first query of a chunk sees."""
    return chunks - 1 if window is None else min(chunks - 1, -(-(window - 1) // chunk))


def _gather(gather: KeyGather, x: jax.Array) -> list[jax.Array]:
    """For each own chunk, x [B, T, ...] of the `reach` chunks before it and its own. Linear."""
    if not gather.causal:
        return [lax.all_gather(x, gather.axis_name, axis=1, tiled=True)]
    if gather.use_all_gather:
        return _gather_from_all(gather, x)
    parts = split(x, gather.layout)
    before = [_fetch_from_holders(gather, parts, distance) for distance in range(gather.reach, 0, -1)]
    return [jnp.concatenate([*(found[p] for found in before), own], axis=1) for p, own in enumerate(parts)]


def _gather_from_all(gather: KeyGather, x: jax.Array) -> list[jax.Array]:
    everything = lax.all_gather(x, gather.axis_name)
    chunks = gather.devices * chunks_per_device(gather.layout)
    chunk = x.shape[1] * gather.devices // chunks
    everything = jnp.moveaxis(everything, 0, 1).reshape(x.shape[0], chunks, chunk, *x.shape[2:])
    order = np.argsort(chunk_order(gather.devices, gather.layout))
    in_order = everything[:, np.concatenate([order, order])]
    found = []
    for number in own_chunks(gather.axis_name, gather.layout):
        # Behind the sequence it stands once more, so that any run of chunks, also around its end, is one slice.
        start = (number - gather.reach) % chunks
        run = lax.dynamic_slice_in_dim(in_order, start, gather.reach + 1, axis=1)
        found.append(run.reshape(x.shape[0], -1, *x.shape[2:]))
    return found


def _fetch_from_holders(gather: KeyGather, parts: list[jax.Array], distance: int) -> list[jax.Array]:
    """For each own chunk the one `distance` before it; zeros where there is none."""
    n = gather.devices
    first = permute(parts[0], gather.axis_name, [(i - distance, i) for i in range(distance, n)])
    if len(parts) == 1:
        return [first]
    # The one before chunk 2n-1-i is the later chunk of a device behind, or, past the middle, an earlier chunk.
    later = [(i + distance, i) for i in range(n - distance)]
    earlier = [(2 * n - 1 - i - distance, i) for i in range(max(0, n - distance), n) if 2 * n - 1 - i >= distance]
    second = [
        permute(part, gather.axis_name, pairs) for part, pairs in ((parts[1], later), (parts[0], earlier)) if pairs
    ]
    return [first, sum(second[1:], second[0])]


def _gather_ids(gather: KeyGather, ids: jax.Array | None, like: jax.Array) -> list[tuple | None]:
    """(query ids, key ids) for each own chunk, those of missing keys `_NO_SEGMENT`; None where none are needed."""
    if not gather.causal:
        return [None if ids is None else (ids, _gather(gather, ids)[0])]
    own = jnp.zeros(like.shape[:2], jnp.int32) if ids is None else ids
    query_ids = split(own, gather.layout)
    size = query_ids[0].shape[1]
    places = jnp.arange((gather.reach + 1) * size) // size - gather.reach
    key_ids = [None] * len(query_ids) if ids is None else _gather(gather, ids)
    found = []
    for number, queries, keys in zip(own_chunks(gather.axis_name, gather.layout), query_ids, key_ids, strict=True):
        keys = jnp.zeros((1, places.size), jnp.int32) if keys is None else keys
        keys = jnp.where((number + places >= 0)[None], keys, _NO_SEGMENT)
        found.append((queries, jnp.broadcast_to(keys, (queries.shape[0], places.size))))
    return found


def _cut(gather: KeyGather, x: jax.Array, dim: int = 1) -> list[jax.Array]:
    return split(x, gather.layout, dim) if gather.causal else [x]


def _forward(
    gather: KeyGather, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    arrays = zip(_cut(gather, q), _gather(gather, k), _gather(gather, v), strict=True)
    found = [
        attend_part(gather.options, gather.mask, part, ids_here)
        for part, ids_here in zip(arrays, _gather_ids(gather, ids, q), strict=True)
    ]
    outs, lses = zip(*found, strict=True)
    return jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=2)


def _backward(gather: KeyGather, saved: tuple, cotangents: tuple) -> tuple:
    q, k, v, ids, out, lse = saved
    # Else XLA collects in the forward already, or finds that it did, and keeps all that until the backward.
    k, v, (d_out, d_lse) = lax.optimization_barrier((k, v, cotangents))
    arrays = zip(_cut(gather, q), _gather(gather, k), _gather(gather, v), strict=True)
    delta = row_delta(out, d_out, d_lse)
    rows = zip(_cut(gather, d_out.astype(q.dtype)), _cut(gather, lse, 2), _cut(gather, delta, 2), strict=True)
    found = [
        part_gradients(gather.options, gather.mask, part, ids_here, rows_here)
        for part, ids_here, rows_here in zip(arrays, _gather_ids(gather, ids, q), rows, strict=True)
    ]
    d_q, d_k, d_v = zip(*found, strict=True)
    return jnp.concatenate(d_q, axis=1), _return_gradients(gather, d_k, k), _return_gradients(gather, d_v, v), None


def _return_gradients(gather: KeyGather, gradients: Any, like: jax.Array) -> jax.Array:
    """The transpose of `_gather`, in float32."""
    wide = accumulator_dtype(like.dtype)
    collect: Callable[..., Any] = lambda x: _gather(gather, x)  # noqa: E731
    transpose = jax.linear_transpose(collect, jax.ShapeDtypeStruct(like.shape, wide))
    (total,) = transpose([x.astype(wide) for x in gradients])
    return total.astype(like.dtype)


def _forward_rule(gather: KeyGather, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> tuple:
    out, lse = name_outputs(*_forward(gather, q, k, v, ids))
    return (out, lse), (q, k, v, ids, out, lse)


attend_gathered = jax.custom_vjp(_forward, nondiff_argnums=(0,))
"""out [B, T, N, H] and lse [B, N, T] of this device's queries; see `KeyGather` for the first argument."""
attend_gathered.defvjp(_forward_rule, _backward)
