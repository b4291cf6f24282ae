"""Ring attention (Liu et al., arXiv:2310.01889): keys and values circulate, each device attends to one shard per step.

In step r a device attends to the keys of the device r places before it. Under a causal mask with the layout "zigzag"
such a step has two unmasked pairs of chunks on every device: the later queries with the earlier keys, and either the
earlier queries with the earlier keys (if these keys come from a device before) or the later queries with the later
keys. Operands are selected, not branches, so every device has the same work and nothing waits for the host.

In the backward, dK and dV of a shard travel with it in float32, and their last transfer, back to their owner, overlaps
with the computation for the device's own keys.

What circulates is a `KeySource`: keys and values themselves, or arrays that each device expands to them for every pair
of chunks, forward and backward. Then their gradients travel in place of dK and dV.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.context_layout import receive_from_previous, split
from pallas_kernels.attention.key_source import Expansion, add_trees, cast_like, expand_keys
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.partial_attention import QKV, PartOptions, attend_part, part_gradients
from pallas_kernels.attention.remat import name_outputs
from pallas_kernels.attention.scores import accumulator_dtype, merge, row_delta


@dataclasses.dataclass(frozen=True)
class RingOptions:
    """Static arguments (hashable, not differentiated) of ring attention."""

    axis_name: str
    devices: int
    causal: bool
    layout: str
    options: PartOptions
    expand: Expansion | None = None


Tree = TypeVar("Tree")
Sums = TypeVar("Sums")
Source = tuple[jax.Array, ...]
"""Arrays [B, T, ...] of one shape. A message is these, concatenated along their first dim."""
Index = int | jax.Array
"""Number of a chunk, known while tracing or traced."""


class _Tile(NamedTuple):
    """A query chunk and a key chunk, both on this device, whose attention is computed in one step of the ring.

    A traced index selects a chunk; a traced `active` that is False skips the tile.
    """

    query: Index
    key: Index
    active: jax.Array | None = None


class _Gradients(NamedTuple):
    """Sums in float32 over the pairs of chunks so far; None for 0."""

    queries: list[Any]
    """Gradient of each chunk of queries."""
    parameters: Any
    """Gradient of the expansion's parameters."""


def _tiles_of_step(ring: RingOptions, step: int) -> list[_Tile]:
    """Return the pairs (query chunk, key chunk) that this device computes in step `step` >= 1 of the ring.

    In each pair every query sees every key.
    """
    if not ring.causal:
        return [_Tile(0, 0)]
    before = lax.axis_index(ring.axis_name) >= step
    if ring.layout == "contiguous":
        return [_Tile(0, 0, before)]
    later = jnp.where(before, 0, 1)
    return [_Tile(1, 0), _Tile(later, later)]


def _chunks(ring: RingOptions, x: jax.Array, dim: int = 1) -> list[jax.Array]:
    return split(x, ring.layout, dim) if ring.causal else [x]


def _take(parts: list[jax.Array], index: Index) -> jax.Array:
    return parts[index] if isinstance(index, int) else jnp.where(index == 0, parts[0], parts[1])


def _selections(index: Index, count: int) -> list[bool | jax.Array]:
    """Return for each of `count` chunks whether `index` selects it: True, False, or a traced boolean."""
    return [index == part for part in range(count)]


def _if_active(active: jax.Array | None, function: Callable[[], Any], operands: Sequence[jax.Array]) -> Any:
    """Return function() if `active` is None or True, else zeros of the shapes that it would return.

    Args:
        active: boolean of this device; None: the tile is active on all devices.
        function: reads `operands`.
        operands: arrays that vary over the mesh axes over which the results do.
    """
    if active is None:
        return function()
    # `jax.shard_map` checks that both branches vary over the same axes; plain zeros would vary over none.
    either = operands[0].ravel()[0] == operands[1].ravel()[0]
    zeros = [jnp.where(either, zero, zero) for x in jax.eval_shape(function) for zero in [jnp.zeros(x.shape, x.dtype)]]
    return lax.cond(active, lambda: list(function()), lambda: zeros)


def _ids_of(ids: jax.Array | None, ring: RingOptions, step: int) -> list[jax.Array] | None:
    """Return the segment ids of the keys that this device holds in a step, from those of all devices [n, B, T]."""
    if ids is None:
        return None
    source = (lax.axis_index(ring.axis_name) - step) % ring.devices
    return _chunks(ring, lax.dynamic_index_in_dim(ids, source, keepdims=False))


def _pair(query_ids: list | None, key_ids: list | None, tile: _Tile) -> tuple | None:
    if query_ids is None or key_ids is None:
        return None
    return _take(query_ids, tile.query), _take(key_ids, tile.key)


def _send_after(sent: jax.Array, after: Tree, axis_name: str) -> tuple[jax.Array, Tree]:
    """Send a source of keys to the next device once `after` is computed; return the received one, and `after`.

    Otherwise XLA would issue all transfers at once.
    """
    sent, after = lax.optimization_barrier((sent, after))
    return receive_from_previous(sent, axis_name), after


def _order_after(rows: Tree, sums: Sums) -> tuple[Tree, Sums]:
    """Make whatever reads `rows` wait until `sums` are computed; return both unchanged.

    Otherwise XLA would slice the operands of all steps at once, and store them.
    """
    return lax.optimization_barrier((rows, sums))


def _forward(
    ring: RingOptions, q: jax.Array, source: Source, parameters: Any, ids: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    all_ids = None if ids is None else lax.all_gather(ids, ring.axis_name)
    query_ids = None if ids is None else _chunks(ring, ids)
    queries = _chunks(ring, q)
    received: Any = receive_from_previous(jnp.concatenate(source), ring.axis_name) if ring.devices > 1 else None
    unpack = _unpacking(ring, source, parameters)
    (k, v), _ = expand_keys(ring.expand, parameters, source)
    out, lse = attend_part(ring.options, Mask(ring.causal), (q, k, v), None if ids is None else (ids, ids))
    state = list(zip(_chunks(ring, out.astype(accumulator_dtype(q.dtype))), _chunks(ring, lse, 2), strict=True))
    for step in range(1, ring.devices):
        held = received
        if step + 1 < ring.devices:
            received, state = _send_after(held, state, ring.axis_name)
        keys = _chunks(ring, held)
        key_ids = _ids_of(all_ids, ring, step)
        queries, state = _order_after(queries, state)
        for tile in _tiles_of_step(ring, step):
            arrays, _ = _operands([queries], keys, tile, unpack)
            ids_here = _pair(query_ids, key_ids, tile)

            def attend(arrays: QKV = arrays, ids_here: tuple | None = ids_here) -> tuple:
                return attend_part(ring.options, Mask(causal=False), arrays, ids_here)

            found = _if_active(tile.active, attend, arrays)
            state = [
                _merge(old, found, selected, tile.active)
                for old, selected in zip(state, _selections(tile.query, len(state)), strict=True)
            ]
    outs, lses = zip(*state, strict=True)
    return jnp.concatenate(outs, axis=1).astype(q.dtype), jnp.concatenate(lses, axis=2)


def _unpacking(ring: RingOptions, source: Source, parameters: Any) -> Callable[[jax.Array], tuple]:
    """Return `expand_keys` as a function of the concatenated arrays of a source."""
    return lambda packed: expand_keys(ring.expand, parameters, jnp.split(packed, len(source)))


def _operands(
    rows: list[list[jax.Array]], keys: list[jax.Array], tile: _Tile, unpack: Callable[[jax.Array], tuple]
) -> tuple[Any, Callable]:
    """Return the arrays for one pair of chunks: (queries, keys, values, then the other per-query arrays of `rows`).

    Also return the function that pulls gradients of keys and values back to those of their source.

    The barrier prevents XLA from fusing the slices with the kernel, as no transfer would overlap with that fusion.
    """
    query, *others = (_take(parts, tile.query) for parts in rows)
    (k, v), pull_back = unpack(_take(keys, tile.key))
    return lax.optimization_barrier((query, k, v, *others)), pull_back


def _merge(
    old: tuple, found: tuple, selected: bool | jax.Array, active: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    if selected is False:
        return old
    out, lse = found
    for condition in (selected, active):
        if isinstance(condition, jax.Array):
            lse = jnp.where(condition, lse, -jnp.inf)
    return merge(old, (out, lse))


def _backward(ring: RingOptions, saved: tuple, cotangents: tuple) -> tuple:
    # Without the barrier XLA would reuse the keys received in the forward, and hold them until the backward.
    (q, source, parameters, ids, out, lse), (d_out, d_lse) = lax.optimization_barrier((saved, cotangents))
    all_ids = None if ids is None else lax.all_gather(ids, ring.axis_name)
    query_ids = None if ids is None else _chunks(ring, ids)
    delta = row_delta(out, d_out, d_lse)
    rows = [
        _chunks(ring, q),
        _chunks(ring, d_out.astype(q.dtype)),
        _chunks(ring, lse, 2),
        _chunks(ring, delta, 2),
    ]

    unpack = _unpacking(ring, source, parameters)

    def add(
        tile: _Tile, mask: Mask, keys: list, key_ids: list | None, sums: _Gradients, d_keys: list
    ) -> tuple[_Gradients, list]:
        operands, pull_back = _operands(rows, keys, tile, unpack)
        ids_here = _pair(query_ids, key_ids, tile)
        found = _if_active(
            tile.active, lambda: part_gradients(ring.options, mask, operands[:3], ids_here, operands[3:]), operands
        )
        d_parameters, d_source = pull_back(found[1:])
        d_q = _add(sums.queries, found[0], tile.query)
        sums = _Gradients(d_q, add_trees(sums.parameters, d_parameters))
        return sums, _add(d_keys, jnp.concatenate(d_source), tile.key)

    packed = jnp.concatenate(source)
    own = _chunks(ring, packed)
    sums = _Gradients([None] * len(own), None)
    d_own = [None] * len(own)
    d_sent = None
    received: Any = receive_from_previous(packed, ring.axis_name) if ring.devices > 1 else None
    # One whole pair of chunks of this device's own keys overlaps with the first transfer; the others with the last one,
    # in which the gradients return to their owner.
    for tile in [_Tile(1, 0)] if len(own) == 2 else []:
        sums, d_own = add(tile, Mask(causal=False), own, query_ids, sums, d_own)
    for step in range(1, ring.devices):
        held = received
        if step + 1 < ring.devices:
            received, sums = _send_after(held, sums, ring.axis_name)
        keys = _chunks(ring, held)
        key_ids = _ids_of(all_ids, ring, step)
        rows, sums = _order_after(rows, sums)
        d_keys = [None] * len(keys)
        tiles = _tiles_of_step(ring, step)
        for tile in tiles:
            if tile is tiles[-1] and d_sent is not None:
                # Keys are sent during the first tile and gradients during the last: one transfer at a time.
                d_sent, sums = _send_after(d_sent, sums, ring.axis_name)
            sums, d_keys = add(tile, Mask(causal=False), keys, key_ids, sums, d_keys)
        step_gradient = _join(d_keys)
        d_sent = step_gradient if d_sent is None else d_sent + step_gradient
    if d_sent is not None:
        d_sent, sums = _send_after(d_sent, sums, ring.axis_name)
    rows, sums = _order_after(rows, sums)
    for chunk in range(len(own)):
        sums, d_own = add(_Tile(chunk, chunk), Mask(ring.causal), own, query_ids, sums, d_own)
    # The received gradients are used only after all computation, so that the transfer overlaps with it.
    d_sent, sums, d_own = lax.optimization_barrier((d_sent, sums, d_own))
    total = _join(d_own) if d_sent is None else _join(d_own) + d_sent
    d_source = tuple(jnp.split(total, len(source)))
    gradients = _join(sums.queries), d_source, sums.parameters
    return *cast_like(gradients, (q, source, parameters)), None


def _join(parts: list[Any]) -> jax.Array:
    return jnp.concatenate(parts, axis=1)


def _add(parts: list[Any], found: jax.Array, index: Index) -> list[Any]:
    """Return the chunks' gradient sums (None for 0) with a gradient added, in float32, to that of chunk `index`."""
    wide = found.astype(accumulator_dtype(found.dtype))
    sums = []
    for part, selected in zip(parts, _selections(index, len(parts)), strict=True):
        term = None if selected is False else jnp.where(selected, wide, 0) if isinstance(selected, jax.Array) else wide
        sums.append(term if part is None else part if term is None else part + term)
    return sums


def _forward_rule(ring: RingOptions, q: jax.Array, source: Source, parameters: Any, ids: jax.Array | None) -> tuple:
    out, lse = name_outputs(*_forward(ring, q, source, parameters, ids))
    return (out, lse), (q, source, parameters, ids, out, lse)


attend_ring = jax.custom_vjp(_forward, nondiff_argnums=(0,))
"""Return out [B, T, N, H] and lse [B, N, T] of this device's queries over all keys.

The arguments are the static `RingOptions`, then q, the arrays and the parameters of a `KeySource`, and segment ids (or
None).
"""
attend_ring.defvjp(_forward_rule, _backward)
