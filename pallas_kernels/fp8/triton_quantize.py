"""Rounds a tile to FP8, as it is and turned, in one pass: with one scale, or with one for 128 values.

With one scale also what has just been computed of other arrays: SwiGLU, and its gradients.
"""

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
def tile_of(plan: tl.constexpr):
    """Rows [128, 1] and columns [1, width] of this program's tile."""
    tile = tl.program_id(0)
    rows = tile // plan.column_tiles * 128 + tl.arange(0, 128)
    columns = tile % plan.column_tiles * plan.width + tl.arange(0, plan.width)
    return rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]


@triton.jit
def store_both(block, scale, values, turned, maxima, rows, columns, plan: tl.constexpr):
    """Writes a tile times scale [], and turned, and its largest magnitude. Casts saturate."""
    rounded = (block.to(tl.float32) * tl.load(scale)).to(values.dtype.element_ty)
    tl.store(values + rows * plan.columns + columns, rounded)
    tl.store(turned + tl.trans(columns) * plan.rows + tl.trans(rows), tl.trans(rounded))
    tl.store(maxima + tl.program_id(0), tl.max(tl.abs(block.to(tl.float32))))


@triton.jit
def cast_kernel(x, scale, values, turned, maxima, plan: tl.constexpr):
    """x [rows, columns]."""
    rows, columns = tile_of(plan)
    store_both(tl.load(x + rows * plan.columns + columns), scale, values, turned, maxima, rows, columns, plan)


@triton.jit
def swiglu_kernel(gate, up, scale, values, turned, maxima, plan: tl.constexpr):
    """silu(gate) * up, both [rows, columns]."""
    rows, columns = tile_of(plan)
    wide = tl.load(gate + rows * plan.columns + columns).to(tl.float32)
    block = wide * tl.sigmoid(wide) * tl.load(up + rows * plan.columns + columns).to(tl.float32)
    # In the dtype that the product would have by itself; of two bytes, it is also turned faster than of one.
    store_both(block.to(gate.dtype.element_ty), scale, values, turned, maxima, rows, columns, plan)


@triton.jit
def swiglu_gradients_kernel(  # noqa: PLR0913
    gate, up, d_out, gate_scale, up_scale,
    gate_values, gate_turned, gate_maxima, up_values, up_turned, up_maxima, plan: tl.constexpr,
):  # fmt: skip
    """The gradients of both, from that of the product, all [rows, columns]."""
    rows, columns = tile_of(plan)
    wide = tl.load(gate + rows * plan.columns + columns).to(tl.float32)
    d_wide = tl.load(d_out + rows * plan.columns + columns).to(tl.float32)
    wide_up = tl.load(up + rows * plan.columns + columns).to(tl.float32)
    sigmoid = tl.sigmoid(wide)
    silu = wide * sigmoid
    d_up = (d_wide * silu).to(gate.dtype.element_ty)
    d_gate = (d_wide * wide_up * (sigmoid + silu * (1.0 - sigmoid))).to(gate.dtype.element_ty)
    store_both(d_gate, gate_scale, gate_values, gate_turned, gate_maxima, rows, columns, plan)
    store_both(d_up, up_scale, up_values, up_turned, up_maxima, rows, columns, plan)
