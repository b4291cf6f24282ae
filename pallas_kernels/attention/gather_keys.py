"""Attention over a sharded sequence: each device first fetches keys from the others, all or those in the window.

Each of this device's chunks of queries gets keys that end with its own chunk, so that its mask is a plain causal one.
If the sequence has fewer chunks before it, the missing keys have a segment id that no query has, and their tiles are
skipped.

Gathered keys are not saved for the backward, but gathered again. Gradients return to their owners in float32.

What is fetched is a `KeySource`: keys and values themselves, or arrays that each device expands to them.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.attention.context_layout import chunk_order, chunks_per_device, own_chunks, permute, split
from pallas_kernels.attention.key_source import Expansion, add_trees, cast_like, expand_keys, widen
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.partial_attention import PartOptions, attend_part, part_gradients
from pallas_kernels.attention.remat import name_outputs
from pallas_kernels.attention.scores import row_delta

Tree = TypeVar("Tree")
Source = tuple[jax.Array, ...]
"""Arrays [B, T, ...] of this device's shard."""

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
        expand: computes keys and values from the arrays that are fetched; None: they are fetched themselves.
    """

    axis_name: str
    devices: int
    causal: bool
    window: int | None
    layout: str
    reach: int
    use_all_gather: bool
    options: PartOptions
    expand: Expansion | None = None

    @property
    def mask(self) -> Mask:
        """The attention mask, made of `causal` and `window`."""
        return Mask(self.causal, self.window)


def count_reached_chunks(window: int | None, chunk: int, chunks: int) -> int:
    """Return how many earlier chunks of keys a chunk of queries can see: `chunks` - 1 if `window` is None."""
    return chunks - 1 if window is None else min(chunks - 1, -(-(window - 1) // chunk))


def _fetch(gather: KeyGatherOptions, x: jax.Array) -> list[jax.Array]:
    """Return x [B, T, ...] of this and other devices, as arrays [B', S, ...] that `_arrange` orders. Linear in x."""
    if not gather.causal:
        return [lax.all_gather(x, gather.axis_name, axis=1, tiled=True)]
    if gather.use_all_gather:
        return [lax.all_gather(x, gather.axis_name, tiled=True)]
    parts = split(x, gather.layout)
    before = [_fetch_from_holders(gather, parts, distance) for distance in range(gather.reach, 0, -1)]
    return [jnp.concatenate([*(found[p] for found in before), own], axis=1) for p, own in enumerate(parts)]


def _arrange(gather: KeyGatherOptions, fetched: list[jax.Array]) -> list[jax.Array]:
    """Return, for each chunk on this device, x of that chunk and of the `gather.reach` chunks before it, [B, S, ...].

    Without a causal mask the only result is x of the whole sequence. Linear; nothing is sent.
    """
    if not gather.causal or not gather.use_all_gather:
        return fetched
    everything = fetched[0].reshape(gather.devices, -1, *fetched[0].shape[1:])
    rows, length = everything.shape[1:3]
    chunks = gather.devices * chunks_per_device(gather.layout)
    chunk = length * gather.devices // chunks
    everything = jnp.moveaxis(everything, 0, 1).reshape(rows, chunks, chunk, *everything.shape[3:])
    order = np.argsort(chunk_order(gather.devices, gather.layout))
    in_order = everything[:, np.concatenate([order, order])]
    found = []
    for number in own_chunks(gather.axis_name, gather.layout):
        # The sequence is repeated once, so that any run of chunks, also around its end, is one slice.
        start = (number - gather.reach) % chunks
        run = lax.dynamic_slice_in_dim(in_order, start, gather.reach + 1, axis=1)
        found.append(run.reshape(rows, -1, *run.shape[3:]))
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
        return [None if ids is None else (ids, *_fetch(gather, ids))]
    own = jnp.zeros(like.shape[:2], jnp.int32) if ids is None else ids
    query_ids = split(own, gather.layout)
    size = query_ids[0].shape[1]
    places = jnp.arange((gather.reach + 1) * size) // size - gather.reach
    key_ids = [None] * len(query_ids) if ids is None else _arrange(gather, _fetch(gather, ids))
    found = []
    for number, queries, keys in zip(own_chunks(gather.axis_name, gather.layout), query_ids, key_ids, strict=True):
        keys = jnp.zeros((1, places.size), jnp.int32) if keys is None else keys
        keys = jnp.where((number + places >= 0)[None], keys, _NO_SEGMENT)
        found.append((queries, jnp.broadcast_to(keys, (queries.shape[0], places.size))))
    return found


def _chunks(gather: KeyGatherOptions, x: jax.Array, dim: int = 1) -> list[jax.Array]:
    return split(x, gather.layout, dim) if gather.causal else [x]


def _fetch_keys(
    gather: KeyGatherOptions, source: Source, parameters: Any
) -> tuple[list[jax.Array], list[jax.Array], Callable[..., tuple[Any, Source]]]:
    """Fetch a source of keys from other devices, and expand it.

    Returns:
        Keys and values, each as arrays for `_arrange`, and a function from their gradients, in float32, to those of
        the expansion's parameters and of this device's source, which it sums over devices.
    """
    fetched = [_fetch(gather, x) for x in source]
    expanded = [expand_keys(gather.expand, parameters, arrays) for arrays in zip(*fetched, strict=True)]
    keys, values = zip(*(keys for keys, _ in expanded), strict=True)

    def pull_back(d_keys: list[jax.Array], d_values: list[jax.Array]) -> tuple[Any, Source]:
        d_parameters = None
        d_fetched = []
        for (_, pull_back_part), *gradients in zip(expanded, d_keys, d_values, strict=True):
            terms, d_arrays = pull_back_part(gradients)
            d_parameters = add_trees(d_parameters, terms)
            d_fetched.append(d_arrays)
        fetch = functools.partial(_fetch, gather)
        parts = zip(source, zip(*d_fetched, strict=True), strict=True)
        return d_parameters, tuple(_transpose(fetch, x, list(gradients)) for x, gradients in parts)

    return list(keys), list(values), pull_back


def _transpose(function: Callable[[Tree], list[jax.Array]], like: Tree, gradients: Sequence[jax.Array]) -> Tree:
    """Pull gradients back through a linear function of arrays like `like`, in float32."""
    # Of `like`, which is not read, `jax.shard_map` checks over which mesh axes it varies.
    (total,) = jax.linear_transpose(function, widen(like))(widen(list(gradients)))
    return total


def _forward(
    gather: KeyGatherOptions, q: jax.Array, source: Source, parameters: Any, ids: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    keys, values, _ = _fetch_keys(gather, source, parameters)
    arrays = zip(_chunks(gather, q), _arrange(gather, keys), _arrange(gather, values), strict=True)
    found = [
        attend_part(gather.options, gather.mask, part, ids_here)
        for part, ids_here in zip(arrays, _gather_ids(gather, ids, q), strict=True)
    ]
    outs, lses = zip(*found, strict=True)
    return jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=2)


def _backward(gather: KeyGatherOptions, saved: tuple, cotangents: tuple) -> tuple:
    q, source, parameters, ids, out, lse = saved
    # Without the barrier XLA would reuse the keys gathered in the forward, and hold them until the backward.
    source, parameters, (d_out, d_lse) = lax.optimization_barrier((source, parameters, cotangents))
    keys, values, pull_back = _fetch_keys(gather, source, parameters)
    arrays = zip(_chunks(gather, q), _arrange(gather, keys), _arrange(gather, values), strict=True)
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
    arrange = functools.partial(_arrange, gather)
    d_parameters, d_source = pull_back(_transpose(arrange, keys, d_k), _transpose(arrange, values, d_v))
    return jnp.concatenate(d_q, axis=1), *cast_like((d_source, d_parameters), (source, parameters)), None


def _forward_rule(
    gather: KeyGatherOptions, q: jax.Array, source: Source, parameters: Any, ids: jax.Array | None
) -> tuple:
    out, lse = name_outputs(*_forward(gather, q, source, parameters, ids))
    return (out, lse), (q, source, parameters, ids, out, lse)


attend_gathered = jax.custom_vjp(_forward, nondiff_argnums=(0,))
"""Return out [B, T, N, H] and lse [B, N, T] of this device's queries.

The arguments are the static `KeyGatherOptions`, then q, the arrays and the parameters of a `KeySource`, and segment ids
(or None).
"""
attend_gathered.defvjp(_forward_rule, _backward)
