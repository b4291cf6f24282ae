"""The attention forward in Triton, and the device functions that the backward shares with it.

A program owns a block of queries of one head and visits the key blocks that the mask leaves, first those that need no
mask. Scores are powers of two: `plan.output_scale` contains log2(e), as the hardware computes exp2.
"""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def load_rows(
    base,
    first,
    rows: tl.constexpr,
    heads: tl.constexpr,
    length: tl.constexpr,
    plan: tl.constexpr,
    left=0,
    width=None,
):
    """Load `rows` rows of one head (queries, keys or values), from row `first` on, as a tile [rows, width].

    The tile has the channels from `left` on, by default all: `width` None is `plan.width`. Elements past the head dim
    and past `length` are 0; `length` is None if no row is past it.
    """
    columns: tl.constexpr = plan.width if width is None else width
    row = tl.arange(0, rows)[:, None]
    column = left + tl.arange(0, columns)[None, :]
    pointers = base + first.to(tl.int64) * (heads * plan.head_dim) + (row * (heads * plan.head_dim) + column)
    if length is not None:
        values = tl.load(pointers, mask=(first + row < length) & (column < plan.head_dim), other=0.0)
    elif plan.width != plan.head_dim:
        values = tl.load(pointers, mask=column < plan.head_dim, other=0.0)
    else:
        values = tl.load(pointers)
    return values


@triton.jit
def store_rows(
    base,
    first,
    values,
    rows: tl.constexpr,
    heads: tl.constexpr,
    length: tl.constexpr,
    plan: tl.constexpr,
    left=0,
    width=None,
):
    """Write a tile to the rows `first`, `first` + 1, ... of one head of the array at `base`, in its dtype.

    The tile has the channels from `left` on, as in `load_rows`.
    """
    columns: tl.constexpr = plan.width if width is None else width
    row = tl.arange(0, rows)[:, None]
    column = left + tl.arange(0, columns)[None, :]
    pointers = base + first.to(tl.int64) * (heads * plan.head_dim) + (row * (heads * plan.head_dim) + column)
    tl.store(pointers, values.to(base.dtype.element_ty), mask=(first + row < length) & (column < plan.head_dim))


@triton.jit
def load_block_range(ranges, batch, block, blocks: tl.constexpr, plan: tl.constexpr):
    """Load a block's range of blocks to visit: (first, first that needs no mask, end of those without mask, end)."""
    row = block
    if plan.packed:
        row += batch * blocks
    limits = ranges + 4 * row
    return tl.load(limits), tl.load(limits + 1), tl.load(limits + 2), tl.load(limits + 3)


@triton.jit
def nth_tile(number, first, first_whole, end_whole, masked: tl.constexpr):
    """Return the index of the `number`-th tile of keys among those that need a mask (`masked`), or among the others."""
    if masked:
        tile = first + number
        tile += tl.where(tile >= first_whole, end_whole - first_whole, 0)
    else:
        tile = first_whole + number
    return tile


@triton.jit
def score(products, plan: tl.constexpr):
    """Return the scores q.k, scaled and soft-capped, but not yet multiplied by `plan.output_scale` (the caller does).

    With a soft cap it is the tanh instead, computed from exp2(products * plan.input_scale).
    """
    if plan.capped:
        # tanh; for an infinite exponential the quotient is 0.
        scores = 1.0 - 2.0 / (tl.exp2(products * plan.input_scale) + 1.0)
    elif plan.input_scale != 1.0:
        scores = products * plan.input_scale
    else:
        scores = products
    return scores


@triton.jit
def visible(ids, query, key, plan: tl.constexpr):
    """Return a boolean tile: True where the query sees the key under mask and segments.

    The indices `query` and `key` broadcast to the shape of the tile.
    """
    seen = key < plan.key_length
    distance = query + (plan.key_length - plan.length) - key
    if plan.causal:
        seen = seen & (distance >= 0)
    if plan.window is not None:
        seen = seen & (distance < plan.window)
    if plan.packed:
        query_ids = tl.load(ids + query, mask=query < plan.length, other=0)
        key_ids = tl.load(ids + plan.length + key, mask=key < plan.key_length, other=0)
        seen = seen & (query_ids == key_ids)
    return seen


@triton.jit
def _visit(queries, query, k, v, left, ids, limits, state, masked: tl.constexpr, plan: tl.constexpr):
    """Update the online softmax by the key blocks that need a mask (if `masked`) or that need none (otherwise).

    The state is (sum of weighted values, row maximum, sum of weights). The program has the values' channels from `left`
    on.
    """
    width: tl.constexpr = plan.value_width
    first, first_whole, end_whole, end = limits
    acc, maximum, total = state
    count = end_whole - first_whole
    if masked:
        count = end - first - count
    for number in range(count):
        start = nth_tile(number, first, first_whole, end_whole, masked) * plan.key_block
        keys = load_rows(k, start, plan.key_block, plan.kv_heads, plan.key_load_bound if masked else None, plan)
        scores = score(tl.dot(queries, tl.trans(keys)), plan)
        if masked:
            key = start + tl.arange(0, plan.key_block)
            scores = tl.where(visible(ids, query[:, None], key[None, :], plan), scores, -float("inf"))
        highest = tl.maximum(maximum, tl.max(scores, 1) * plan.output_scale)
        shift = highest
        if masked:
            # A row that has seen no key yet would compute inf - inf.
            shift = tl.where(highest == -float("inf"), 0.0, highest)
        weights = tl.exp2(scores * plan.output_scale - shift[:, None])
        shrink = tl.exp2(maximum - shift)
        total = total * shrink + tl.sum(weights, 1)
        values = load_rows(
            v, start, plan.key_block, plan.kv_heads, plan.key_load_bound if masked else None, plan, left, width
        )
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
        maximum = highest
    return acc, maximum, total


@triton.jit
def forward_kernel(q, k, v, ranges, ids, sinks, out, lse, plan: tl.constexpr):
    """Compute out and log-sum-exp for one block of queries of one head.

    They are parts of out [B, T, N, H] and lse [B, N, T]; ids [B, T + S] are segments of queries, then of keys, and
    sinks [B, N] are scores without a value. Of wide heads several programs compute a part of the channels each.

    Blocks of later queries have more keys under a causal mask and start first; the heads of a group are adjacent.
    """
    part = tl.program_id(0) % plan.value_parts
    program = tl.program_id(0) // plan.value_parts
    head = program % plan.heads
    batch = (program // plan.heads) % plan.batch
    block = plan.query_blocks - 1 - program // (plan.heads * plan.batch)
    limits = load_block_range(ranges, batch, block, plan.query_blocks, plan)
    wide = batch.to(tl.int64)
    query_part = wide * (plan.length * plan.heads * plan.head_dim) + head * plan.head_dim
    key_part = wide * (plan.key_length * plan.kv_heads * plan.head_dim) + head // plan.group * plan.head_dim
    start = block * plan.query_block
    query = start + tl.arange(0, plan.query_block)
    queries = load_rows(q + query_part, start, plan.query_block, plan.heads, plan.query_load_bound, plan)
    ids += batch * (plan.length + plan.key_length)
    rows: tl.constexpr = plan.query_block
    width: tl.constexpr = plan.value_width
    left = part * width
    maximum = tl.full([rows], -float("inf"), tl.float32)
    state = tl.zeros([rows, width], tl.float32), maximum, tl.zeros([rows], tl.float32)
    state = _visit(queries, query, k + key_part, v + key_part, left, ids, limits, state, False, plan)
    acc, maximum, total = _visit(queries, query, k + key_part, v + key_part, left, ids, limits, state, True, plan)
    if plan.sinks:
        sink = tl.load(sinks + batch * plan.heads + head) * plan.log2e
        highest = tl.maximum(maximum, sink)
        shrink = tl.exp2(maximum - highest)
        total = total * shrink + tl.exp2(sink - highest)
        acc *= shrink[:, None]
        maximum = highest
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    acc = acc / total[:, None]
    store_rows(out + query_part, start, acc, plan.query_block, plan.heads, plan.length, plan, left, width)
    logarithm = tl.where(empty, -float("inf"), (maximum + tl.log2(total)) * plan.ln2)
    row = wide * (plan.heads * plan.length) + head * plan.length
    tl.store(lse + row + query, logarithm, mask=(query < plan.length) & (part == 0))
