"""Triton kernels of paged attention: attention to each range of a sequence's keys, and combination of the ranges."""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
import triton
import triton.language as tl

_FIRST = tl.constexpr("""{
.reg .b32 sign, rest;
shl.b32 sign, $1, 8;
shl.b32 rest, $1, 7;
and.b32 rest, rest, 0x3f803f80;
lop3.b32 $0, sign, 0x80008000, rest, 0xea;
}""")
_SECOND = tl.constexpr("""{
.reg .b32 rest;
shr.u32 rest, $1, 1;
and.b32 rest, rest, 0x3f803f80;
lop3.b32 $0, $1, 0x80008000, rest, 0xea;
}""")
"""The sign of each number where it is, or moved, and below it its other bits; 0xea is (a & b) | c."""


@triton.jit
def attend_kernel(q, k_pages, v_pages, page_table, lengths, sinks, out, log_sums, plan: tl.constexpr):
    """Compute attention to one range of a sequence's keys, for the query heads that share one key head.

    The program ids are the key head, the sequence and the range, in this order, so that the heads of a sequence, whose
    keys lie side by side in memory, are read at about the same time. `out` is [B, T, N, H] if a sequence has one range,
    otherwise float32 [B, K, ranges, rows, H], where a row is a pair of new token and query head, and `log_sums` is the
    base-2 logarithm of each row's sum of exponentials, float32 [B, K, ranges, rows]. `sinks` [N] are scores without a
    value, which the last kernel adds.

    Where values are the first channels of their keys, both are read once; the further channels of a key are a product
    apart, as tiles have powers of two as sizes. A head's rows are then several programs, if they are many.

    Keys and values in FP8 are read as pairs of channels, so that tiles of 16-bit numbers go through shared memory as
    those of bfloat16 do; the first and the second channels of the pairs are then products apart.
    """
    padded_rows: tl.constexpr = plan.padded_rows
    head_dim: tl.constexpr = plan.head_dim
    value_dim: tl.constexpr = plan.value_dim
    key_block: tl.constexpr = plan.key_block
    pair: tl.constexpr = plan.pair
    head = tl.program_id(0) // plan.row_blocks
    sequence = tl.program_id(1).to(tl.int64)  # a batch of whole sequences has more than 2^31 numbers
    part = tl.program_id(2)
    length = tl.load(lengths + sequence)
    row = tl.program_id(0) % plan.row_blocks * padded_rows + tl.arange(0, padded_rows)
    column = tl.arange(0, value_dim // pair)
    position = length - plan.new_tokens + row // plan.group
    query = (sequence * plan.new_tokens + row // plan.group) * plan.num_heads + head * plan.group + row % plan.group
    row_valid = row < plan.rows
    own = q + query[:, None] * head_dim + pair * column
    queries = tl.load(own, row_valid[:, None], 0.0)
    second_queries = queries
    if plan.fp8:
        # float16 has all numbers of FP8, and more digits than bfloat16.
        queries = tl.clamp(queries.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
        second_queries = tl.load(own + 1, row_valid[:, None], 0.0)
        second_queries = tl.clamp(second_queries.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
        k_pages = k_pages.to(tl.pointer_type(tl.int16))
        v_pages = v_pages.to(tl.pointer_type(tl.int16))
    if plan.further_dim > 0:
        further = value_dim + tl.arange(0, plan.further_dim)
        further_queries = tl.load(q + query[:, None] * head_dim + further, row_valid[:, None], 0.0)

    first = 0
    if plan.window is not None:
        first = tl.maximum(length - plan.new_tokens + 1 - plan.window, 0) // key_block
    seen = length
    if plan.row_blocks > 1:  # the program's last query sees no later key
        last = tl.program_id(0) % plan.row_blocks * padded_rows + padded_rows - 1
        seen = tl.minimum(length, length - plan.new_tokens + last // plan.group + 1)
    blocks = tl.cdiv(tl.maximum(seen, 0), key_block) - first
    each = tl.cdiv(blocks, plan.ranges)
    begin = first + part * each
    end = tl.minimum(begin + each, first + blocks)
    highest = tl.full([padded_rows], float("-inf"), tl.float32)
    total = tl.zeros([padded_rows], tl.float32)
    values = tl.zeros([padded_rows, value_dim // pair], tl.float32)
    second_values = values
    for block in range(begin, end):
        key = block * key_block + tl.arange(0, key_block)
        here = key < length
        page = tl.load(page_table + sequence * plan.table_width + key // plan.page_size, here, 0).to(tl.int64)
        slot = (page * plan.page_size + key % plan.page_size) * plan.key_heads + head
        place = slot[:, None] * (head_dim // pair) + column
        keys = tl.load(k_pages + place, here[:, None], 0)
        if plan.fp8:
            scores = tl.dot(queries, tl.trans(first_of_pairs(keys)))
            scores = tl.dot(second_queries, tl.trans(second_of_pairs(keys)), scores)
        else:
            scores = tl.dot(queries, tl.trans(keys))
        if plan.further_dim > 0:
            further_keys = tl.load(k_pages + slot[:, None] * head_dim + further, here[:, None], 0.0)
            scores = tl.dot(further_queries, tl.trans(further_keys), scores)
        scores *= plan.scale * plan.pair_factor
        content = keys if plan.shared else tl.load(v_pages + place, here[:, None], 0)
        if plan.soft_cap is not None:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), which Triton has no instruction for.
            scores = plan.soft_cap * (1 - 2 / (tl.exp2(scores * (2 * 1.4426950408889634 / plan.soft_cap)) + 1))
        visible = key[None] <= position[:, None]
        if plan.window is not None:
            visible &= key[None] > position[:, None] - plan.window
        scores = tl.where(visible, scores * 1.4426950408889634, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A row with no visible key so far has only -inf, and -inf - (-inf) is NaN.
        pivot = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - pivot[:, None])
        shrink = tl.exp2(highest - pivot)
        total = total * shrink + tl.sum(weights, 1)
        if plan.fp8:
            weights = weights.to(tl.float16)
            values = tl.dot(weights, first_of_pairs(content), values * shrink[:, None])
            second_values = tl.dot(weights, second_of_pairs(content), second_values * shrink[:, None])
        else:
            values = values * shrink[:, None] + tl.dot(weights.to(content.dtype), content)
        highest = new_highest
    if plan.fp8:
        values = tl.interleave(values, second_values) * plan.pair_factor
        column = tl.arange(0, value_dim)
    if plan.sinks and plan.ranges == 1:
        sink = tl.load(sinks + head * plan.group + row % plan.group) * 1.4426950408889634
        pivot = tl.maximum(highest, sink)
        shrink = tl.exp2(highest - pivot)
        total = total * shrink + tl.exp2(sink - pivot)
        values *= shrink[:, None]
    values = values / tl.where(total == 0, 1.0, total)[:, None]
    if plan.ranges == 1:
        target = out + query[:, None] * value_dim + column
        tl.store(target, values.to(out.dtype.element_ty), row_valid[:, None])
    else:
        place = ((sequence * plan.key_heads + head) * plan.ranges + part) * plan.rows + row
        tl.store(out + place[:, None] * value_dim + column, values, row_valid[:, None])
        tl.store(log_sums + place, highest + tl.log2(total), row_valid)


@triton.jit
def first_of_pairs(pairs):
    """Return the numbers in the low bytes of pairs of e4m3 numbers, as float16 numbers of 1/256 of their values.

    Sign, exponent and fraction are moved to their places in a float16 number, whose exponent has another bias. An
    instruction does so for two pairs at a time, which Triton's own operations do not.
    """
    return tl.inline_asm_elementwise(_FIRST, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def second_of_pairs(pairs):
    """Return the numbers in the high bytes of pairs as `first_of_pairs` does."""
    return tl.inline_asm_elementwise(_SECOND, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def combine_kernel(partial, log_sums, sinks, out, plan: tl.constexpr):
    """Combine one query's attention outputs over the ranges of its sequence's keys; `out` is [B, T, N, H]."""
    padded_ranges: tl.constexpr = plan.padded_ranges
    value_dim: tl.constexpr = plan.value_dim
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.program_id(2)
    part = tl.arange(0, padded_ranges)
    column = tl.arange(0, value_dim)
    valid = part < plan.ranges
    place = ((sequence * plan.key_heads + head) * plan.ranges + part) * plan.rows + row
    logs = tl.load(log_sums + place, valid, float("-inf"))
    highest = tl.max(logs, 0)
    if plan.sinks:
        sink = tl.load(sinks + head * plan.group + row % plan.group) * 1.4426950408889634
        highest = tl.maximum(highest, sink)
    weights = tl.exp2(logs - tl.where(highest == float("-inf"), 0.0, highest))
    values = tl.load(partial + place[:, None] * value_dim + column, valid[:, None], 0.0)
    total = tl.sum(weights, 0)
    if plan.sinks:
        total += tl.exp2(sink - highest)
    result = tl.sum(values * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    query = (sequence * plan.new_tokens + row // plan.group) * plan.num_heads + head * plan.group + row % plan.group
    tl.store(out + query * value_dim + column, result.to(out.dtype.element_ty))
