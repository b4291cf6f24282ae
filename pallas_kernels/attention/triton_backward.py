"""Gradients of attention in Triton: one kernel for dQ, one for dK and dV; both skip score tiles that are masked.

Scores are recomputed from q, k and the log-sum-exp. Each block of a result belongs to one program, which sums in
registers in a fixed order (over all heads of the group for dK and dV), so results are bit-equal in every run.

`rows` [2, B, N, T] float32 contains the log-sum-exp as a power of two, and delta: the row sums of out * d_out minus
the gradient of the log-sum-exp. A query without a visible key has the log-sum-exp -inf; all its tiles are masked.
"""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl

from pallas_kernels.attention.triton_forward import load_block_range, load_rows, nth_tile, score, store_rows, visible


@triton.jit
def _load_statistics(rows, query, plan: tl.constexpr):
    """Load the log-sum-exp and delta of a block of queries; 0 past the last query, whose q and d_out are 0."""
    size: tl.constexpr = plan.batch * plan.heads * plan.length
    if plan.query_load_bound is None:
        lse = tl.load(rows + query)
        delta = tl.load(rows + size + query)
    else:
        lse = tl.load(rows + query, mask=query < plan.length, other=0.0)
        delta = tl.load(rows + size + query, mask=query < plan.length, other=0.0)
    return lse, delta


@triton.jit
def _visit_keys(own, query, k, v, ids, limits, acc, masked: tl.constexpr, plan: tl.constexpr):
    """Add to dQ / scale the contributions of the key blocks that need a mask (`masked`) or that need none (otherwise).

    `own` is (q, d_out, lse, delta) of the program's queries.
    """
    first, first_whole, end_whole, end = limits
    queries, d_outs, lse, delta = own
    count = end_whole - first_whole
    if masked:
        count = end - first - count
    for number in range(count):
        start = nth_tile(number, first, first_whole, end_whole, masked) * plan.key_block
        keys = load_rows(k, start, plan.key_block, plan.kv_heads, plan.key_load_bound if masked else None, plan)
        values = load_rows(v, start, plan.key_block, plan.kv_heads, plan.key_load_bound if masked else None, plan)
        scores = score(tl.dot(queries, tl.trans(keys)), plan)
        weights = tl.exp2(scores * plan.output_scale - lse[:, None])
        if masked:
            key = start + tl.arange(0, plan.key_block)
            weights = tl.where(visible(ids, query[:, None], key[None, :], plan), weights, 0.0)
        gradient = weights * (tl.dot(d_outs, tl.trans(values)) - delta[:, None])
        if plan.capped:
            gradient *= 1.0 - scores * scores
        acc = tl.dot(gradient.to(keys.dtype), keys, acc)
    return acc


@triton.jit
def query_kernel(q, k, v, d_out, rows, ranges, ids, d_q, plan: tl.constexpr):
    """Compute dQ for one block of queries, visiting the key blocks that they see.

    `ranges` come from `tiles.key_ranges`.
    """
    program = tl.program_id(0)
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
    d_outs = load_rows(d_out + query_part, start, plan.query_block, plan.heads, plan.query_load_bound, plan)
    lse, delta = _load_statistics(rows + wide * (plan.heads * plan.length) + head * plan.length, query, plan)
    ids += batch * (plan.length + plan.key_length)
    own = queries, d_outs, lse, delta
    block_rows: tl.constexpr = plan.query_block
    width: tl.constexpr = plan.width
    acc = tl.zeros([block_rows, width], tl.float32)
    acc = _visit_keys(own, query, k + key_part, v + key_part, ids, limits, acc, False, plan)
    acc = _visit_keys(own, query, k + key_part, v + key_part, ids, limits, acc, True, plan)
    store_rows(d_q + query_part, start, acc * plan.scale, plan.query_block, plan.heads, plan.length, plan)


@triton.jit
def _visit_queries(own, key, q, d_out, rows, ids, limits, state, masked: tl.constexpr, plan: tl.constexpr):
    """Add to (dK / scale, dV) the contributions of query blocks, of all query heads that share the key head.

    The blocks that need a mask are visited if `masked`, else those that need none.

    `own` is (k, v) of the program's keys. Scores are transposed, [keys, queries], so that they need no transpose as
    left operands of the products.
    """
    first, first_whole, end_whole, end = limits
    keys, values = own
    d_keys, d_values = state
    count = end_whole - first_whole
    if masked:
        count = end - first - count
    # One loop over heads and tiles, so that loads are in flight from one head to the next.
    for number in range(plan.group * count):
        member = number // count
        start = nth_tile(number - member * count, first, first_whole, end_whole, masked) * plan.query_block
        query = start + tl.arange(0, plan.query_block)
        part = member * plan.head_dim
        queries = load_rows(q + part, start, plan.query_block, plan.heads, plan.query_load_bound, plan)
        lse, delta = _load_statistics(rows + member * plan.length, query, plan)
        scores = score(tl.dot(keys, tl.trans(queries)), plan)
        weights = tl.exp2(scores * plan.output_scale - lse[None, :])
        if masked:
            weights = tl.where(visible(ids, query[None, :], key[:, None], plan), weights, 0.0)
        d_outs = load_rows(d_out + part, start, plan.query_block, plan.heads, plan.query_load_bound, plan)
        d_values = tl.dot(weights.to(d_outs.dtype), d_outs, d_values)
        gradient = weights * (tl.dot(values, tl.trans(d_outs)) - delta[None, :])
        if plan.capped:
            gradient *= 1.0 - scores * scores
        d_keys = tl.dot(gradient.to(queries.dtype), queries, d_keys)
    return d_keys, d_values


@triton.jit
def key_kernel(q, k, v, d_out, rows, ranges, ids, d_k, d_v, plan: tl.constexpr):
    """Compute dK and dV for one block of keys, visiting the query blocks that see them.

    `ranges` come from `tiles.query_ranges`.

    Under a causal mask most queries see the first keys: their programs start first.
    """
    program = tl.program_id(0)
    head = program % plan.kv_heads
    batch = (program // plan.kv_heads) % plan.batch
    block = program // (plan.kv_heads * plan.batch)
    limits = load_block_range(ranges, batch, block, plan.key_blocks, plan)
    wide = batch.to(tl.int64)
    first_head = head * plan.group
    query_part = wide * (plan.length * plan.heads * plan.head_dim) + first_head * plan.head_dim
    key_part = wide * (plan.key_length * plan.kv_heads * plan.head_dim) + head * plan.head_dim
    start = block * plan.key_block
    key = start + tl.arange(0, plan.key_block)
    keys = load_rows(k + key_part, start, plan.key_block, plan.kv_heads, plan.key_load_bound, plan)
    values = load_rows(v + key_part, start, plan.key_block, plan.kv_heads, plan.key_load_bound, plan)
    rows += wide * (plan.heads * plan.length) + first_head * plan.length
    ids += batch * (plan.length + plan.key_length)
    own = keys, values
    block_rows: tl.constexpr = plan.key_block
    width: tl.constexpr = plan.width
    zeros = tl.zeros([block_rows, width], tl.float32)
    state = zeros, zeros
    state = _visit_queries(own, key, q + query_part, d_out + query_part, rows, ids, limits, state, False, plan)
    d_keys, d_values = _visit_queries(
        own, key, q + query_part, d_out + query_part, rows, ids, limits, state, True, plan
    )
    store_rows(d_k + key_part, start, d_keys * plan.scale, plan.key_block, plan.kv_heads, plan.key_length, plan)
    store_rows(d_v + key_part, start, d_values, plan.key_block, plan.kv_heads, plan.key_length, plan)
