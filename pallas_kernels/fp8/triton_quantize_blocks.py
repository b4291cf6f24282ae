"""Triton kernels of blockwise FP8: quantize a tile of 128 x 128 values and its transpose in one pass.

They quantize an array, or RMSNorm, SwiGLU and the gradients of SwiGLU, computed from other arrays in the same pass.

A tile is held as four parts, each with every fourth row, so that a thread has the same column of four consecutive rows.
Rounded to a byte each, these four values are one 32-bit word of the transpose. Only such words, half as many bytes as
in bfloat16, pass through shared memory to be transposed. A program computes one tile after the other; with more than
one stage it loads the next tiles into shared memory meanwhile.
"""

# Constants of a Triton kernel are annotated as constexpr: type checkers know neither its attributes nor that numbers
# and strings become one, nor what jit returns.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportArgumentType=false
import triton
import triton.language as tl

from pallas_kernels.fp8.triton_quantize import sigmoid


@triton.jit
def quantize_kernel(x, values, inverse, turned, turned_inverse, plan: tl.constexpr):
    """Quantize x [rows, columns] with a scale per 128 values of a row, and its transpose.

    Writes values [rows, columns], inverse scales [columns / 128, rows], the transpose `turned` [columns, rows] and its
    inverse scales, [rows / 128, columns], or [rows / 128, columns / 128] if the plan has one scale per tile.
    """
    for tile in tl.range(tl.program_id(0), plan.tiles, plan.programs, num_stages=plan.stages):
        r, c = tile_place(tile, plan)
        p0 = wide_part(x, 0, r, c, plan)
        p1 = wide_part(x, 1, r, c, plan)
        p2 = wide_part(x, 2, r, c, plan)
        p3 = wide_part(x, 3, r, c, plan)
        store_tile(p0, p1, p2, p3, values, inverse, turned, turned_inverse, r, c, plan)


@triton.jit
def norm_kernel(x, inverse_rms, gain, values, inverse, turned, turned_inverse, plan: tl.constexpr):
    """Quantize RMSNorm's output x * inverse_rms * gain, and its transpose, as `quantize_kernel` does."""
    for tile in tl.range(tl.program_id(0), plan.tiles, plan.programs, num_stages=plan.stages):
        r, c = tile_place(tile, plan)
        factors = tl.load(gain + c * 128 + tl.arange(0, 128))[None, :]
        p0, p1 = norm_parts(x, inverse_rms, factors, 0, r, c, plan)
        p2, p3 = norm_parts(x, inverse_rms, factors, 2, r, c, plan)
        store_tile(p0, p1, p2, p3, values, inverse, turned, turned_inverse, r, c, plan)


@triton.jit
def swiglu_kernel(gate, up, values, inverse, turned, turned_inverse, plan: tl.constexpr):
    """Quantize silu(gate) * up, and its transpose, as `quantize_kernel` does."""
    for tile in tl.range(tl.program_id(0), plan.tiles, plan.programs, num_stages=plan.stages):
        r, c = tile_place(tile, plan)
        p0, p1 = swiglu_parts(gate, up, 0, r, c, plan)
        p2, p3 = swiglu_parts(gate, up, 2, r, c, plan)
        store_tile(p0, p1, p2, p3, values, inverse, turned, turned_inverse, r, c, plan)


@triton.jit
def swiglu_gradients_kernel(  # noqa: PLR0913
    gate, up, d_out, gate_values, gate_inverse, gate_turned, gate_turned_inverse,
    up_values, up_inverse, up_turned, up_turned_inverse, plan: tl.constexpr,
):  # fmt: skip
    """Quantize the gradients of SwiGLU's gate and up, and their transposes, as `quantize_kernel` does."""
    for tile in tl.range(tl.program_id(0), plan.tiles, plan.programs, num_stages=plan.stages):
        r, c = tile_place(tile, plan)
        g0, u0 = swiglu_gradients_part(gate, up, d_out, 0, r, c, plan)
        g1, u1 = swiglu_gradients_part(gate, up, d_out, 1, r, c, plan)
        g2, u2 = swiglu_gradients_part(gate, up, d_out, 2, r, c, plan)
        g3, u3 = swiglu_gradients_part(gate, up, d_out, 3, r, c, plan)
        store_tile(g0, g1, g2, g3, gate_values, gate_inverse, gate_turned, gate_turned_inverse, r, c, plan)
        store_tile(u0, u1, u2, u3, up_values, up_inverse, up_turned, up_turned_inverse, r, c, plan)


# --- what is quantized -------------------------------------------------------------------------------------------


@triton.jit
def tile_place(tile, plan: tl.constexpr):
    """Return the row and the column of a tile, counted in tiles.

    Tiles are taken band by band, a band being all rows of `plan.together` columns of tiles.
    """
    band = tile // (plan.row_tiles * plan.together)
    within = tile % (plan.row_tiles * plan.together)
    return within // plan.together, band * plan.together + within % plan.together


@triton.jit
def wide_part(x, part: tl.constexpr, r, c, plan: tl.constexpr):
    """Load the rows part, part + 4, ... of a tile of x, [32, 128], as float32."""
    start = x + r.to(tl.int64) * (128 * plan.columns) + c * 128
    rows = 4 * tl.arange(0, 32) + part
    return tl.load(start + rows[:, None] * plan.columns + tl.arange(0, 128)[None, :]).to(tl.float32)


@triton.jit
def rounded(a, b, dtype: tl.constexpr):
    """Round two float32 arrays to `dtype`, in which they would be stored, and return them as float32."""
    if dtype == tl.bfloat16:
        # One instruction rounds both; Triton's own cast takes four slower ones.
        assembly: tl.constexpr = """
            {
            .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xffff0000;
            }
        """
        types: tl.constexpr = (tl.float32, tl.float32)
        a, b = tl.inline_asm_elementwise(assembly, "=f,=f,f,f", [a, b], dtype=types, is_pure=True, pack=1)
    else:
        a = a.to(dtype).to(tl.float32)
        b = b.to(dtype).to(tl.float32)
    return a, b


@triton.jit
def norm_parts(x, inverse_rms, factors, part: tl.constexpr, r, c, plan: tl.constexpr):
    """Return two parts of a tile of RMSNorm's output, rounded to the dtype of x."""
    rows = inverse_rms + r * 128 + 4 * tl.arange(0, 32) + part
    first = wide_part(x, part, r, c, plan) * tl.load(rows)[:, None] * factors
    second = wide_part(x, part + 1, r, c, plan) * tl.load(rows + 1)[:, None] * factors
    return rounded(first, second, x.dtype.element_ty)


@triton.jit
def swiglu_parts(gate, up, part: tl.constexpr, r, c, plan: tl.constexpr):
    """Return two parts of a tile of silu(gate) * up, rounded to their dtype."""
    first = wide_part(gate, part, r, c, plan)
    second = wide_part(gate, part + 1, r, c, plan)
    first = first * sigmoid(first) * wide_part(up, part, r, c, plan)
    second = second * sigmoid(second) * wide_part(up, part + 1, r, c, plan)
    return rounded(first, second, gate.dtype.element_ty)


@triton.jit
def swiglu_gradients_part(gate, up, d_out, part: tl.constexpr, r, c, plan: tl.constexpr):
    """Return a part of a tile of the gradients of gate and up, rounded to their dtype."""
    wide = wide_part(gate, part, r, c, plan)
    wide_up = wide_part(up, part, r, c, plan)
    d_wide = wide_part(d_out, part, r, c, plan)
    sigmoid_of_gate = sigmoid(wide)
    silu = wide * sigmoid_of_gate
    d_gate = d_wide * wide_up * (sigmoid_of_gate + silu * (1.0 - sigmoid_of_gate))
    return rounded(d_gate, d_wide * silu, gate.dtype.element_ty)


# --- quantization ------------------------------------------------------------------------------------------------


@triton.jit
def store_tile(p0, p1, p2, p3, values, inverse, turned, turned_inverse, r, c, plan: tl.constexpr):  # noqa: PLR0913
    """Quantize a tile, given as four parts, with a scale per row, and its transpose, and store both."""
    tile_values = values + r.to(tl.int64) * (128 * plan.columns) + c * 128
    m0, i0 = store_rows(p0, 0, tile_values, plan)
    m1, i1 = store_rows(p1, 1, tile_values, plan)
    m2, i2 = store_rows(p2, 2, tile_values, plan)
    m3, i3 = store_rows(p3, 3, tile_values, plan)
    inverses = tl.reshape(tl.join(tl.join(i0, i2), tl.join(i1, i3)), [128])
    tl.store(inverse + c * plan.rows + r * 128 + tl.arange(0, 128), inverses)
    columns = tl.arange(0, 128)
    if plan.shared:
        scale, inverse_scale = group_scales(tl.max(largest_of_four(m0, m1, m2, m3)))
        tl.store(turned_inverse + r * plan.column_tiles + c, inverse_scale)
    else:
        largest = largest_of_four(tl.abs(p0), tl.abs(p1), tl.abs(p2), tl.abs(p3))
        scale, inverse_scale = group_scales(tl.max(largest, axis=0))
        tl.store(turned_inverse + r * plan.columns + c * 128 + columns, inverse_scale)
        scale = scale[None, :]
    words = four_bytes(p0 * scale, p1 * scale, p2 * scale, p3 * scale)
    row_words: tl.constexpr = plan.rows // 4
    tile_words = turned.to(tl.pointer_type(tl.int32)) + c.to(tl.int64) * (128 * row_words) + r * 32
    tl.store(tile_words + columns[:, None] * row_words + tl.arange(0, 32)[None, :], tl.trans(words))


@triton.jit
def store_rows(part, index: tl.constexpr, tile_values, plan: tl.constexpr):
    """Store a part of a tile with a scale per row; return the largest magnitudes of rows and the inverse scales."""
    largest = tl.max(tl.abs(part), axis=1)
    scale, inverse_scale = group_scales(largest)
    places = (4 * tl.arange(0, 32) + index)[:, None] * plan.columns + tl.arange(0, 128)[None, :]
    tl.store(tile_values + places, (part * scale[:, None]).to(tile_values.dtype.element_ty))
    return largest, inverse_scale


@triton.jit
def largest_of_four(a, b, c, d):
    """Return the elementwise maximum of four arrays."""
    return tl.maximum(tl.maximum(a, b), tl.maximum(c, d))


@triton.jit
def group_scales(amax):
    """Return `triton_quantize.group_scale(amax, 448)`, the scale for E4M3, and its inverse, both computed on bits."""
    bits = amax.to(tl.int32, bitcast=True)
    exponent = tl.minimum(254 + 8 - ((bits + 0x1FFFFF) >> 23), 227)
    # The scale of zeros is 1, as is its inverse; that of infinities is 0, and its inverse is infinite.
    exponent = tl.where(bits == 0, 127, tl.where(bits >= 0x7F800000, -1, exponent))
    scale = (tl.maximum(exponent, 0) << 23).to(tl.float32, bitcast=True)
    return scale, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def four_bytes(a, b, c, d):
    """Round four float32 arrays to E4M3 with saturation, and return their bytes as one int32 array, a in the lowest."""
    assembly: tl.constexpr = """
        {
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }
    """
    return tl.inline_asm_elementwise(assembly, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
