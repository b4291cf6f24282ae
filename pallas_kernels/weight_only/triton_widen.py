"""Triton kernels that write a packed weight in the dtype of the activations, for products of many rows."""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

from pallas_kernels.weight_only.triton_kernel import convert, load_powers
from pallas_kernels.weight_only.triton_lookup import load_table


@triton.jit
def _values(stored, half: tl.constexpr, table, power, scale, plan: tl.constexpr, like):
    """Return the values of stored bytes or of their halves, see `convert`, in the dtype of `like`."""
    value = convert(stored, half, table, power, plan, like)
    if plan.scaled:
        value = (value.to(tl.float32) * scale).to(value.dtype)
    return value


@triton.jit
def _bits(value):
    """Return the 16 bits of numbers, in the low half of an int32."""
    return value.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def widen_kernel(q, constants, exponents, out, plan: tl.constexpr):
    """Write a block of outputs of the matrix [out, in] over one range of the inputs, times the factors of groups.

    The program ids are the block and the range. `q`, `constants` and `exponents` are as in
    `triton_kernel.product_kernel`. The inputs of a step are within one group. Integers of 4 bits are stored two at a
    time, as the halves of a word, so that neighbours stay neighbours.
    """
    width: tl.constexpr = plan.block_in // plan.halves
    stride: tl.constexpr = plan.inputs // plan.halves
    block = tl.program_id(0)
    output = block * plan.block_out + tl.arange(0, plan.block_out)
    column = tl.arange(0, width)
    table = 0
    if plan.entries > 0:
        table = load_table(constants, block, plan, out)
    scale_of = 0
    if plan.scaled:
        scale_of = (exponents if plan.entries > 0 else constants) + output // plan.scale_rows * plan.groups
    first = tl.program_id(1) * plan.steps
    for step in range(first, first + plan.steps):
        position = step * width + column
        place = output.to(tl.int64)[:, None] * stride + position
        stored = tl.load(q + place)
        power = 1
        if plan.exponent_size > 0:
            power = load_powers(exponents, position[None], output[:, None], plan, out)
        scale = 1
        if plan.scaled:
            scale = tl.load(scale_of + step * plan.block_in // plan.group_size)[:, None].to(tl.float32)
        if plan.halves == 1:
            tl.store(out + place, _values(stored, 0, table, power, scale, plan, out))
        else:
            low = _values(stored, 1, table, power, scale, plan, out)
            high = _values(stored, 2, table, power, scale, plan, out)
            tl.store(out.to(tl.pointer_type(tl.int32)) + place, _bits(low) | (_bits(high) << 16))


@triton.jit
def _widen_groups(values, kept, out, row, group, per_row: tl.constexpr):
    """Write groups of four inputs of rows of a matrix with 2:4 sparsity."""
    mask = tl.load(kept + row * (per_row // 2) + group // 2).to(tl.int32) >> (group % 2 * 4)
    pair = tl.load(values.to(tl.pointer_type(tl.int32)) + row * per_row + group)
    first = pair & 0xFFFF
    second = (pair >> 16) & 0xFFFF
    # An input has the second value if one before it in its group has the first.
    value_1 = tl.where((mask & 1) != 0, second, first)
    value_2 = tl.where((mask & 3) != 0, second, first)
    value_3 = tl.where((mask & 7) != 0, second, first)
    low = tl.where((mask & 1) != 0, first, 0) | (tl.where((mask & 2) != 0, value_1, 0) << 16)
    high = tl.where((mask & 4) != 0, value_2, 0) | (tl.where((mask & 8) != 0, value_3, 0) << 16)
    four = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
    tl.store(out.to(tl.pointer_type(tl.int64)) + row * per_row + group, four)


@triton.jit
def widen_sparse_kernel(values, kept, out, plan: tl.constexpr):
    """Write a block of outputs of a matrix [out, in] with 2:4 sparsity over one range of the inputs, zeros included.

    The program ids are as in `widen_kernel`. `values` are numbers of 16 bits [out, in / 2], `kept` the bytes
    [out, in / 8] of the masks of two groups of inputs each.
    """
    per_row: tl.constexpr = plan.inputs // 4
    width: tl.constexpr = plan.block_in // 4
    row = (tl.program_id(0) * plan.block_out + tl.arange(0, plan.block_out)).to(tl.int64)[:, None]
    first_step = tl.program_id(1) * plan.steps
    for step in range(first_step, first_step + plan.steps):
        group = (step * width + tl.arange(0, width))[None]
        _widen_groups(values, kept, out, row, group, per_row)
