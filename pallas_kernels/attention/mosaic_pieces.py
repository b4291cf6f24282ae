"""What the Hopper kernels share: their configuration, scores in base 2, masks, and accumulators.

The kernels work in powers of two: exp(x) is exp2(x * log2(e)), and the factor is folded into the scale.
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.request import Options
from pallas_kernels.mosaic_api import pl, plgpu

LOG2E = math.log2(math.e)
ROWS = 64  # of one wgmma: each warpgroup owns this many rows of a score tile


@dataclass(frozen=True)
class Config:
    """Static description of one kernel.

    Attributes:
        options: mask, scale and soft cap.
        length, key_length: T and S before padding.
        key_block: keys of a tile.
        query_block: queries of a tile.
        stages: tiles that are in flight from global memory.
        warpgroups: that compute; one more loads.
        programs: to start at most; each takes every so manieth tile.
        interpret: whether the kernel is interpreted on a CPU.
        turns: whether the forward's warpgroups give the tensor cores work in turn.
    """

    options: Options
    length: int
    key_length: int
    query_block: int
    key_block: int
    stages: int = 2
    warpgroups: int = 2
    programs: int = 132
    interpret: bool = False
    turns: bool = False

    @property
    def factor(self) -> float:
        """What the raw product (or the capped score) is multiplied with to be a power of two."""
        cap = self.options.soft_cap
        return (self.options.scale if cap is None else cap) * LOG2E

    def share_registers(self, computing: bool) -> None:
        """Gives this warpgroup its part of the 64 Ki registers: much to compute, little to load."""
        if computing:
            plgpu.set_max_registers({1: 240, 2: 240, 3: 160}[self.warpgroups], action="increase")
        else:
            plgpu.set_max_registers({1: 40, 2: 24, 3: 32}[self.warpgroups], action="decrease")

    def kernel(self, name: str, body: Callable, synchronises: bool = False, **parameters: Any) -> Callable:
        """`plgpu.kernel` with what is the same for all of our kernels; a profile shows the name.

        `synchronises`: the threads of a warpgroup never read what they write to shared memory, other than by TMA or
        wgmma after `commit_smem`, so that stores need no barriers around them.
        """
        return plgpu.kernel(
            body,
            kernel_name=name,
            num_threads=self.warpgroups + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                unsafe_no_auto_barriers=synchronises,
                reduction_scratch_bytes=0,  # no reduction here leaves a warp
            ),
            interpret=plgpu.InterpretGPUParams(detect_races=True) if self.interpret else None,
            **parameters,
        )


class Visits(NamedTuple):
    """The tiles of one block of queries or keys, counted from 0; those in [whole, end_whole) need no mask."""

    count: Any
    whole: Any
    end_whole: Any
    tile: Callable[[Any], Any]

    def fold(self, step: Callable, state: Any, start: Any = 0) -> Any:
        """Folds step(masked, count, state) over the tiles from `start` on."""
        whole, end_whole = jnp.maximum(self.whole, start), jnp.maximum(self.end_whole, start)
        state = lax.fori_loop(start, whole, functools.partial(step, True), state)
        state = lax.fori_loop(whole, end_whole, functools.partial(step, False), state)
        return lax.fori_loop(end_whole, self.count, functools.partial(step, True), state)


def read_visits(schedule: tuple, batch: Any, block: Any, descending: bool = False) -> Visits:
    """What `tiles.key_ranges` says of a block (in descending order if asked for), or what `tiles.key_lists` says."""
    table = schedule[0]
    row = batch if table.shape[0] > 1 else 0
    if len(schedule) == 2:
        counts = schedule[1]
        return Visits(counts[row, block, 1], 0, counts[row, block, 0], lambda count: table[row, block, count])
    first, first_whole, end_whole, end = (table[row, block, index] for index in range(4))
    if descending:
        return Visits(end - first, end - end_whole, end - first_whole, lambda count: end - 1 - count)
    return Visits(end - first, first_whole - first, end_whole - first, lambda count: first + count)


def tiled_smem(config: Config, shape: tuple[int, ...], dtype: Any, slice_columns: int = 0) -> Any:
    """Shared memory of shape [..., rows, columns] in the tiled and swizzled form that wgmma and TMA take.

    `slice_columns`: what products take of the columns (of this operand, or of the other one, whose form must be the
    same) at a time; 0 for all of them.
    """
    bits = jnp.dtype(dtype).itemsize * 8
    # A product that sums over the rows of a tile needs at least one swizzle's worth of them.
    rows_bytes = min(config.query_block, config.key_block) * bits // 8
    swizzle = min(plgpu.find_swizzle(shape[-1] * bits), plgpu.find_swizzle((slice_columns or shape[-1]) * bits))
    swizzle = min(swizzle, rows_bytes)
    transforms = (plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def zeros(rows: int, columns: int) -> jax.Array:
    """Float32 zeros in the layout of a wgmma accumulator."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA)


def row_values(value: float, rows: int) -> jax.Array:
    """One float32 for each row of a wgmma accumulator."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def along_rows(values: jax.Array, like: jax.Array) -> jax.Array:
    """[rows] -> [rows, columns]."""
    return lax.broadcast_in_dim(values, like.shape, [0])


def along_columns(values: jax.Array, like: jax.Array) -> jax.Array:
    """[columns] -> [rows, columns]."""
    return lax.broadcast_in_dim(values, like.shape, [1])


def multiply(shape: tuple[int, int], issue: Callable[[Any], None]) -> jax.Array:
    """The value of a fresh accumulator after the products that `issue(accumulator)` starts."""

    def scoped(accumulator: Any) -> jax.Array:
        issue(accumulator)
        return accumulator[...]

    return pl.run_scoped(scoped, plgpu.ACC(shape, jnp.float32))


def multiply_two(
    shape: tuple[int, int], issue: Callable[[Any, Any], None], first: Callable[[jax.Array], Any]
) -> tuple[Any, jax.Array]:
    """first(value of the first product) and the value of the second, which runs meanwhile.

    `issue(one, other)` starts exactly one product into each of the two accumulators.
    """

    def scoped(one: Any, other: Any) -> tuple[Any, jax.Array]:
        issue(one, other)
        result = first(plgpu.wgmma_accumulator_load(one, wait_n=1))
        return result, plgpu.wgmma_accumulator_load(other, wait_n=0)

    return pl.run_scoped(scoped, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))


def multiply_while_adding(
    config: Config,
    shape: tuple[int, int],
    issue: Callable[[Any], None],
    product: tuple[jax.Array, jax.Array, Any],
    issued: Callable[[], None],
    consume: Callable[[jax.Array], Any],
) -> tuple[Any, jax.Array]:
    """consume(value of the product that `issue` starts), and accumulator + left @ right, which runs meanwhile.

    `product` is (accumulator, left in registers, right in shared memory). `issued()` is called when both have started.
    """
    accumulator, left, right = product
    if config.interpret:
        scores = multiply(shape, issue)
        issued()
        return consume(scores), accumulator + jnp.dot(left, right[...], preferred_element_type=jnp.float32)

    def scoped(scores: Any, sums: Any) -> tuple[Any, jax.Array]:
        sums[...] = accumulator
        issue(scores)
        plgpu.wgmma(sums, left, right)
        issued()
        result = consume(plgpu.wgmma_accumulator_load(scores, wait_n=1))
        return result, plgpu.wgmma_accumulator_load(sums, wait_n=0)

    return pl.run_scoped(scoped, plgpu.ACC(shape, jnp.float32), plgpu.ACC(accumulator.shape, jnp.float32))


def add_products(
    config: Config, accumulators: tuple[jax.Array, ...], *products: tuple[Callable[[], jax.Array], Any]
) -> tuple[jax.Array, ...]:
    """accumulator + left() @ right for each, with `left()` in registers and `right` in shared memory.

    Each `left` is computed while the product before it runs; all of them are waited for at the end.
    """
    if config.interpret:
        # Interpret mode knows no left operand in registers and no accumulator with an initial value.
        return tuple(
            accumulator + jnp.dot(left(), right[...], preferred_element_type=jnp.float32)
            for accumulator, (left, right) in zip(accumulators, products, strict=True)
        )

    def issue(references: tuple[Any, ...]) -> None:
        for reference, (left, right) in zip(references, products, strict=True):
            plgpu.wgmma(reference, left(), right)

    return pl.run_state(issue)(tuple(plgpu.ACC.init(accumulator) for accumulator in accumulators))


def weight_gradient(
    config: Config, weights: jax.Array, d_weights: jax.Array, delta: jax.Array, capped: jax.Array | None
) -> jax.Array:
    """The gradient of the products q.k, less the factor `Options.scale`, from that of the softmax weights.

    Args:
        weights, d_weights, delta: of one shape, `delta` broadcast.
        capped: tanh of the scaled products; None without a soft cap.
    """
    gradient = weights * (d_weights - delta)
    if capped is not None:
        gradient = gradient * (1.0 - capped * capped)
    return gradient


def release(config: Config, barrier: Any) -> None:
    """Tells the loading warpgroup that this one has read a buffer."""
    if config.interpret:
        # Loads are complete before the arrival, so hardware needs no fence before TMA writes the buffer again.
        # Interpret mode asks for one, and it reads operands of wgmma like any other value (`add_product`).
        plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)


def drain(stages: int, count: jax.Array, *barriers: Any) -> None:
    """The loading warpgroup waits until the last of `count` buffers are consumed: no barrier ends half observed."""

    def wait(index: jax.Array, _: None) -> None:
        for barrier in barriers:
            plgpu.barrier_wait(barrier.at[lax.rem(index, stages)])

    lax.fori_loop(jnp.maximum(count - stages, 0), count, wait, None)


def cap(config: Config, products: jax.Array) -> jax.Array:
    """Products q.k to what `Config.factor` makes powers of two of: soft-capped to -1..1, or unchanged."""
    if config.options.soft_cap is None:
        return products
    return jnp.tanh(products * (config.options.scale / config.options.soft_cap))


def late_factor(config: Config) -> float:
    """What the forward multiplies scores with in its softmax; one that is not positive is multiplied at once."""
    return config.factor if config.factor > 0 else 1.0


def fill(config: Config) -> float:
    """The score of masked entries: `late_factor` takes it to about -1e30.

    A power of two, so that the product is exact: rows that see nothing of a tile subtract it from itself.
    """
    return -(2.0 ** min(math.floor(math.log2(1e30 / late_factor(config))), 126))


def empty_below(config: Config) -> float:
    """Row maxima (as powers of two) below this belong to rows without a visible key."""
    return 0.5 * fill(config) * late_factor(config)


def mask_tile(
    config: Config,
    values: jax.Array,
    hidden: float,
    first_query: jax.Array,
    first_key: jax.Array,
    ids: tuple[jax.Array, jax.Array] | None,
    keys_are_rows: bool = False,
) -> jax.Array:
    """`values` of a tile with `hidden` where a key is not visible. (A layout hides whole tiles, never a part of one.)

    Args:
        values: [queries, keys], or [keys, queries] with `keys_are_rows`.
        first_query, first_key: positions of the tile's corner, counted from the start of q and of k.
        ids: segment numbers of the tile's queries and keys, broadcast to its shape; None without segments. Where the
            mask has global tokens, twice these numbers, and one more for such tokens.
    """
    mask = config.options.mask
    query_dim, key_dim = (1, 0) if keys_are_rows else (0, 1)

    def positions(dim: int, first: Any) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, values.shape, dim, layout=plgpu.Layout.WGMMA) + first

    offset = config.key_length - config.length
    if config.key_length % config.key_block:
        values = jnp.where(positions(key_dim, first_key) < config.key_length, values, hidden)
    distance = positions(query_dim, first_query - first_key + offset) - positions(key_dim, 0)
    if mask.causal:
        values = jnp.where(distance >= 0, values, hidden)
    near = [] if mask.window is None else [distance < mask.window]
    near += [] if mask.window_after is None else [distance > -mask.window_after]
    if near:
        seen = functools.reduce(operator.and_, near)
        if mask.global_tokens and ids is not None:
            seen = seen | (((ids[0] | ids[1]) & 1) == 1)
        elif mask.global_tokens:
            seen = seen | (positions(query_dim, first_query + offset) < mask.global_tokens)
            seen = seen | (positions(key_dim, first_key) < mask.global_tokens)
        values = jnp.where(seen, values, hidden)
    if ids is not None:
        shift = 1 if mask.global_tokens else 0
        values = jnp.where((ids[0] >> shift) == (ids[1] >> shift), values, hidden)
    return values
