"""Triton kernel that adds one token to the state of each row, and reads the row's output from it."""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def update_kernel(q, k, v, log_decay, beta, slots, old_states, out, states, plan: tl.constexpr):
    """Update a block of the value channels of one head's state.

    The program ids are the row, the value head and the block. A row that begins has -1 - slot in `slots`. `states` and
    `old_states` are the same memory.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key = tl.arange(0, plan.padded_keys)
    value = tl.program_id(2) * plan.block_values + tl.arange(0, plan.block_values)
    has_key = key < plan.key_width
    has_value = value < plan.value_width
    valid = has_key[:, None] & has_value[None, :]
    number = tl.load(slots + row).to(tl.int64)
    slot = tl.where(number < 0, -1 - number, number)
    stored = slot < plan.slots
    place = (slot * plan.heads + head) * (plan.key_width * plan.value_width)
    place += key[:, None] * plan.key_stride + value[None, :] * plan.value_stride
    state = tl.load(states + place, valid & stored & (number >= 0), 0.0)

    of_value_head = row * plan.heads + head
    of_key_head = (row * plan.key_heads + head // (plan.heads // plan.key_heads)) * plan.key_width
    if plan.channels:
        decay = tl.load(log_decay + of_value_head * plan.key_width + key, has_key, 0.0)[:, None]
    else:
        decay = tl.load(log_decay + of_value_head)
    state = state * tl.exp(decay)
    query = tl.load(q + of_key_head + key, has_key, 0.0).to(tl.float32)
    found = tl.load(k + of_key_head + key, has_key, 0.0).to(tl.float32)[:, None]
    new = tl.load(v + of_value_head * plan.value_width + value, has_value, 0.0).to(tl.float32)
    if plan.corrects:
        new = tl.load(beta + of_value_head) * (new - tl.sum(state * found, 0))
    state = state + found * new[None, :]
    result = tl.sum(state * query[:, None], 0)
    tl.store(out + of_value_head * plan.value_width + value, result.to(out.dtype.element_ty), has_value)
    tl.store(states + place, state, valid & stored)
