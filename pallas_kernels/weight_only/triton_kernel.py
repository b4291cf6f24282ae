"""Triton kernels of the packed matmul for few rows: they read weights as stored, and convert them in registers."""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

from pallas_kernels.weight_only.triton_lookup import load_table, look_up

# Each converts the four bytes of a register, or one half of each byte, to bfloat16: two registers of two values. The
# bits become the lowest ones of a bfloat16 with the high byte 0x43, from 128 to 255, where neighbouring values differ
# by 1; then a constant is subtracted. That is exact. The compiler would use a conversion of lower rate for each value.
_BYTE = tl.constexpr("""
{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0x43434343, 0x4140;
prmt.b32 b, $2, 0x43434343, 0x4342;
and.b32 c, a, 0xFF80FF80;
and.b32 d, b, 0xFF80FF80;
and.b32 a, a, 0xFF7FFF7F;
and.b32 b, b, 0xFF7FFF7F;
sub.rn.bf16x2 $0, a, c;
sub.rn.bf16x2 $1, b, d;
}
""")
"""The lowest seven bits plus 128, minus 256 for negative bytes and minus 128 for others."""
_LOW_HALF = tl.constexpr("""
{
.reg .b32 a, b, c;
mov.b32 c, 0x43084308;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
lop3.b32 a, a, 0x000F000F, c, 0x6A;
lop3.b32 b, b, 0x000F000F, c, 0x6A;
sub.rn.bf16x2 $0, a, c;
sub.rn.bf16x2 $1, b, c;
}
""")
_HIGH_HALF = tl.constexpr("""
{
.reg .b32 a, b, c;
mov.b32 c, 0x43084308;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
shr.u32 a, a, 4;
shr.u32 b, b, 4;
lop3.b32 a, a, 0x000F000F, c, 0x6A;
lop3.b32 b, b, 0x000F000F, c, 0x6A;
sub.rn.bf16x2 $0, a, c;
sub.rn.bf16x2 $1, b, c;
}
""")
"""(Bits xor 8) + 128, which is the value plus 136, minus 136."""
_FLOAT8 = tl.constexpr("""
{
.reg .b32 a, b, c, d, e;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
and.b32 a, a, 0x80008000;
and.b32 b, b, 0x80008000;
lop3.b32 a, c, 0x07F007F0, a, 0xEA;
lop3.b32 b, d, 0x07F007F0, b, 0xEA;
mov.b32 e, 0x7B807B80;
mul.rn.bf16x2 $0, a, e;
mul.rn.bf16x2 $1, b, e;
}
""")
"""Exponent and mantissa of e4m3 in those bits of a bfloat16, which is the value times 2^-120, times 2^120.

Exact, for subnormal numbers too; NaN, which no weight should be, becomes 480.
"""


@triton.jit
def _widen(stored, half: tl.constexpr, plan: tl.constexpr, like):
    """Return stored bytes (half=0), or their low (half=1) or high (half=2) 4 bits, in the dtype of `like`."""
    dtype: tl.constexpr = like.dtype.element_ty
    if plan.assembly and plan.float8:
        stored = stored.to(tl.int8, bitcast=True)
        return tl.inline_asm_elementwise(_FLOAT8, "=r,=r,r", [stored], dtype=tl.bfloat16, is_pure=True, pack=4)
    if plan.assembly:
        assembly: tl.constexpr = _BYTE if half == 0 else _LOW_HALF if half == 1 else _HIGH_HALF
        return tl.inline_asm_elementwise(assembly, "=r,=r,r", [stored], dtype=tl.bfloat16, is_pure=True, pack=4)
    if half == 1:
        stored = (stored << 4) >> 4
    elif half == 2:
        stored = stored >> 4
    return stored.to(dtype)


@triton.jit
def convert(stored, half: tl.constexpr, table, power, plan: tl.constexpr, like):
    """Return the values of stored bytes, or of their halves as in `_widen`; those of indices are in the table.

    With `plan.exponent_size` they are multiplied by `power`. With `plan.rounded` they stay as they are.
    """
    if plan.rounded:
        return stored
    elif plan.exponent_size > 0:
        return look_up(stored, half, table, plan, like) * power
    elif plan.entries > 0:
        return look_up(stored, half, table, plan, like)
    else:
        return _widen(stored, half, plan, like)


@triton.jit
def _load_activations(x, place, valid, plan: tl.constexpr):
    """Return the activations for integers in the low and in the high 4 bits of bytes; for 8 bits twice the same."""
    dtype: tl.constexpr = x.dtype.element_ty
    if plan.halves == 1:
        both = tl.load(x + place, valid, 0)
        return both, both
    else:
        pairs = tl.load(x.to(tl.pointer_type(tl.int32)) + place, valid, 0)
        low = (pairs & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
        return low, (pairs >> 16).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def _add_bytes(total, stored, low, high, table, power, plan: tl.constexpr, like):
    """Add the products of stored bytes, or of both of their halves, with the activations to a sum."""
    if plan.halves == 1:
        return tl.dot(convert(stored, 0, table, power, plan, like), low, total, out_dtype=total.dtype)
    else:
        total = tl.dot(convert(stored, 1, table, power, plan, like), low, total)
        return tl.dot(convert(stored, 2, table, power, plan, like), high, total)


@triton.jit
def load_powers(exponents, position, output, plan: tl.constexpr, like):
    """Return the powers of two of stored bytes at `position` in the rows `output`, in the dtype of `like`."""
    size: tl.constexpr = plan.exponent_size // plan.halves
    power = tl.load(exponents + output * (plan.inputs // plan.exponent_size) + position // size)
    bits = (power.to(tl.int32) + 127) << 23
    return bits.to(tl.float32, bitcast=True).to(like.dtype.element_ty)


@triton.jit
def _move_to_tile(x, q, constants, exponents, groups, out, plan: tl.constexpr):
    """Return the pointers of this program's tile of rows and its group's matrix, and 0 for a tile of no group, or 1."""
    if plan.tiles == 0:
        return x, q, constants, exponents, out, 1
    else:
        tile = tl.program_id(2).to(tl.int64)
        found = tl.load(groups + tile)
        group = tl.maximum(found, 0).to(tl.int64)
        x += tile * (plan.rows * plan.inputs)
        q += group * (plan.outputs * plan.inputs // plan.halves)
        constants += group * plan.constants
        if plan.exponent_size > 0:
            exponents += group * (plan.outputs * plan.inputs // plan.exponent_size)
        elif plan.entries > 0 and plan.scaled:
            exponents += group * (plan.outputs * plan.groups)
        out += tile * (plan.rows * plan.outputs)
        return x, q, constants, exponents, out, (found >= 0).to(tl.int32)


@triton.jit
def product_kernel(x, q, constants, exponents, groups, out, plan: tl.constexpr):
    """Multiply x [rows, in] with a block of the packed matrix's rows, summing over one range of the inputs.

    The program ids are the block and the range. `q` holds the bytes of the matrix, [out, in / halves]. `constants` are
    the scales of numbers, [out / scale_rows, groups], or the tables [tables, entries] of indices. `exponents`
    [out, in / exponent_size] are read if `exponent_size` is not 0; they are the scales of indices that have some. `out`
    is [rows, out] if there is one range, otherwise float32 [ranges, rows, out]. With `rounded` x holds integers of 8
    bits too, and `out` their int32 sums, without scales. A tile of the matrix is the left operand of a tensor core,
    which has at least 16 rows, and the activations are the right one, which has at least 8 columns.

    With `tiles` there is a third program id, the tile of `rows` rows of x [tiles * rows, in], and `groups` [tiles] has
    the number of its matrix in q [matrices, out, in / halves] and the other arrays, or -1, for which the result is 0.
    """
    x, q, constants, exponents, out, active = _move_to_tile(x, q, constants, exponents, groups, out, plan)
    width: tl.constexpr = plan.block_in // plan.halves
    stride: tl.constexpr = plan.inputs // plan.halves
    block_out: tl.constexpr = plan.block_out
    padded_rows: tl.constexpr = plan.padded_rows
    block = tl.program_id(0)
    part = tl.program_id(1)
    output = block * block_out + tl.arange(0, block_out)
    row = tl.arange(0, padded_rows)
    column = tl.arange(0, width)
    sums: tl.constexpr = tl.int32 if plan.rounded else tl.float32
    row_valid = (row < plan.rows)[None]
    here = q + output.to(tl.int64)[:, None] * stride + column
    first = part * plan.steps
    total = tl.zeros([block_out, padded_rows], sums)
    table = 0
    if plan.entries > 0:
        table = load_table(constants, block, plan, x)
    if plan.scaled:
        scale_of = (exponents if plan.entries > 0 else constants) + output // plan.scale_rows * plan.groups
        scale = tl.load(scale_of + first * plan.block_in // plan.group_size).to(tl.float32)
    for step in range(first, first + plan.steps * active):
        stored = tl.load(here + step * width)
        beside = row[None] * stride + step * width + column[:, None]
        low, high = _load_activations(x, beside, row_valid, plan)
        # With a scale for each group the sum starts anew, as it is multiplied by the scale.
        partial = total
        if plan.groups > 1:
            partial = tl.zeros([block_out, padded_rows], tl.float32)
        power = 1
        if plan.exponent_size > 0:
            power = load_powers(exponents, (step * width + column)[None], output[:, None], plan, x)
        partial = _add_bytes(partial, stored, low, high, table, power, plan, x)
        if plan.groups > 1:
            total += partial * scale[:, None]
            # Loads of two bytes are not pipelined by the compiler: this one is waited for in the next step.
            group = tl.minimum((step + 1) * plan.block_in // plan.group_size, plan.groups - 1)
            scale = tl.load(scale_of + group).to(tl.float32)
        else:
            total = partial
    if plan.groups == 1 and plan.scaled:
        total *= scale[:, None]
    target = out + (part * plan.all_rows + row)[None] * plan.outputs + output[:, None]
    tl.store(target, total.to(out.dtype.element_ty), row_valid)


@triton.jit
def sliced_product_kernel(x, q, constants, exponents, groups, out, plan: tl.constexpr):
    """Multiply x with a block of rows of the packed matrix; a program's warps divide the inputs and add their sums.

    Neighbouring blocks of inputs belong to different warps, which do not wait for each other before the end.
    A step thus reads long pieces of each row, which memory serves faster than short ones that are far apart.
    """
    x, q, constants, exponents, out, active = _move_to_tile(x, q, constants, exponents, groups, out, plan)
    width: tl.constexpr = plan.block_in // plan.halves
    stride: tl.constexpr = plan.inputs // plan.halves
    block_out: tl.constexpr = plan.block_out
    padded_rows: tl.constexpr = plan.padded_rows
    slices: tl.constexpr = plan.slices
    block = tl.program_id(0)
    part = tl.program_id(1)
    output = block * block_out + tl.arange(0, block_out)
    row = tl.arange(0, padded_rows)
    column = tl.arange(0, width)
    sums: tl.constexpr = tl.int32 if plan.rounded else tl.float32
    row_valid = row < plan.rows
    first = part * slices * plan.steps + tl.arange(0, slices)
    here = q + output.to(tl.int64)[None, :, None] * stride + (first[:, None] * width + column)[:, None, :]
    beside = row[None, None] * stride + (first[:, None] * width + column)[:, :, None]
    total = tl.zeros([slices, block_out, padded_rows], sums)
    table = 0
    if plan.entries > 0:
        table = load_table(constants, block, plan, x)
    if plan.scaled:
        scale_of = (exponents if plan.entries > 0 else constants) + (output // plan.scale_rows * plan.groups)[None]
        scale = tl.load(scale_of + (first * plan.block_in // plan.group_size)[:, None]).to(tl.float32)
    for step in range(0, plan.steps * slices * active, slices):
        stored = tl.load(here + step * width)
        low, high = _load_activations(x, beside + step * width, row_valid[None, None], plan)
        partial = total
        if plan.groups > 1:
            partial = tl.zeros([slices, block_out, padded_rows], tl.float32)
        power = 1
        if plan.exponent_size > 0:
            position = ((first[:, None] + step) * width + column)[:, None, :]
            power = load_powers(exponents, position, output[None, :, None], plan, x)
        partial = _add_bytes(partial, stored, low, high, table, power, plan, x)
        if plan.groups > 1:
            total += partial * scale[:, :, None]
            group = tl.minimum((first + step + slices) * plan.block_in // plan.group_size, plan.groups - 1)
            scale = tl.load(scale_of + group[:, None]).to(tl.float32)
        else:
            total = partial
    result = tl.sum(total, 0)
    if plan.groups == 1 and plan.scaled:
        scale_of = exponents if plan.entries > 0 else constants
        result *= tl.load(scale_of + output // plan.scale_rows).to(tl.float32)[:, None]
    target = out + (part * plan.all_rows + row)[None] * plan.outputs + output[:, None]
    tl.store(target, result.to(out.dtype.element_ty), row_valid[None])
