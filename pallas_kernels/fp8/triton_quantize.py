"""Rounds a 128 x 128 tile to FP8, as it is and turned, in one pass: with one scale, or with one for 128 values."""

# A constant of a kernel has to be annotated as constexpr, whose attributes no type checker knows.
# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def group_scale(amax):
    """`formats.power_of_two_scale` for E4M3, bit by bit."""
    ratio = tl.minimum(tl.div_rn(tl.full(amax.shape, 448.0, tl.float32), amax), 1.2676506002282294e30)
    bits = ratio.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(amax > 0, bits.to(tl.float32, bitcast=True), 1.0)


@triton.jit
def quantize_kernel(x, values, inverse, turned_values, turned_inverse, plan: tl.constexpr):
    """One tile of x [rows, columns]; values as x, turned_values [columns, rows], scales [tiles, rows or columns]."""
    tile = tl.program_id(0)
    row_tile, column_tile = tile // plan.column_tiles, tile % plan.column_tiles
    rows = row_tile * 128 + tl.arange(0, 128)
    columns = column_tile * 128 + tl.arange(0, 128)
    wide_rows, wide_columns = rows.to(tl.int64), columns.to(tl.int64)
    block = tl.load(x + wide_rows[:, None] * plan.columns + columns[None, :]).to(tl.float32)
    size = tl.abs(block)

    # No product exceeds the format's range, so that the cast need not clip.
    scale = group_scale(tl.max(size, axis=1))
    rounded = (block * scale[:, None]).to(tl.float8e4nv)
    tl.store(values + wide_rows[:, None] * plan.columns + columns[None, :], rounded)
    tl.store(inverse + column_tile.to(tl.int64) * plan.rows + rows, 1.0 / scale)

    scale = group_scale(tl.max(size, axis=0))
    rounded = tl.trans((block * scale[None, :]).to(tl.float8e4nv))
    tl.store(turned_values + wide_columns[:, None] * plan.rows + rows[None, :], rounded)
    tl.store(turned_inverse + row_tile.to(tl.int64) * plan.columns + columns, 1.0 / scale)


@triton.jit
def cast_kernel(x, scale, values, turned_values, plan: tl.constexpr):
    """One tile of x [rows, columns] times scale []; values as x, turned_values [columns, rows]. Casts saturate."""
    tile = tl.program_id(0)
    rows = tile // plan.column_tiles * 128 + tl.arange(0, 128)
    columns = tile % plan.column_tiles * 128 + tl.arange(0, 128)
    wide_rows, wide_columns = rows.to(tl.int64), columns.to(tl.int64)
    block = tl.load(x + wide_rows[:, None] * plan.columns + columns[None, :]).to(tl.float32)
    rounded = (block * tl.load(scale)).to(values.dtype.element_ty)
    tl.store(values + wide_rows[:, None] * plan.columns + columns[None, :], rounded)
    tl.store(turned_values + wide_columns[:, None] * plan.rows + rows[None, :], tl.trans(rounded))
