"""Attention over a sharded sequence: each device first fetches keys from the others, all or those in the window.

Each of this device's chunks of queries gets keys that end with its own chunk, so that its mask is a plain causal one.
If the sequence has fewer chunks before it, the missing keys have a segment id that no query has, and their tiles are
skipped.

Gathered keys are not saved for the backward, but gathered again. Gradients return to their owners in float32.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.attention.context_layout import chunk_order, chunks_per_device, own_chunks, permute, split
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.partial_attention import PartOptions, attend_part, part_gradients
from pallas_kernels.attention.remat import name_outputs
from pallas_kernels.attention.scores import accumulator_dtype, row_delta

_NO_SEGMENT = np.iinfo(np.int32).min
"""Segment id of missing keys."""


@dataclasses.dataclass(frozen=True)
class KeyGatherOptions:
    """Static arguments (hashable, not differentiated) of attention to keys fetched from other devices.

    Attributes:
        axis_name: mesh axis that the sequence is sharded over.
        devices: size of that axis.
        causal, window: the mask.
        layout: "zigzag" or "contiguous".
        reach: largest number of chunks before its own that a chunk of queries sees.
        use_all_gather: True to fetch keys by an all-gather, False to fetch them chunk by chunk from their owners.
        options: scale, soft cap and implementation.
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
        """The attention mask, made of `causal` and `window`."""
        return Mask(self.causal, self.window)


def count_reached_chunks(window: int | None, chunk: int, chunks: int) -> int:
    """Return how many earlier chunks of keys a chunk of queries can see: `chunks` - 1 if `window` is None."""
    return chunks - 1 if window is None else min(chunks - 1, -(-(window - 1) // chunk))


def _gather(gather: KeyGatherOptions, x: jax.Array) -> list[jax.Array]:
    """Return, for each chunk on this device, x of that chunk and of the `gather.reach` chunks before it.

    x and the results are [B, T, ...]. Without a causal mask the only result is x of the whole sequence. Linear in x.
    """
    if not gather.causal:
        return [lax.all_gather(x, gather.axis_name, axis=1, tiled=True)]
    if gather.use_all_gather:
        return _gather_from_all(gather, x)
    parts = split(x, gather.layout)
    before = [_fetch_from_holders(gather, parts, distance) for distance in range(gather.reach, 0, -1)]
    return [jnp.concatenate([*(found[p] for found in before), own], axis=1) for p, own in enumerate(parts)]


def _gather_from_all(gather: KeyGatherOptions, x: jax.Array) -> list[jax.Array]:
    everything = lax.all_gather(x, gather.axis_name)
    chunks = gather.devices * chunks_per_device(gather.layout)
    chunk = x.shape[1] * gather.devices // chunks
    everything = jnp.moveaxis(everything, 0, 1).reshape(x.shape[0], chunks, chunk, *x.shape[2:])
    order = np.argsort(chunk_order(gather.devices, gather.layout))
    in_order = everything[:, np.concatenate([order, order])]
    found = []
    for number in own_chunks(gather.axis_name, gather.layout):
        # The sequence is repeated once, so that any run of chunks, also around its end, is one slice.
        start = (number - gather.reach) % chunks
        run = lax.dynamic_slice_in_dim(in_order, start, gather.reach + 1, axis=1)
        found.append(run.reshape(x.shape[0], -1, *x.shape[2:]))
    return found


def _fetch_from_holders(gather: KeyGatherOptions, parts: list[jax.Array], distance: int) -> list[jax.Array]:
    """Fetch, for each chunk on this device, the chunk that is `distance` chunks earlier, or zeros if there is none."""
    n = gather.devices
    first = permute(parts[0], gather.axis_name, [(i - distance, i) for i in range(distance, n)])
    if len(parts) == 1:
        return [first]
    # The chunk before chunk 2n-1-i is the later chunk of a following device, or, past the middle, an earlier chunk.
    later = [(i + distance, i) for i in range(n - distance)]
    earlier = [(2 * n - 1 - i - distance, i) for i in range(max(0, n - distance), n) if 2 * n - 1 - i >= distance]
    second = [
        permute(part, gather.axis_name, pairs) for part, pairs in ((parts[1], later), (parts[0], earlier)) if pairs
    ]
    return [first, sum(second[1:], second[0])]


def _gather_ids(gather: KeyGatherOptions, ids: jax.Array | None, like: jax.Array) -> list[tuple | None]:
    """Return, for each chunk on this device, its segment ids and those of the fetched keys, or None if not needed.

    Missing keys have the id `_NO_SEGMENT`.
    """
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


def _chunks(gather: KeyGatherOptions, x: jax.Array, dim: int = 1) -> list[jax.Array]:
    return split(x, gather.layout, dim) if gather.causal else [x]


def _forward(
    gather: KeyGatherOptions, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    arrays = zip(_chunks(gather, q), _gather(gather, k), _gather(gather, v), strict=True)
    found = [
        attend_part(gather.options, gather.mask, part, ids_here)
        for part, ids_here in zip(arrays, _gather_ids(gather, ids, q), strict=True)
    ]
    outs, lses = zip(*found, strict=True)
    return jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=2)


def _backward(gather: KeyGatherOptions, saved: tuple, cotangents: tuple) -> tuple:
    q, k, v, ids, out, lse = saved
    # Without the barrier XLA would reuse the keys gathered in the forward, and hold them until the backward.
    k, v, (d_out, d_lse) = lax.optimization_barrier((k, v, cotangents))
    arrays = zip(_chunks(gather, q), _gather(gather, k), _gather(gather, v), strict=True)
    delta = row_delta(out, d_out, d_lse)
    rows = zip(
        _chunks(gather, d_out.astype(q.dtype)),
        _chunks(gather, lse, 2),
        _chunks(gather, delta, 2),
        strict=True,
    )
    found = [
        part_gradients(gather.options, gather.mask, part, ids_here, rows_here)
        for part, ids_here, rows_here in zip(arrays, _gather_ids(gather, ids, q), rows, strict=True)
    ]
    d_q, d_k, d_v = zip(*found, strict=True)
    return jnp.concatenate(d_q, axis=1), _return_gradients(gather, d_k, k), _return_gradients(gather, d_v, v), None


def _return_gradients(gather: KeyGatherOptions, gradients: Sequence[jax.Array], like: jax.Array) -> jax.Array:
    """Send the gradients of gathered keys or values back to the devices that own them, summed in float32."""
    wide = accumulator_dtype(like.dtype)
    gather_keys: Callable[..., Any] = lambda x: _gather(gather, x)  # noqa: E731
    # Of `like`, which is not read, `jax.shard_map` checks over which mesh axes it varies.
    transpose = jax.linear_transpose(gather_keys, like.astype(wide))
    (total,) = transpose([x.astype(wide) for x in gradients])
    return total.astype(like.dtype)


def _forward_rule(gather: KeyGatherOptions, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> tuple:
    out, lse = name_outputs(*_forward(gather, q, k, v, ids))
    return (out, lse), (q, k, v, ids, out, lse)


attend_gathered = jax.custom_vjp(_forward, nondiff_argnums=(0,))
"""Return out [B, T, N, H] and lse [B, N, T] of this device's queries.

The arguments are the static `KeyGatherOptions`, then q, k, v and segment ids (or None).
"""
attend_gathered.defvjp(_forward_rule, _backward)
