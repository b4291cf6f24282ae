"""Backward kernel of attention for Hopper that computes all gradients for wide heads, such as head dim 256.

At such head dims a warpgroup's registers have no room for dK and dV of 64 keys. So here two warpgroups share 64 keys:

- scores and their gradients: each computes those of half of a tile's queries, over the whole head dim;
- dK, dV and dQ: each computes half of the columns, for all keys (or queries) of the tile.

The softmax weights and score gradients of a tile pass through shared memory, where both read them as left operands.
dK and dV stay in registers until all tiles are visited; dQ is added to a float32 array in global memory, as in
`mosaic_backward` (FlashAttention-3, Shah et al., arXiv:2407.08608): five products for each tile, where separate kernels
need eight. The order of the sums of dQ depends on timing, so its last bit may differ from run to run.

While the tensor cores compute a tile's gradients, they are also given the next tile's scores. The queries of that tile
must have been loaded by then, and so queries have two buffers, while d_out has one.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.attention import mosaic_scores as scoring
from pallas_kernels.attention.mosaic_config import KernelConfig, read_visits
from pallas_kernels.attention.mosaic_residuals import Inputs, Place, Residuals
from pallas_kernels.attention.request import Segments
from pallas_kernels.attention.visible_tiles import query_runs
from pallas_kernels.hopper import pipeline, wgmma
from pallas_kernels.hopper.pipeline import Ring
from pallas_kernels.hopper.wgmma import ROWS, Accumulator
from pallas_kernels.mosaic_api import Index, Ref, pl, plgpu

KEYS = ROWS
"""Keys of a program."""
QUERIES = ROWS
"""Queries of a tile."""
_GROUPS = 2
"""Computing warpgroups."""
_HALF = QUERIES // _GROUPS
"""Queries of a tile whose scores a warpgroup computes."""
_STAGED = 32
"""Columns of dQ that are stored at a time: 128 bytes of float32, one swizzle."""


class _Buffers(NamedTuple):
    """Shared memory and barriers.

    The leading dim counts buffers of queries (q, lse, query_ids), of d_out (d_out, delta), of tiles (weights,
    gradients), or warpgroups and their buffers (d_q).
    """

    k: Ref
    v: Ref
    q: Ref
    d_out: Ref
    lse: Ref
    delta: Ref
    key_ids: Ref | None
    query_ids: Ref | None
    weights: Ref
    gradients: Ref
    d_q: Ref
    own_full: Ref
    q_full: Ref
    d_out_full: Ref
    delta_full: Ref
    q_empty: Ref
    d_out_empty: Ref
    exchanged: Ref


def all_gradients(
    config: KernelConfig,
    residuals: Residuals,
    schedule: tuple[jax.Array, ...],
    segments: Segments | None,
    d_q: jax.Ref,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """Compute dK and dV of attention, and accumulate dQ into `d_q`.

    Heads of values may be narrower than those of keys, V < H.

    Args:
        config: Static description of the kernel, with tiles of 64 queries by 64 keys and 2 stages.
        residuals: Arrays of the forward.
        schedule: Tiles that each block of keys visits, from `tiles.query_schedule`, in descending order.
        segments: int32 [B, T] and [B, S], or None.
        d_q: Reference to float32 [copies, B, T, N, H] (`copies_of_query_gradient`), to which dQ less the factor
            `Options.scale` is added.

    Returns:
        dK [B, S, K, H] and dV [B, S, K, V]; float32 with a leading dim of parts, still to be summed over these,
        if `config.head_parts` is more than 1.

    Raises:
        ValueError: the kernel has no such tiles, or the parts do not divide the query heads of a key head.
    """
    batch, key_length, num_kv_heads, head_dim = residuals.k.shape
    dtype = residuals.k.dtype
    parts = config.head_parts
    if (config.query_block, config.key_block, config.warpgroups) != (QUERIES, KEYS, _GROUPS):
        raise ValueError(f"has tiles of {QUERIES} queries by {KEYS} keys and {_GROUPS} warpgroups, got {config}")
    if residuals.q.shape[2] % (num_kv_heads * parts):
        raise ValueError(f"{parts} parts of the query heads must divide a key head's share of {residuals.q.shape[2]}")
    packed = segments is not None
    stages = config.stages
    value_dim = residuals.v.shape[3]
    columns = min(head_dim, value_dim) // _GROUPS
    # All operands have one layout in shared memory, with a swizzle no wider than the narrowest slice in a product.
    slices = min(columns, _HALF)
    exchange = config.tiled_smem((2, KEYS, QUERIES), dtype, slices)
    scratch = _Buffers(
        k=config.tiled_smem((KEYS, head_dim), dtype, slices),
        v=config.tiled_smem((KEYS, value_dim), dtype, slices),
        q=config.tiled_smem((stages, QUERIES, head_dim), dtype, slices),
        d_out=config.tiled_smem((1, QUERIES, value_dim), dtype, slices),
        lse=plgpu.SMEM((stages, QUERIES), jnp.float32),
        delta=plgpu.SMEM((1, QUERIES), jnp.float32),
        key_ids=plgpu.SMEM((KEYS,), jnp.int32) if packed else None,
        query_ids=plgpu.SMEM((stages, QUERIES), jnp.int32) if packed else None,
        weights=exchange,
        gradients=exchange,
        d_q=config.tiled_smem((_GROUPS, 2, QUERIES, _STAGED), jnp.float32),
        own_full=plgpu.Barrier(num_arrivals=3 if packed else 2),
        q_full=plgpu.Barrier(num_arrivals=3 if packed else 2, num_barriers=stages),
        d_out_full=plgpu.Barrier(),
        delta_full=plgpu.Barrier(),
        q_empty=plgpu.Barrier(num_arrivals=_GROUPS, num_barriers=stages),
        d_out_empty=plgpu.Barrier(num_arrivals=_GROUPS, num_barriers=1),
        exchanged=plgpu.Barrier(num_arrivals=_GROUPS),
    )
    outputs = tuple(
        jax.ShapeDtypeStruct((parts, *x.shape), jnp.float32) if parts > 1 else jax.ShapeDtypeStruct(x.shape, dtype)
        for x in (residuals.k, residuals.v)
    )
    kernel = config.kernel(
        "attention_wide_backward",
        functools.partial(_body, config),
        out_type=outputs,
        grid=(num_kv_heads * parts, pl.cdiv(key_length, KEYS), batch),
        grid_names=("head", "block", "batch"),
        scratch_types=scratch,
        synchronises=True,
    )
    return kernel(residuals, schedule, segments, d_q)


def _body(
    config: KernelConfig,
    inputs: Inputs,
    schedule: tuple[Ref, ...],
    ids: Segments | None,
    d_q: Ref,
    d_k: Ref,
    d_v: Ref,
    *scratch: Ref,
) -> None:
    inputs = Inputs(*inputs)
    buffers = _Buffers(*scratch)
    warpgroup, batch, head, block = (lax.axis_index(name) for name in ("warpgroup", "batch", "head", "block"))
    # The order of work is that of `mosaic_backward`.
    runs = query_runs(config.options.mask, config.blocks, ids is not None, descending=True)
    visits = read_visits(schedule, batch, block, runs, descending=True).repeat(_group(inputs))
    place = Place(batch, head, block * KEYS, visits)
    pipeline.specialize(
        warpgroup,
        _GROUPS,
        functools.partial(_compute, config, inputs, buffers, place, (d_k, d_v), d_q),
        functools.partial(_load, config, inputs, ids, buffers, place),
    )


def _group(inputs: Inputs) -> int:
    """Return how many query heads a program visits."""
    return inputs.q.shape[2] // lax.axis_size("head")


def _d_out_ring(config: KernelConfig) -> Ring:
    return Ring(1, config.interpret)


def _load(config: KernelConfig, inputs: Inputs, ids: Segments | None, buffers: _Buffers, place: Place) -> None:
    """Load the program's keys and values, then the blocks of queries that see them, for every query head of the group.

    Queries are loaded once more than there are tiles, because the scores of the next tile are computed even after the
    last one.
    """
    group = _group(inputs)
    visits = place.visits
    keys = place.batch, pl.ds(place.first, KEYS), lax.div(place.head, config.head_parts)
    plgpu.copy_gmem_to_smem(inputs.k.at[keys], buffers.k, buffers.own_full)
    plgpu.copy_gmem_to_smem(inputs.v.at[keys], buffers.v, buffers.own_full)
    if ids is not None and buffers.key_ids is not None:
        plgpu.copy_gmem_to_smem(ids.key.at[keys[:2]], buffers.key_ids, buffers.own_full)

    def load(index: Index, slot: Index, acquire: Callable[..., None]) -> None:
        last = jnp.maximum(visits.total - 1, 0)
        head = place.head * group + lax.rem(index, group)
        # Without a visit the number of the tile may be anything.
        tile = jnp.maximum(visits.tile(jnp.minimum(index, last)), 0)
        rows = pl.ds(tile * QUERIES, QUERIES)
        acquire(buffers.q_empty)
        full = buffers.q_full.at[slot]
        plgpu.copy_gmem_to_smem(inputs.q.at[place.batch, rows, head], buffers.q.at[slot], full)
        plgpu.copy_gmem_to_smem(inputs.lse.at[place.batch, head, rows], buffers.lse.at[slot], full)
        if ids is not None and buffers.query_ids is not None:
            plgpu.copy_gmem_to_smem(ids.query.at[place.batch, rows], buffers.query_ids.at[slot], full)

        @pl.when(index < visits.total)
        def _():
            _d_out_ring(config).acquire(index, buffers.d_out_empty)
            plgpu.copy_gmem_to_smem(inputs.d_out.at[place.batch, rows, head], buffers.d_out.at[0], buffers.d_out_full)
            plgpu.copy_gmem_to_smem(inputs.delta.at[place.batch, head, rows], buffers.delta.at[0], buffers.delta_full)

    config.ring.produce(0, visits.total + 1, load)
    config.ring.drain(visits.total + 1, buffers.q_empty)
    _d_out_ring(config).drain(visits.total, buffers.d_out_empty)


class _State(NamedTuple):
    """Loop state of a warpgroup: the products of the next tile, and its sums of dK and dV.

    Attributes:
        products: Products q.k of the next tile, [keys, half of the queries].
        d_k: Half of the columns of dK, without the scale, [keys, H / 2].
        d_v: Half of the columns of dV, [keys, V / 2].
    """

    products: jax.Array
    d_k: jax.Array
    d_v: jax.Array


def _compute(
    config: KernelConfig, inputs: Inputs, buffers: _Buffers, place: Place, outputs: tuple[Ref, Ref], d_q: Ref
) -> None:
    """Compute and store half of the columns of dK and dV, and of the part of dQ that comes from the program's keys."""
    plgpu.barrier_wait(buffers.own_full)
    key_ids = None if buffers.key_ids is None else wgmma.load_rows(buffers.key_ids)
    group = _group(inputs)
    visits = place.visits

    def step(masked: bool, index: Index, state: _State) -> _State:
        tile = visits.tile(index)
        head = place.head * group + lax.rem(index, group)
        copy = lax.axis_index("block") if config.interpret else 0
        target = d_q.at[copy, place.batch, pl.ds(tile * QUERIES, QUERIES), head]
        visited = _Visited(index, config.ring.slot(index), tile * QUERIES, place.first, key_ids, masked)
        return _visit(config, buffers, state, visited, target)

    def first_scores(scores: Accumulator) -> jax.Array:
        plgpu.barrier_wait(buffers.q_full.at[0])
        _start_scores(buffers, 0, scores)
        return scores.load()

    products = wgmma.accumulate(first_scores, (KEYS, _HALF), interpret=config.interpret)
    zeros = (wgmma.zeros(KEYS, own.shape[-1] // _GROUPS) for own in (buffers.k, buffers.v))
    state = visits.fold(step, _State(products, *zeros))
    config.ring.release(config.ring.slot(visits.total), buffers.q_empty)
    # The other warpgroup may still read the keys, which the results are about to replace.
    plgpu.barrier_arrive(buffers.exchanged)
    plgpu.barrier_wait(buffers.exchanged)
    _store(config, buffers, place, outputs, (state.d_k * config.options.scale, state.d_v))


def _columns(own: Ref) -> Any:
    """Return the slice of the columns of the keys or values `own` whose gradients this warpgroup computes."""
    columns = own.shape[-1] // _GROUPS
    return pl.ds(lax.axis_index("warpgroup") * columns, columns)


def _queries(own: bool = True) -> Any:
    """Return the slice of a tile's queries whose scores this warpgroup computes, or the other one."""
    warpgroup = lax.axis_index("warpgroup")
    return pl.ds((warpgroup if own else 1 - warpgroup) * _HALF, _HALF)


def _start_scores(buffers: _Buffers, slot: Index, scores: Accumulator) -> None:
    scores.add(buffers.k, buffers.q.at[slot, _queries()].transpose((1, 0)))


class _Visited(NamedTuple):
    """The tile whose contribution to the gradients is computed: its number, and where its queries and keys begin."""

    number: Index
    slot: Index
    first_query: Index
    first_key: Index
    key_ids: jax.Array | None
    masked: bool


def _weigh(
    config: KernelConfig, buffers: _Buffers, visited: _Visited, products: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Return the softmax weights [keys, half of the queries] of a tile, and the scores if they are soft-capped."""
    capped = scoring.cap(config, products)
    queries = _queries()
    lse = wgmma.broadcast_column_values(wgmma.load_columns(buffers.lse.at[visited.slot, queries]), capped)
    weights = jnp.exp2(capped * scoring.base2_factor(config) - lse)
    capped = None if config.options.soft_cap is None else capped
    if not visited.masked:
        return weights, capped
    pair = None
    if visited.key_ids is not None and buffers.query_ids is not None:
        ids = wgmma.load_columns(buffers.query_ids.at[visited.slot, queries])
        pair = wgmma.broadcast_column_values(ids, weights), wgmma.broadcast_row_values(visited.key_ids, weights)
    first_query = visited.first_query + lax.axis_index("warpgroup") * _HALF
    return scoring.mask_tile(config, weights, 0.0, first_query, visited.first_key, pair, keys_are_rows=True), capped


def _differentiate(
    config: KernelConfig,
    buffers: _Buffers,
    visited: _Visited,
    products: jax.Array,
    sums: tuple[Accumulator, Accumulator],
    d_weights: Accumulator,
) -> None:
    """Compute this warpgroup's softmax weights and score gradients of a tile, and pass them to the other warpgroup.

    Their products for dV and dK (`sums`) start at once, with operands in registers.

    Each tile uses the buffers of the last but one: by the time at which a warpgroup computes the next tile, the other
    one has exchanged the last tile, and so has read those of the tile before.
    """
    (sums_v, sums_k), turn, queries = sums, lax.rem(visited.number, 2), _queries()
    plgpu.barrier_wait(buffers.d_out_full)
    d_weights.add(buffers.v, buffers.d_out.at[0, queries].transpose((1, 0)))
    weights, capped = _weigh(config, buffers, visited, products)
    left = weights.astype(buffers.weights.dtype)
    sums_v.add(left, buffers.d_out.at[0, queries, _columns(buffers.v)])
    buffers.weights.at[turn, :, queries][...] = left
    # The compiler moves nothing past the loop of a wait, and would otherwise wait for the product first.
    plgpu.barrier_wait(buffers.delta_full)
    delta = wgmma.broadcast_column_values(wgmma.load_columns(buffers.delta.at[0, queries]), weights)
    gradient = scoring.score_gradient(weights, d_weights.load(pending=1), delta, capped)
    left = gradient.astype(buffers.gradients.dtype)
    sums_k.add(left, buffers.q.at[visited.slot, queries, _columns(buffers.k)])
    buffers.gradients.at[turn, :, queries][...] = left
    plgpu.commit_smem()
    plgpu.barrier_arrive(buffers.exchanged)


def _visit(config: KernelConfig, buffers: _Buffers, state: _State, visited: _Visited, d_q: Ref) -> _State:
    """Add a block of queries' contribution to dK, dV and dQ, and compute the next block's scores."""
    turn = lax.rem(visited.number, 2)
    columns = _columns(buffers.k)
    others = _queries(own=False)
    weights = buffers.weights.at[turn]
    gradients = buffers.gradients.at[turn]
    following = config.ring.slot(visited.number + 1)

    def finish(part: Accumulator, scores: Accumulator) -> jax.Array:
        _start_scores(buffers, following, scores)
        if not config.interpret:
            # Wait for the first of the four products in flight, the last one that reads d_out.
            plgpu.wgmma_wait(3)
        _d_out_ring(config).release(0, buffers.d_out_empty)
        _add_columns(config, buffers, d_q, part.load(pending=2))
        return scores.load()

    def use_exchanged(sums_v: Accumulator, sums_k: Accumulator, part: Accumulator) -> jax.Array:
        sums_v.add(weights.at[:, others], buffers.d_out.at[0, others, _columns(buffers.v)])
        part.add(gradients.transpose((1, 0)), buffers.k.at[:, columns])
        sums_k.add(gradients.at[:, others], buffers.q.at[visited.slot, others, columns])
        plgpu.barrier_wait(buffers.q_full.at[following])
        return wgmma.accumulate(functools.partial(finish, part), (KEYS, _HALF), interpret=config.interpret)

    def multiply(sums_v: Accumulator, sums_k: Accumulator) -> _State:
        start = functools.partial(_differentiate, config, buffers, visited, state.products, (sums_v, sums_k))
        wgmma.accumulate(start, (KEYS, _HALF), interpret=config.interpret)
        plgpu.barrier_wait(buffers.exchanged)
        if not config.interpret:
            plgpu.wgmma_wait(0)
        shape = KEYS, buffers.k.shape[-1] // _GROUPS
        use = functools.partial(use_exchanged, sums_v, sums_k)
        products = wgmma.accumulate(use, shape, interpret=config.interpret)
        return _State(products, sums_k.load(), sums_v.load())

    state = wgmma.accumulate(multiply, state.d_v, state.d_k, interpret=config.interpret)
    config.ring.release(visited.slot, buffers.q_empty)
    return state


def _store_pieces(buffers: _Buffers, values: jax.Array, write: Callable[[Ref, Any], None]) -> None:
    """Store float32 values [64, H / 2] by write(buffer, columns), in pieces that two buffers hold in turn."""
    columns = values.shape[1]
    for number, first in enumerate(range(0, columns, _STAGED)):
        staging = buffers.d_q.at[lax.axis_index("warpgroup"), number % 2]
        # After an odd number of pieces the last one, in the same buffer as the next first, may still be in use.
        even = all(own.shape[-1] // _GROUPS // _STAGED % 2 == 0 for own in (buffers.k, buffers.v))
        pending = 1 if number or even else 0
        plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
        staging[...] = values[:, first : first + _STAGED]
        plgpu.commit_smem()
        write(staging, pl.ds(lax.axis_index("warpgroup") * columns + first, _STAGED))


def _add_columns(config: KernelConfig, buffers: _Buffers, d_q: Ref, values: jax.Array) -> None:
    """Add this warpgroup's columns of a tile's dQ to `d_q` [queries, H] in global memory."""
    reduction = None if config.interpret else "add"
    _store_pieces(
        buffers,
        values,
        lambda staging, columns: plgpu.copy_smem_to_gmem(staging, d_q.at[:, columns], reduction_op=reduction),
    )


def _store(
    config: KernelConfig,
    buffers: _Buffers,
    place: Place,
    outputs: tuple[Ref, Ref],
    values: tuple[jax.Array, jax.Array],
) -> None:
    """Store this warpgroup's columns of dK and dV, through the memory that held the keys and values."""
    part = place.batch, pl.ds(place.first, KEYS), lax.div(place.head, config.head_parts)
    if config.head_parts > 1:
        target = lax.rem(place.head, config.head_parts), *part
        for ref, value in zip(outputs, values, strict=True):
            _store_pieces(
                buffers,
                value,
                lambda staging, columns, to=ref.at[target]: plgpu.copy_smem_to_gmem(staging, to.at[:, columns]),
            )
    else:
        for staging, value in zip((buffers.k, buffers.v), values, strict=True):
            staging.at[:, _columns(staging)][...] = value.astype(staging.dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(buffers.exchanged)
        plgpu.barrier_wait(buffers.exchanged)
        # Each warpgroup stores one of the results, all columns of it.
        for number, (staging, ref) in enumerate(zip((buffers.k, buffers.v), outputs, strict=True)):

            @pl.when(lax.axis_index("warpgroup") == number)
            def _(staging: Ref = staging, ref: Ref = ref) -> None:
                plgpu.copy_smem_to_gmem(staging, ref.at[part])

    # The program may end, and the next one begin, once its shared memory has been read.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
