"""Triton kernels of batch-invariant products and reductions over rows; their tiles have the same size for any batch."""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def product_kernel(x, weights, groups, out, plan: tl.constexpr):
    """Multiply a tile of rows of x [R, D] with a tile of columns of its group's matrix [D, F], in steps along D.

    `groups` has the group of each tile of rows; `weights` are [G, D, F] and `out` is [R, F]. Programs of neighbouring
    tiles run at about the same time, which finds their operands in the L2 cache.
    """
    tile_rows: tl.constexpr = plan.rows
    tile_columns: tl.constexpr = plan.columns
    block: tl.constexpr = plan.block
    program = tl.program_id(0)
    band = plan.band * plan.column_tiles
    first = program // band * plan.band
    height = tl.minimum(plan.row_tiles - first, plan.band)
    row_tile = first + program % band % height
    column_tile = program % band // height
    rows = (row_tile * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)
    columns = column_tile * tile_columns + tl.arange(0, tile_columns)
    here = columns < plan.width
    group = tl.load(groups + row_tile).to(tl.int64)
    matrix = weights + group * plan.depth * plan.width
    total = tl.zeros([tile_rows, tile_columns], tl.float32)
    for step in range(0, tl.cdiv(plan.depth, block)):
        depth = step * block + tl.arange(0, block)
        left = tl.load(x + rows[:, None] * plan.depth + depth, (depth < plan.depth)[None], 0.0)
        places = depth.to(tl.int64)[:, None] * plan.width + columns
        right = tl.load(matrix + places, (depth < plan.depth)[:, None] & here[None], 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    places = rows[:, None] * plan.width + columns
    tl.store(out + places, total.to(out.dtype.element_ty), here[None])


@triton.jit
def norm_kernel(x, gain, bias, out, plan: tl.constexpr):
    """Normalize some rows of x [R, D] over D, in float32: RMSNorm, or LayerNorm if `plan.centered`."""
    tile_rows: tl.constexpr = plan.rows
    padded: tl.constexpr = plan.padded
    rows = (tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)
    columns = tl.arange(0, padded)
    valid = columns < plan.width
    places = rows[:, None] * plan.width + columns
    here = (rows < plan.count)[:, None] & valid[None]
    value = tl.load(x + places, here, 0.0).to(tl.float32)
    if plan.centered:
        mean = tl.sum(value, 1) / plan.width
        value = tl.where(valid[None], value - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(value * value, 1) / plan.width + plan.epsilon)
    result = value * inverse[:, None] * tl.load(gain + columns, valid, 0.0)
    if plan.centered:
        result += tl.load(bias + columns, valid, 0.0)
    tl.store(out + places, result.to(out.dtype.element_ty), here)


@triton.jit
def log_sum_exp_kernel(x, out, plan: tl.constexpr):
    """Compute the log-sum-exp of a row of x [R, V] float32, a block of columns after the other."""
    block: tl.constexpr = plan.block
    row = tl.program_id(0).to(tl.int64)
    highest = float("-inf")
    total = 0.0
    for start in range(0, plan.width, block):
        columns = start + tl.arange(0, block)
        value = tl.load(x + row * plan.width + columns, columns < plan.width, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(value, 0))
        pivot = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        total = total * tl.exp(highest - pivot) + tl.sum(tl.exp(value - pivot), 0)
        highest = new_highest
    tl.store(out + row, highest + tl.log(total))
