"""Triton kernel for the gradients of RMSNorm and LayerNorm in one pass, which can add the residual's gradient."""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false
import triton
import triton.language as tl


@triton.jit
def add_four(a, b, c, d, e, f, g, h):
    """Add four pairs of values: combine function of a `tl.reduce` that computes four sums with one synchronization."""
    return a + e, b + f, c + g, d + h


@triton.jit
def load_row(x, d_out, d_residual, row, columns, plan: tl.constexpr):
    """Return a zero-padded row each of x, d_out and d_residual, and a pivot to subtract from x before taking sums.

    The pivot is a value that is subtracted from x (if centered) so that its mean is small.
    """
    here = (columns < plan.width) & (row < plan.rows)
    places = row * plan.width + columns
    value = tl.load(x + places, here, 0.0)
    gradient = tl.load(d_out + places, here, 0.0)
    residual = gradient
    if plan.has_residual:
        residual = tl.load(d_residual + places, here, 0.0)
    pivot = 0.0
    if plan.centered:
        pivot = tl.load(x + row * plan.width, row < plan.rows, 0.0).to(tl.float32)
    return value, gradient, residual, pivot


@triton.jit
def gradient_kernel(x, gain, d_out, d_residual, d_x, sums, plan: tl.constexpr):
    """Compute a norm's gradients for this program's rows (every `programs`-th), loading each row one step ahead.

    A program begins at the row `program_id`.

    x, d_out, d_residual and d_x are [rows, D], gain is [D] float32. Sums are float32 [1, or 2 if centered, programs,
    D]: the gradients of gain (and bias) over the rows of each program.
    """
    width: tl.constexpr = plan.width
    padded: tl.constexpr = plan.padded
    program = tl.program_id(0)
    columns = tl.arange(0, padded)
    valid = columns < width
    scale = tl.load(gain + columns, valid, 0.0)
    sum_gain = tl.zeros([padded], tl.float32)
    sum_bias = tl.zeros([padded], tl.float32)
    row = program.to(tl.int64)
    next_value, next_gradient, next_residual, next_pivot = load_row(x, d_out, d_residual, row, columns, plan)
    for _ in range(program, plan.rows, plan.programs):
        value = next_value.to(tl.float32)
        gradient = next_gradient.to(tl.float32)
        residual = next_residual.to(tl.float32)
        if plan.centered:
            value = tl.where(valid, value - next_pivot, 0.0)
        next_row = row + plan.programs
        next_value, next_gradient, next_residual, next_pivot = load_row(x, d_out, d_residual, next_row, columns, plan)
        scaled = gradient * scale
        square, along, total, ones = tl.reduce((value * value, scaled * value, value, scaled), 0, add_four)
        mean = 0.0
        square = square / width
        along = along / width
        ones = ones / width
        if plan.centered:
            mean = total / width
            square = tl.maximum(square - mean * mean, 0.0)
            along = along - mean * ones
        inverse = tl.rsqrt(square + plan.epsilon)
        normal = (value - mean) * inverse
        if plan.centered:
            scaled -= ones
            sum_bias += gradient
        sum_gain += gradient * normal
        change = (scaled - normal * (along * inverse)) * inverse
        if plan.has_residual:
            change += residual
        tl.store(d_x + row * width + columns, change.to(d_x.dtype.element_ty), valid)
        row = next_row
    tl.store(sums + program * width + columns, sum_gain, valid)
    if plan.centered:
        tl.store(sums + (plan.programs + program) * width + columns, sum_bias, valid)
