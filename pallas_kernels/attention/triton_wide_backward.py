"""Softmax weights and score gradients of a block of the score matrix in Triton, for the backward of wide heads.

Kernels that keep all gradients of a tile in registers must compute the scores of heads of 512 channels several times:
eight products of 512 channels in place of five. Here scores are computed once, and weights and gradients of a block of
about a thousand queries and keys go through global memory, in the dtype of q, to the large matrix products that XLA
adds up (`xla.gradients_by_tiles`). That costs ten bytes for each score, in place of three products.
"""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl

from pallas_kernels.attention.triton_forward import load_rows, score, visible


@triton.jit
def _may_be_visible(ids, first_query, first_key, plan: tl.constexpr):
    """Return False if the mask or the segments hide a whole tile, or if it is past the last query or key."""
    last_query = tl.minimum(first_query + plan.query_block, plan.length) - 1
    last_key = tl.minimum(first_key + plan.key_block, plan.key_length) - 1
    offset: tl.constexpr = plan.key_length - plan.length
    shown = (first_query <= last_query) & (first_key <= last_key)
    if plan.causal:
        shown = shown & (last_query + offset >= first_key)
    if plan.window is not None:
        shown = shown & (first_query + offset - last_key < plan.window)
    if plan.packed:
        query = first_query + tl.arange(0, plan.query_block)
        key = first_key + tl.arange(0, plan.key_block)
        # Past the ends the ids are those of the last query or key.
        query_ids = tl.load(ids + tl.minimum(query, plan.length - 1))
        key_ids = tl.load(ids + plan.length + tl.minimum(key, plan.key_length - 1))
        shown = shown & (tl.min(query_ids, 0) <= tl.max(key_ids, 0)) & (tl.min(key_ids, 0) <= tl.max(query_ids, 0))
    return shown


@triton.jit
def _load_row_statistics(rows, query, plan: tl.constexpr):
    """Load the log-sum-exp and delta of a tile's queries; 0 past the last query."""
    size: tl.constexpr = plan.batch * plan.heads * plan.length
    inside = query < plan.length
    return tl.load(rows + query, mask=inside, other=0.0), tl.load(rows + size + query, mask=inside, other=0.0)


@triton.jit
def score_gradient_kernel(q, k, v, d_out, rows, pair, ids, weights, gradients, plan: tl.constexpr):
    """Compute the softmax weights of one tile of a block, and the gradients of its products q.k.

    The block is the one of `pair`, int32 [2]: numbers of a block of queries and of one of keys. Weights and gradients
    are [B, N, block of queries, block of keys]; 0 where the mask hides the key.

    Args:
        q, k, v, d_out: [B, T, N, H], [B, S, K, H] twice, [B, T, N, H].
        rows: float32 [2, B, N, T], the log-sum-exp as a power of two and delta.
        pair: numbers of the block.
        ids: segments of queries, then of keys, [B, T + S].
        weights, gradients: results.
        plan: constants.
    """
    program = tl.program_id(0)
    column = program % plan.key_tiles
    row = (program // plan.key_tiles) % plan.query_tiles
    sequence = program // (plan.key_tiles * plan.query_tiles)
    head = sequence % plan.heads
    batch = sequence // plan.heads
    first_query = tl.load(pair) * plan.block_queries + row * plan.query_block
    first_key = tl.load(pair + 1) * plan.block_keys + column * plan.key_block
    wide = batch.to(tl.int64)
    query_part = wide * (plan.length * plan.heads * plan.head_dim) + head * plan.head_dim
    key_part = wide * (plan.key_length * plan.kv_heads * plan.head_dim) + head // plan.group * plan.head_dim
    ids += batch * (plan.length + plan.key_length)
    rows_bound: tl.constexpr = plan.query_load_bound
    keys_bound: tl.constexpr = plan.key_load_bound
    height: tl.constexpr = plan.query_block
    width: tl.constexpr = plan.key_block
    step: tl.constexpr = plan.channels
    products = tl.zeros([height, width], tl.float32)
    d_weights = tl.zeros([height, width], tl.float32)
    parts = plan.width // step
    if plan.masked:
        parts = tl.where(_may_be_visible(ids, first_query, first_key, plan), parts, 0)
    for part in range(parts):
        left = part * step
        queries = load_rows(q + query_part, first_query, height, plan.heads, rows_bound, plan, left, step)
        keys = load_rows(k + key_part, first_key, width, plan.kv_heads, keys_bound, plan, left, step)
        products = tl.dot(queries, tl.trans(keys), products)
        d_outs = load_rows(d_out + query_part, first_query, height, plan.heads, rows_bound, plan, left, step)
        values = load_rows(v + key_part, first_key, width, plan.kv_heads, keys_bound, plan, left, step)
        d_weights = tl.dot(d_outs, tl.trans(values), d_weights)
    query = first_query + tl.arange(0, height)
    lse, delta = _load_row_statistics(rows + wide * (plan.heads * plan.length) + head * plan.length, query, plan)
    scores = score(products, plan)
    shares = tl.exp2(scores * plan.output_scale - lse[:, None])
    if plan.masked:
        key = first_key + tl.arange(0, width)
        shares = tl.where(visible(ids, query[:, None], key[None, :], plan), shares, 0.0)
    gradient = shares * (d_weights - delta[:, None]) * plan.scale
    if plan.capped:
        gradient *= 1.0 - scores * scores
    place = sequence.to(tl.int64) * (plan.block_queries * plan.block_keys)
    place += row * (height * plan.block_keys) + column * width
    place += tl.arange(0, height)[:, None] * plan.block_keys + tl.arange(0, width)[None, :]
    tl.store(weights + place, shares.to(weights.dtype.element_ty))
    tl.store(gradients + place, gradient.to(gradients.dtype.element_ty))
