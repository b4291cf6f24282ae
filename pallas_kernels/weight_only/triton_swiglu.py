"""Triton kernel that gates the hidden values of a token and rounds them to FP8."""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl


@triton.jit
def _scaled(sums, scales, factor, column, valid):
    """Return sums of products times their scales, rounded to the dtype that they are stored in, as float32."""
    values = tl.load(sums + column, valid, 0.0).to(tl.float32) * factor
    values *= tl.load(scales + column, valid, 0.0).to(tl.float32)
    return values.to(sums.dtype.element_ty).to(tl.float32)


@triton.jit
def round_swiglu_kernel(sums, token_scales, scales, rounded, rounded_scales, plan: tl.constexpr):
    """Compute swiglu(gate, up) of one token and round it to FP8 with one scale, largest magnitude / 448.

    The program id is the token. `sums` is [rows, 2 * width], the gate's first, `token_scales` float32 [rows], `scales`
    [2 * width]; `rounded` is FP8 [rows, width], `rounded_scales` float32 [rows].
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, plan.padded)
    valid = column < plan.width
    factor = tl.load(token_scales + row)
    sums += row * 2 * plan.width
    gate = _scaled(sums, scales, factor, column, valid)
    up = _scaled(sums + plan.width, scales + plan.width, factor, column, valid)
    product = (gate / (1.0 + tl.exp(-gate)) * up).to(sums.dtype.element_ty).to(tl.float32)
    scale = tl.max(tl.abs(product)) * (1.0 / plan.largest)
    scale = tl.where(scale > 0, scale, 1.0)
    tl.store(rounded_scales + row, scale)
    numbers = (product / scale).to(rounded.dtype.element_ty)  # 1 / scale can be infinite
    tl.store(rounded + row * plan.width + column, numbers, valid)
