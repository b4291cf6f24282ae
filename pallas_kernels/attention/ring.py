"""Ring attention (Liu et al., arXiv:2310.01889): keys and values go around, each device attends to one part after another.

Step r attends to the keys that the device r places before holds. Under a causal mask with the layout "zigzag" such a
step is, on every device, two of the four pairs of chunks, each of them whole: the later queries see the earlier keys,
and besides either the earlier queries see the earlier keys (from a device before) or the later ones the later keys.
Which of the two is a selection of operands, not a branch, so that no device waits and no host is asked.

Backward dK and dV of a part travel along with it, in float32, and its last hop home runs beside the own keys' step.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.chunks import chunks_a_device, shift, split
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.part import PartOptions, attend_part, part_gradients
from pallas_kernels.attention.remat import name_outputs
from pallas_kernels.attention.scores import accumulator_dtype, merge, row_delta


@dataclasses.dataclass(frozen=True)
class Ring:
    """The static part of a call."""

    axis_name: str
    devices: int
    causal: bool
    layout: str
    options: PartOptions


class _Tile(NamedTuple):
    """Queries of one chunk that see all keys of one chunk. A traced index selects, a traced `living` skips."""

    query: Any
    key: Any
    living: jax.Array | None = None


def _tiles(ring: Ring, step: int) -> list[_Tile]:
    """What this device computes in a step after the first."""
    if not ring.causal:
        return [_Tile(0, 0)]
    before = lax.axis_index(ring.axis_name) >= step
    if ring.layout == "contiguous":
        return [_Tile(0, 0, before)]
    later = jnp.where(before, 0, 1)
    return [_Tile(1, 0), _Tile(later, later)]


def _cut(ring: Ring, x: jax.Array, dim: int = 1) -> list[jax.Array]:
    return split(x, ring.layout, dim) if ring.causal else [x]


def _take(parts: list[jax.Array], index: Any) -> jax.Array:
    return parts[index] if isinstance(index, int) else jnp.where(index == 0, parts[0], parts[1])


def _hits(index: Any, count: int) -> list[Any]:
    """For each part whether the index means it: True, False, or traced."""
    return [index == part for part in range(count)]


def _is_living(living: jax.Array | None, function: Any) -> Any:
    """function() where the tile lives, zeros elsewhere."""
    if living is None:
        return function()
    zeros = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(function)]
    return lax.cond(living, lambda: list(function()), lambda: zeros)


def _ids_of(ids: jax.Array | None, ring: Ring, step: int) -> list[jax.Array] | None:
    """Segment ids of the keys of a step, from those of all devices [n, B, T]."""
    if ids is None:
        return None
    source = (lax.axis_index(ring.axis_name) - step) % ring.devices
    return _cut(ring, lax.dynamic_index_in_dim(ids, source, keepdims=False))


def _pair(query_ids: list | None, key_ids: list | None, tile: _Tile) -> tuple | None:
    if query_ids is None or key_ids is None:
        return None
    return _take(query_ids, tile.query), _take(key_ids, tile.key)


def _send(kv: Any, after: Any, axis_name: str) -> tuple[Any, Any]:
    """(kv of the device before, `after`): it is sent only once `after` is there, lest XLA does all sends at once."""
    kv, after = lax.optimization_barrier((kv, after))
    return jax.tree.map(lambda x: shift(x, axis_name), kv), after


def _forward(
    ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    options, wide = ring.options, accumulator_dtype(q.dtype)
    everyone = None if ids is None else lax.all_gather(ids, ring.axis_name)
    query_ids = None if ids is None else _cut(ring, ids)
    kv = _cut(ring, k), _cut(ring, v)
    queries = _cut(ring, q)
    received = jax.tree.map(lambda x: shift(x, ring.axis_name), kv) if ring.devices > 1 else kv
    out, lse = attend_part(options, Mask(ring.causal), q, k, v, None if ids is None else (ids, ids))
    state = list(zip(_cut(ring, out.astype(wide)), _cut(ring, lse, 2), strict=True))
    for step in range(1, ring.devices):
        kv = received
        if step + 1 < ring.devices:
            received, state = _send(kv, state, ring.axis_name)
        key_ids = _ids_of(everyone, ring, step)
        for tile in _tiles(ring, step):
            arrays = _take(queries, tile.query), _take(kv[0], tile.key), _take(kv[1], tile.key)
            ids_here = _pair(query_ids, key_ids, tile)

            def attend(arrays: tuple = arrays, ids_here: tuple | None = ids_here) -> tuple:
                return attend_part(options, Mask(causal=False), *arrays, ids_here)

            found = _is_living(tile.living, attend)
            state = [
                _merge(old, found, hit, tile.living)
                for old, hit in zip(state, _hits(tile.query, len(state)), strict=True)
            ]
    outs, lses = zip(*state, strict=True)
    return jnp.concatenate(outs, axis=1).astype(q.dtype), jnp.concatenate(lses, axis=2)


def _merge(old: tuple, found: Any, hit: Any, living: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    if hit is False:
        return old
    out, lse = found
    for condition in (hit, living):
        if isinstance(condition, jax.Array):
            lse = jnp.where(condition, lse, -jnp.inf)
    return merge(old, (out, lse))


def _backward(ring: Ring, saved: tuple, cotangents: tuple) -> tuple:
    q, k, v, ids, out, lse = saved
    d_out, d_lse = cotangents
    options, wide = ring.options, accumulator_dtype(q.dtype)
    everyone = None if ids is None else lax.all_gather(ids, ring.axis_name)
    query_ids = None if ids is None else _cut(ring, ids)
    delta = row_delta(out, d_out, d_lse)
    rows = [_cut(ring, q), _cut(ring, d_out.astype(q.dtype)), _cut(ring, lse, 2), _cut(ring, delta, 2)]
    d_q = [jnp.zeros(x.shape, wide) for x in rows[0]]
    kv = received = _cut(ring, k), _cut(ring, v)
    d_kv: Any = None
    for step in range(1, ring.devices):
        if step == 1:
            received = jax.tree.map(lambda x: shift(x, ring.axis_name), kv)
        kv = received
        if step + 1 < ring.devices:
            received, d_q = _send(kv, d_q, ring.axis_name)
        if step > 1:
            d_kv, d_q = _send(d_kv, d_q, ring.axis_name)
        key_ids = _ids_of(everyone, ring, step)
        for tile in _tiles(ring, step):
            q_part, *row_parts = (_take(parts, tile.query) for parts in rows)
            k_part, v_part = (_take(parts, tile.key) for parts in kv)
            ids_here = _pair(query_ids, key_ids, tile)
            arguments = q_part, k_part, v_part, ids_here, row_parts

            def gradients(arguments: tuple = arguments) -> tuple:
                return part_gradients(options, Mask(causal=False), *arguments)

            q_found, *found = _is_living(tile.living, gradients)
            d_q = _add(d_q, q_found, tile.query)
            if d_kv is None:
                d_kv = tuple([jnp.zeros(x.shape, wide) for x in parts] for parts in kv)
            d_kv = tuple(_add(parts, x, tile.key) for parts, x in zip(d_kv, found, strict=True))
    home = d_kv if d_kv is None else jax.tree.map(lambda x: shift(x, ring.axis_name), d_kv)
    own_ids = None if ids is None else (ids, ids)
    own = part_gradients(options, Mask(ring.causal), q, k, v, own_ids, (d_out.astype(q.dtype), lse, delta))
    added = (d_q, *(home or ()))
    joined = [jnp.concatenate(parts, axis=1) for parts in added]
    total = [x.astype(wide) + y for x, y in zip(own, joined, strict=True)] if home else own
    return *(x.astype(like.dtype) for x, like in zip(total, (q, k, v), strict=True)), None


def _add(parts: list[jax.Array], found: jax.Array, index: Any) -> list[jax.Array]:
    """`parts` with `found` added to the one that the index means."""
    sums = []
    for part, hit in zip(parts, _hits(index, len(parts)), strict=True):
        if hit is False:
            sums.append(part)
        else:
            sums.append(part + (jnp.where(hit, found, 0) if isinstance(hit, jax.Array) else found))
    return sums


def _forward_rule(ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> tuple:
    out, lse = name_outputs(*_forward(ring, q, k, v, ids))
    return (out, lse), (q, k, v, ids, out, lse)


attend_around = jax.custom_vjp(_forward, nondiff_argnums=(0,))
"""out [B, T, N, H] and lse [B, N, T] of this device's queries and all keys; see `Ring` for the first argument."""
attend_around.defvjp(_forward_rule, _backward)
