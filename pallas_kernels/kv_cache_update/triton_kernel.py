"""Triton kernel that rotates the queries and keys of new tokens, and writes keys and values to the KV cache."""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def update_kernel(joined, cos, sin, slots, old_keys, old_values, queries, keys, values, plan: tl.constexpr):
    """Rotate and write one block of the heads of one token.

    The program ids are the token and the block of heads. `joined` is [tokens, N + 2 K, H], `cos` and `sin` are float32
    [tokens, or the tokens of one row, H / 2], `slots` is int32 [tokens], and `queries` is [tokens, N, H]. `keys` and
    `values` are the cache; `old_keys` and `old_values` are the same memory, from which nothing is read.
    """
    half: tl.constexpr = plan.half
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    head = block * plan.block_heads + tl.arange(0, plan.block_heads)
    pair = tl.arange(0, plan.padded_half)
    valid = (head < plan.heads)[:, None] & (pair < half)
    slot = tl.load(slots + token)
    source = (token * plan.heads + head)[:, None] * (2 * half) + pair
    first = tl.load(joined + source, valid, 0.0).to(tl.float32)
    second = tl.load(joined + source + half, valid, 0.0).to(tl.float32)
    angle = (token % plan.angle_rows) * half + pair
    c = tl.load(cos + angle, pair < half, 0.0)[None]
    s = tl.load(sin + angle, pair < half, 0.0)[None]

    # Values are not rotated.
    rotated = (head < plan.num_heads + plan.key_heads)[:, None]
    left = tl.where(rotated, first * c - second * s, first)
    right = tl.where(rotated, second * c + first * s, second)

    is_query = (head < plan.num_heads)[:, None] & valid
    target = (token * plan.num_heads + head)[:, None] * (2 * half) + pair
    tl.store(queries + target, left.to(queries.dtype.element_ty), is_query)
    tl.store(queries + target + half, right.to(queries.dtype.element_ty), is_query)

    written = valid & (slot >= 0) & (slot < plan.slots)
    is_key = written & rotated & (head >= plan.num_heads)[:, None]
    is_value = written & (rotated == 0)
    row = (token // plan.new_tokens) * (plan.key_heads * plan.slots) + slot.to(tl.int64) * plan.slot_stride
    key_head = (head - plan.num_heads) % plan.key_heads
    target = (row + key_head * plan.head_stride)[:, None] * (2 * half) + pair
    if plan.fp8:  # rounded twice, as keys that are rotated by themselves are
        left = tl.clamp(left.to(queries.dtype.element_ty).to(tl.float32), -448.0, 448.0)
        right = tl.clamp(right.to(queries.dtype.element_ty).to(tl.float32), -448.0, 448.0)
    tl.store(keys + target, left.to(keys.dtype.element_ty), is_key)
    tl.store(keys + target + half, right.to(keys.dtype.element_ty), is_key)
    tl.store(values + target, left.to(values.dtype.element_ty), is_value)
    tl.store(values + target + half, right.to(values.dtype.element_ty), is_value)
