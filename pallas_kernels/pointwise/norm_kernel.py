"""The gradients of RMSNorm and LayerNorm in one pass over memory, and the gradient that passes the norm by added."""

# A constant of a kernel has to be annotated as constexpr, whose attributes no type checker knows.
# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def gradient_kernel(x, gain, d_out, d_past, d_x, d_gain, d_bias, plan: tl.constexpr):
    """Rows `program_id`, + programs, ... of blocks of rows.

    x, d_out, d_past, d_x [rows, D], gain [D] float32; d_gain and d_bias [programs, D] float32, of these rows only.
    """
    width: tl.constexpr = plan.width
    count: tl.constexpr = plan.count
    padded: tl.constexpr = plan.padded
    program = tl.program_id(0)
    columns = tl.arange(0, padded)
    valid = columns < width
    scale = tl.load(gain + columns, valid, 0.0)
    sum_gain, sum_bias = tl.zeros([padded], tl.float32), tl.zeros([padded], tl.float32)
    for block in tl.range(program, plan.blocks, plan.programs, num_stages=plan.stages):
        rows = (block * count + tl.arange(0, count)).to(tl.int64)
        places = rows[:, None] * width + columns[None, :]
        here = (rows < plan.rows)[:, None] & valid[None, :]
        value = tl.load(x + places, here, 0.0).to(tl.float32)
        gradient = tl.load(d_out + places, here, 0.0).to(tl.float32)
        scaled = gradient * scale[None, :]
        if plan.centered:
            value = tl.where(here, value - tl.sum(value, 1, keep_dims=True) / width, 0.0)
        inverse = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / width + plan.epsilon)
        normal = value * inverse
        change = scaled - normal * (tl.sum(scaled * normal, 1, keep_dims=True) / width)
        if plan.centered:
            change -= tl.sum(scaled, 1, keep_dims=True) / width
        change *= inverse
        if plan.past:
            change += tl.load(d_past + places, here, 0.0).to(tl.float32)
        tl.store(d_x + places, change.to(d_x.dtype.element_ty), here)
        sum_gain += tl.sum(gradient * normal, 0)
        if plan.centered:
            sum_bias += tl.sum(gradient, 0)
    tl.store(d_gain + program * width + columns, sum_gain, valid)
    if plan.centered:
        tl.store(d_bias + program * width + columns, sum_bias, valid)
