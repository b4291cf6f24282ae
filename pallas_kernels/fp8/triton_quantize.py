"""Triton kernels that quantize a tile and its transpose to FP8 in one pass, with one scale for the array or for a tile.

They also quantize RMSNorm, SwiGLU and the gradients of SwiGLU, computed from other arrays in the same pass.
"""

# Constants of a Triton kernel are annotated as constexpr: type checkers know neither its attributes nor that numbers
# and strings become one, nor what jit returns.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportArgumentType=false
import triton
import triton.language as tl


@triton.jit
def group_scale(amax, limit: tl.constexpr):
    """Return the largest power of two s with amax * s <= limit, where `limit` is the largest number of an FP8 format.

    It equals `formats.power_of_two_scale`, for formats whose `limit` is 1.75 times a power of two.

    Computed on bits, without a division: the difference of the exponents, minus one if amax exceeds 1.75 times its own
    power of two.
    """
    exponent = (amax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23
    power: tl.constexpr = 254 + (15 if limit > 448 else 8)
    scale = (tl.minimum(power - exponent, 227) << 23).to(tl.float32, bitcast=True)
    return tl.where(amax > 0, tl.where(amax < float("inf"), scale, 0.0), 1.0)


@triton.jit
def tile_indices(plan: tl.constexpr):
    """Return the row indices [128, 1] and the column indices [1, width] of this program's tile."""
    tile = tl.program_id(0)
    rows = tile // plan.column_tiles * 128 + tl.arange(0, 128)
    columns = tile % plan.column_tiles * plan.width + tl.arange(0, plan.width)
    return rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]


@triton.jit
def scale_of(history, inverse, plan: tl.constexpr):
    """Return the scalar scale for the largest amax in the history (or the default), and store its inverse."""
    places = tl.arange(0, plan.padded_history)
    amax = tl.max(tl.load(history + plan.history_start + places, places < plan.history, 0.0))
    scale = group_scale(tl.where(amax > 0, amax, plan.default_amax), plan.limit)
    if tl.program_id(0) == 0:
        tl.store(inverse, 1.0 / scale)
    return scale


@triton.jit
def store_both(block, scale, values, transposed, rows, columns, plan: tl.constexpr):
    """Multiply a tile by a scalar scale, and store it and its transpose in FP8 with saturating casts."""
    rounded = (block.to(tl.float32) * scale).to(values.dtype.element_ty)
    tl.store(values + rows * plan.columns + columns, rounded)
    tl.store(transposed + tl.trans(columns) * plan.rows + tl.trans(rows), tl.trans(rounded))


@triton.jit
def cast_kernel(x, history, values, transposed, maxima, inverse, plan: tl.constexpr):
    """Quantize a tile of x [rows, columns], and its transpose, with one scale for the whole array."""
    rows, columns = tile_indices(plan)
    scale = scale_of(history, inverse, plan)
    block = tl.load(x + rows * plan.columns + columns)
    store_both(block, scale, values, transposed, rows, columns, plan)
    tl.store(maxima + tl.program_id(0), tl.max(tl.abs(block.to(tl.float32))))


@triton.jit
def recast_kernel(x, x_maxima, history, values, transposed, inverse, plan: tl.constexpr):
    """Requantize FP8 x from a scale per tile (given by the tile's amax) to one scale for the whole array.

    Scales are powers of two: only values that fall below the normal numbers of the format are rounded a second time.
    """
    rows, columns = tile_indices(plan)
    own = 1.0 / group_scale(tl.load(x_maxima + tl.program_id(0)), plan.limit)
    block = tl.load(x + rows * plan.columns + columns).to(tl.float32) * own
    # Exact in two bytes, in which the tile is transposed faster.
    store_both(block.to(tl.bfloat16), scale_of(history, inverse, plan), values, transposed, rows, columns, plan)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) with an error of at most two ulp, in a third of the instructions of Triton's own."""
    assembly: tl.constexpr = """
        mul.f32 $0, $1, 0fBFB8AA3B;  // -log2(e)
        ex2.approx.ftz.f32 $0, $0;
        add.f32 $0, $0, 0f3F800000;
        rcp.approx.ftz.f32 $0, $0;
    """
    return tl.inline_asm_elementwise(assembly, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def swiglu_of(gate, up, rows, columns, plan: tl.constexpr):
    """Return a tile of silu(gate) * up, rounded to their dtype as the stored product would be."""
    wide = tl.load(gate + rows * plan.columns + columns).to(tl.float32)
    block = wide * sigmoid(wide) * tl.load(up + rows * plan.columns + columns).to(tl.float32)
    return block.to(gate.dtype.element_ty)


@triton.jit
def swiglu_gradients_of(gate, up, d_out, rows, columns, plan: tl.constexpr):
    """Return a tile of the gradients of gate and up, from `d_out`, the gradient of SwiGLU's result."""
    wide = tl.load(gate + rows * plan.columns + columns).to(tl.float32)
    d_wide = tl.load(d_out + rows * plan.columns + columns).to(tl.float32)
    wide_up = tl.load(up + rows * plan.columns + columns).to(tl.float32)
    sigmoid_of_gate = sigmoid(wide)
    silu = wide * sigmoid_of_gate
    d_gate = d_wide * wide_up * (sigmoid_of_gate + silu * (1.0 - sigmoid_of_gate))
    return d_gate.to(gate.dtype.element_ty), (d_wide * silu).to(gate.dtype.element_ty)


@triton.jit
def store_own_scale(block, values, maxima, rows, columns, plan: tl.constexpr):
    """Quantize a tile with its own scale, and store the tile and its amax."""
    block = block.to(tl.float32)
    amax = tl.max(tl.abs(block))
    tl.store(
        values + rows * plan.columns + columns, (block * group_scale(amax, plan.limit)).to(values.dtype.element_ty)
    )
    tl.store(maxima + tl.program_id(0), amax)


@triton.jit
def weight_kernel(x, values, transposed, inverse, plan: tl.constexpr):
    """Quantize a weight [rows, columns], and its transpose, with one scale per tile of 128 x 128 values."""
    rows, columns = tile_indices(plan)
    block = tl.load(x + rows * plan.columns + columns).to(tl.float32)
    scale = group_scale(tl.max(tl.abs(block)), plan.limit)
    store_both(block, scale, values, transposed, rows, columns, plan)
    tl.store(inverse + tl.program_id(0), 1.0 / scale)


@triton.jit
def swiglu_kernel(gate, up, history, values, transposed, maxima, inverse, plan: tl.constexpr):
    """Quantize a tile of silu(gate) * up, and its transpose, with one scale for the whole array."""
    rows, columns = tile_indices(plan)
    scale = scale_of(history, inverse, plan)
    block = swiglu_of(gate, up, rows, columns, plan)
    store_both(block, scale, values, transposed, rows, columns, plan)
    tl.store(maxima + tl.program_id(0), tl.max(tl.abs(block.to(tl.float32))))


@triton.jit
def swiglu_tiles_kernel(gate, up, values, maxima, plan: tl.constexpr):
    """Quantize silu(gate) * up, each tile with a scale from its own largest magnitude."""
    rows, columns = tile_indices(plan)
    block = swiglu_of(gate, up, rows, columns, plan)
    store_own_scale(block, values, maxima, rows, columns, plan)


@triton.jit
def swiglu_gradients_kernel(  # noqa: PLR0913
    gate, up, d_out, gate_history, up_history, gate_values, gate_transposed, gate_maxima, gate_inverse,
    up_values, up_transposed, up_maxima, up_inverse, plan: tl.constexpr,
):  # fmt: skip
    """Quantize a tile of the gradients of SwiGLU's gate and up, and their transposes, with one scale per array."""
    rows, columns = tile_indices(plan)
    gate_scale = scale_of(gate_history, gate_inverse, plan)
    up_scale = scale_of(up_history, up_inverse, plan)
    d_gate, d_up = swiglu_gradients_of(gate, up, d_out, rows, columns, plan)
    store_both(d_gate, gate_scale, gate_values, gate_transposed, rows, columns, plan)
    tl.store(gate_maxima + tl.program_id(0), tl.max(tl.abs(d_gate.to(tl.float32))))
    store_both(d_up, up_scale, up_values, up_transposed, rows, columns, plan)
    tl.store(up_maxima + tl.program_id(0), tl.max(tl.abs(d_up.to(tl.float32))))


@triton.jit
def swiglu_gradients_tiles_kernel(gate, up, d_out, gate_values, gate_maxima, up_values, up_maxima, plan: tl.constexpr):
    """Quantize the gradients of SwiGLU's gate and up, each tile with a scale from its own largest magnitude."""
    rows, columns = tile_indices(plan)
    d_gate, d_up = swiglu_gradients_of(gate, up, d_out, rows, columns, plan)
    store_own_scale(d_gate, gate_values, gate_maxima, rows, columns, plan)
    store_own_scale(d_up, up_values, up_maxima, rows, columns, plan)


@triton.jit
def norm_of(x, inverse_rms, gain, rows, columns, plan: tl.constexpr):
    """Return a tile of RMSNorm's output x * inverse_rms * gain, in the dtype of x."""
    block = tl.load(x + rows * plan.columns + columns).to(tl.float32)
    return (block * tl.load(inverse_rms + rows) * tl.load(gain + columns)).to(x.dtype.element_ty)


@triton.jit
def norm_kernel(x, inverse_rms, gain, history, values, transposed, maxima, inverse, plan: tl.constexpr):
    """Quantize a tile of RMSNorm's output x * inverse_rms * gain, and its transpose, with one scale per array."""
    rows, columns = tile_indices(plan)
    block = norm_of(x, inverse_rms, gain, rows, columns, plan)
    scale = scale_of(history, inverse, plan)
    store_both(block, scale, values, transposed, rows, columns, plan)
    tl.store(maxima + tl.program_id(0), tl.max(tl.abs(block.to(tl.float32))))


@triton.jit
def norm_tiles_kernel(x, inverse_rms, gain, values, maxima, plan: tl.constexpr):
    """Quantize RMSNorm's output x * inverse_rms * gain, each tile with a scale from its own largest magnitude."""
    rows, columns = tile_indices(plan)
    block = norm_of(x, inverse_rms, gain, rows, columns, plan)
    store_own_scale(block, values, maxima, rows, columns, plan)


@triton.jit
def maxima_kernel(inputs, weights, gradients, found, plan: tl.constexpr):
    """Store the maxima of input, weight and gradient in column 0 of `found` [3, history], and zeros elsewhere."""
    role = tl.program_id(0)
    if role == 0:
        largest = largest_of(inputs, plan.inputs)
    elif role == 1:
        largest = largest_of(weights, plan.weights)
    else:
        largest = largest_of(gradients, plan.gradients)
    places = tl.arange(0, plan.padded_history)
    tl.store(found + role * plan.history + places, tl.where(places == 0, largest, 0.0), places < plan.history)


@triton.jit
def largest_of(values, count: tl.constexpr):
    """Return the maximum over the first `count` values."""
    places = tl.arange(0, 4096)
    largest = tl.zeros([4096], tl.float32)
    for start in range(0, count, 4096):
        largest = tl.maximum(largest, tl.load(values + start + places, start + places < count, 0.0))
    return tl.max(largest)
