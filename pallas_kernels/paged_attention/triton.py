"""Triton backend of paged attention for few new tokens: reads each page once, divides long sequences into ranges.

Decoding is limited by memory bandwidth: the keys of one sequence are split into ranges over as many programs as keep
all multiprocessors busy, whose results a second kernel combines (Flash-Decoding, Dao et al. 2023,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp

from pallas_kernels.low_bits.codecs import Fp8Codec
from pallas_kernels.low_bits.encoded import Encoded, Stored
from pallas_kernels.paged_attention.request import PagedAttentionRequest
from pallas_kernels.target import multiprocessors
from pallas_kernels.triton_support import triton_call, unsupported_target

_LEAST_CAPABILITY = (8, 0)
_LEAST_CAPABILITY_OF_FP8 = (8, 9)
_MOST_ROWS = 64
"""Pairs of a new token and a query head per key head: rows of one tile."""
_SHARED_WIDTHS = (64, 128, 256, 512)
"""Widths of values that are the first channels of their keys."""
_MOST_RANGES = 64
"""Largest number of ranges that the keys of a sequence are divided into."""
_PROGRAMS_PER_MULTIPROCESSOR = 4
"""Programs that run at a time: their registers and shared memory leave no room for a fifth one on an H200."""
_FEW_BLOCK_ELEMENTS = 8192
_MANY_BLOCK_ELEMENTS = 16384
"""Elements of the keys of one step of the loop, which then has 64 to 128 keys: for few programs, and for at least
twice as many as can run at a time."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """Sizes of a program of the paged attention kernel.

    Attributes:
        key_block: keys that the loop reads in one step, a power of two.
        warps: warps of a program.
        stages: stages of Triton's pipeline of loads. Pages take two of them, so that 3 and 4 hold the keys of one step
            in shared memory, 5 of two steps.
        ranges: ranges that the keys of a sequence are divided into; None: as many as can be computed at a time.
        rows: most queries of a program, a power of two.
        least_rows: fewest queries of a program, a power of two, at least the 16 rows of a tensor-core tile.
    """

    key_block: int
    warps: int = 4
    stages: int = 3
    ranges: int | None = None
    rows: int = _MOST_ROWS
    least_rows: int = 16


SHARED_TILE = Tile(64, warps=8, stages=2, rows=64)
"""Tile of latents, whose keys are wide: 576 channels in DeepSeek's models. The fastest of 25 on an H100."""


@dataclasses.dataclass(frozen=True)
class PagedAttentionPlan:
    """Compile-time constants of the Triton kernels for paged attention.

    Attributes:
        new_tokens: T.
        num_heads, key_heads: N and K.
        head_dim: H.
        value_dim: channels of a value, a power of two: H, or fewer if `shared`.
        shared: True if values are the first channels of their keys.
        page_size: tokens of a page.
        table_width: pages of a sequence at most.
        tile: see `Tile`.
        ranges: number of programs that share the keys of a sequence and head.
        scale, soft_cap, window: see `PagedAttentionRequest`.
        sinks: True if each query head has an attention sink.
        fp8: True if keys and values are in FP8 (e4m3); their products are then computed in float16.
    """

    new_tokens: int
    num_heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    shared: bool
    page_size: int
    table_width: int
    tile: Tile
    ranges: int
    scale: float
    soft_cap: float | None
    window: int | None
    sinks: bool = False
    fp8: bool = False

    @property
    def key_block(self) -> int:
        """Number of keys that a kernel's loop reads in one step, a power of two."""
        return self.tile.key_block

    @property
    def group(self) -> int:
        """Number of query heads per key head."""
        return self.num_heads // self.key_heads

    @property
    def rows(self) -> int:
        """Number of queries that read the same key head: new tokens times query heads per key head."""
        return self.new_tokens * self.group

    @property
    def padded_rows(self) -> int:
        """Number of queries of a program, rounded up to a power of two and to the tile's `least_rows`."""
        return min(max(self.tile.least_rows, 1 << (self.rows - 1).bit_length()), self.tile.rows)

    @property
    def row_blocks(self) -> int:
        """Number of programs that share the queries of a key head."""
        return -(-self.rows // self.padded_rows)

    @property
    def further_dim(self) -> int:
        """Number of channels of a key that are no value's."""
        return self.head_dim - self.value_dim

    @property
    def pair(self) -> int:
        """Number of channels that are read as one number."""
        return 2 if self.fp8 else 1

    @property
    def pair_factor(self) -> float:
        """Factor of the numbers that `first_of_pairs` and `second_of_pairs` return; 1 without FP8."""
        return 256.0 if self.fp8 else 1.0

    @property
    def padded_ranges(self) -> int:
        """Number of ranges that a sequence's keys are divided into, rounded up to a power of two."""
        return 1 << (self.ranges - 1).bit_length()


def unsupported_reason(request: PagedAttentionRequest) -> str | None:
    """Return the first reason why the Triton kernels cannot compute this call of paged attention, or None."""
    rows = request.q.shape[1] * request.q.shape[2] // request.key_heads
    reason = unsupported_tile(request)
    if reason is None and request.value_width is None and rows > _MOST_ROWS:
        return f"takes at most {_MOST_ROWS} pairs of a new token and a query head per key head; got {rows}"
    return reason


def unsupported_tile(request: PagedAttentionRequest) -> str | None:
    """Return why the kernels cannot compute a tile of this call's queries, or None; a call may have many tiles."""
    q = request.q
    k_pages = _numbers(request.k_pages)
    v_pages = _numbers(request.v_pages)
    if k_pages is None or v_pages is None:
        return f"reads no pages in fewer bits than FP8, or with scales; got {request}"
    fp8 = _is_fp8(request)
    if reason := unsupported_target(request.target, _LEAST_CAPABILITY_OF_FP8 if fp8 else _LEAST_CAPABILITY):
        return reason
    if (
        q.dtype not in (jnp.bfloat16, jnp.float16)
        or v_pages.dtype != k_pages.dtype
        or not (fp8 or k_pages.dtype == q.dtype)
    ):
        found = f"got {q.dtype} and {k_pages.dtype}"
        return f"needs queries, keys and values in bfloat16 or float16, or keys and values in FP8; {found}"
    if request.value_width is not None:
        further = q.shape[-1] - request.value_width
        if fp8:
            return f"reads no latents in FP8; got {request}"
        if request.value_width not in _SHARED_WIDTHS or further not in (0, 16, 32, 64, 128):
            return f"needs latents of 64, 128, 256 or 512 and 0 to 128 further channels; got {request}"
        return None
    if q.shape[-1] not in (32, 64, 128, 256):
        return f"needs a head_dim of 32, 64, 128 or 256; got {q.shape[-1]}"
    return None


def _numbers(stored: Stored) -> jax.Array | None:
    """Return the array of pages whose numbers are the keys or values themselves; None if they have to be decoded."""
    if not isinstance(stored, Encoded):
        return stored
    return stored.parts[0] if isinstance(stored.codec, Fp8Codec) and stored.order is None else None


def _is_fp8(request: PagedAttentionRequest) -> bool:
    """Return True if the keys of a call are in FP8."""
    numbers = _numbers(request.k_pages)
    return numbers is not None and numbers.dtype == jnp.float8_e4m3fn


def make_plan(request: PagedAttentionRequest, tile: Tile | None = None) -> PagedAttentionPlan:
    """Choose the compile-time constants of the kernels for a call, such as how many ranges keys are divided into."""
    batch, new_tokens, num_heads, head_dim = request.q.shape
    page_size = request.page_size
    key_heads = request.key_heads
    table_width = request.page_table.shape[1]
    # A few programs more than can run at a time would double the time.
    most = _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors()
    pairs = batch * key_heads
    elements = _MANY_BLOCK_ELEMENTS if pairs >= 2 * most else _FEW_BLOCK_ELEMENTS
    shared = request.value_width is not None
    plan = PagedAttentionPlan(
        new_tokens,
        num_heads,
        key_heads,
        head_dim,
        request.value_width or head_dim,
        shared,
        page_size,
        table_width,
        tile or (SHARED_TILE if shared else Tile(min(max(elements // head_dim, 64), 128))),
        1,
        float(request.scale),
        None if request.soft_cap is None else float(request.soft_cap),
        request.window,
        request.sinks is not None,
        _is_fp8(request),
    )
    blocks = -(-table_width * page_size // plan.key_block)
    programs = (multiprocessors() if shared else most) // (pairs * plan.row_blocks)
    return dataclasses.replace(plan, ranges=max(1, min(plan.tile.ranges or programs, blocks, _MOST_RANGES)))


def attend(request: PagedAttentionRequest, tile: Tile | None = None) -> jax.Array:
    """Compute paged attention with the Triton kernels: [B, T, N, V] in the dtype of the queries."""
    from pallas_kernels.paged_attention.triton_kernel import attend_kernel, combine_kernel

    plan = make_plan(request, tile)
    q = request.q
    major, minor = request.target.compute_capability or (0, 0)
    grid = (q.shape[0], plan.key_heads)
    partial = (*grid, plan.ranges, plan.rows)
    split = plan.ranges > 1
    out = jax.ShapeDtypeStruct((*q.shape[:3], plan.value_dim), q.dtype)
    sinks = request.lengths if request.sinks is None else request.sinks  # not read without sinks
    values, log_sums = triton_call(
        q,
        cast(jax.Array, _numbers(request.k_pages)),
        cast(jax.Array, _numbers(request.v_pages)),
        request.page_table,
        request.lengths,
        sinks,
        kernel=attend_kernel,
        out_shape=(
            jax.ShapeDtypeStruct((*partial, plan.value_dim), jnp.float32) if split else out,
            jax.ShapeDtypeStruct(partial if split else (1,), jnp.float32),
        ),
        grid=(plan.key_heads * plan.row_blocks, q.shape[0], plan.ranges),
        name="paged_attention",
        num_warps=plan.tile.warps,
        num_stages=plan.tile.stages,
        compute_capability=10 * major + minor,
        plan=plan,
    )
    if not split:
        return values
    return triton_call(
        values,
        log_sums,
        sinks,
        kernel=combine_kernel,
        out_shape=out,
        grid=(*grid, plan.rows),
        name="combine_paged_attention",
        num_warps=2 if plan.ranges <= 32 else 4,
        num_stages=1,
        compute_capability=10 * major + minor,
        plan=plan,
    )
