"""Lookup of stored indices in a small table, inside the Triton kernels of the packed matmul.

Tables of at most 16 values stay in registers. The instruction `prmt` picks four bytes out of the eight of two registers
by four selectors of four bits each, which are the indices as they are stored: one of them looks up the low bytes of
four values, another the high bytes. Larger tables are read from the cache for each index.
"""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

# Each assembly converts four bytes to one result, two values in each of the registers $0 and $1. For two results at
# once the compiler would move values, not bytes, through shared memory; what two assemblies share, it computes once.
# $2 holds the bytes. A word of the table is in each fourth operand from $3, as the compiler passes it once for each
# byte: first the words of the low bytes of the values, then those of their high bytes. HALVES selects, from the low
# and the high bytes of four values, those of the low (0x6240) or of the high (0x7351) halves of the stored bytes.
_OF_8 = """
{
.reg .b32 s, a, b, c, d;
shr.u32 s, $2, 16;
prmt.b32 a, $3, $7, $2;
prmt.b32 b, $11, $15, $2;
prmt.b32 c, $3, $7, s;
prmt.b32 d, $11, $15, s;
prmt.b32 $0, a, b, HALVES;
prmt.b32 $1, c, d, HALVES;
}
"""
_OF_16 = """
{
.reg .b32 s, h, a, b, c, d, e, f;
and.b32 s, $2, 0x77777777;
shr.u32 h, $2, 1;
lop3.b32 h, h, 0x44444444, 0x32103210, 0xEA;
prmt.b32 a, $3, $7, s;
prmt.b32 b, $11, $15, s;
prmt.b32 c, $19, $23, s;
prmt.b32 d, $27, $31, s;
prmt.b32 a, a, b, h;
prmt.b32 b, c, d, h;
shr.u32 s, s, 16;
shr.u32 h, h, 16;
prmt.b32 c, $3, $7, s;
prmt.b32 d, $11, $15, s;
prmt.b32 e, $19, $23, s;
prmt.b32 f, $27, $31, s;
prmt.b32 c, c, d, h;
prmt.b32 d, e, f, h;
prmt.b32 $0, a, b, HALVES;
prmt.b32 $1, c, d, HALVES;
}
"""
"""Looks up in both halves of the table by the lower three bits; the fourth chooses between the two, in selector h."""
_READ = "\n".join(
    f"bfe.u32 i, $2, {8 * place}, 8;\nmad.wide.u32 p, i, 2, $3;\nld.global.nc.b16 v{place}, [p];" for place in range(4)
)
"""Reads each value from a table of 16-bit values, to which $3 points."""
_LOW_OF_8, _HIGH_OF_8 = (tl.constexpr(_OF_8.replace("HALVES", order)) for order in ("0x6240", "0x7351"))
_LOW_OF_16, _HIGH_OF_16 = (tl.constexpr(_OF_16.replace("HALVES", order)) for order in ("0x6240", "0x7351"))
_OF_256 = tl.constexpr(
    f"{{\n.reg .b32 i;\n.reg .b64 p;\n.reg .b16 v<4>;\n{_READ}\nmov.b32 $0, {{v0, v1}};\nmov.b32 $1, {{v2, v3}};\n}}"
)
_OPERANDS_OF_8 = tl.constexpr("=r,=r,r" + ",r" * 16)
_OPERANDS_OF_16 = tl.constexpr("=r,=r,r" + ",r" * 32)
_OPERANDS_OF_256 = tl.constexpr("=r,=r,r,l,l,l,l")


@triton.jit
def _load_word(table, first: tl.constexpr, plan: tl.constexpr, like):
    """Return the low bytes of the table's entries `first` to `first` + 3 in one register, and their high bytes."""
    low = 0
    high = 0
    for place in tl.static_range(4):
        # A table of fewer than 8 entries is repeated.
        value = tl.load(table + (first + place) % plan.entries).to(like.dtype.element_ty)
        bits = value.to(tl.int16, bitcast=True).to(tl.int32)
        low = low | ((bits & 0xFF) << 8 * place)
        high = high | (((bits >> 8) & 0xFF) << 8 * place)
    return low, high


@triton.jit
def load_table(codebook, block, plan: tl.constexpr, like):
    """Load the table of weight values (codebook) of a block of outputs, from which `look_up` reads.

    For 4-bit storage these are its bytes, packed four to an int32 register; for 8-bit storage a pointer to it.
    """
    # Tensors of one element, which are broadcast. With scalars the compiler would change the layout of the weights for
    # the tensor cores after the lookup, when they take twice or four times as many bytes.
    start = tl.zeros([1, 1] if plan.slices == 1 else [1, 1, 1], tl.int32)
    table = codebook + (start + block * plan.block_out // (plan.outputs // plan.tables) * plan.entries)
    if plan.halves == 1:
        return (table.to(tl.int64),)
    else:
        low_0, high_0 = _load_word(table, 0, plan, like)
        low_1, high_1 = _load_word(table, 4, plan, like)
        if plan.entries <= 8:
            return low_0, low_1, high_0, high_1
        else:
            low_2, high_2 = _load_word(table, 8, plan, like)
            low_3, high_3 = _load_word(table, 12, plan, like)
            return low_0, low_1, low_2, low_3, high_0, high_1, high_2, high_3


@triton.jit
def look_up(stored, half: tl.constexpr, table, plan: tl.constexpr, like):
    """Look up stored bytes (half=0), or their low (half=1) or high (half=2) 4 bits, in the table.

    The result has the dtype of `like`, bfloat16 or float16; values are moved as pairs of bytes.
    """
    if half == 0:
        bits = tl.inline_asm_elementwise(
            _OF_256, _OPERANDS_OF_256, [stored, table[0]], dtype=tl.int16, is_pure=True, pack=4
        )
    elif plan.entries <= 8:
        assembly: tl.constexpr = _LOW_OF_8 if half == 1 else _HIGH_OF_8
        words = [stored, table[0], table[1], table[2], table[3]]
        bits = tl.inline_asm_elementwise(assembly, _OPERANDS_OF_8, words, dtype=tl.int16, is_pure=True, pack=4)
    else:
        assembly: tl.constexpr = _LOW_OF_16 if half == 1 else _HIGH_OF_16
        words = [stored, table[0], table[1], table[2], table[3], table[4], table[5], table[6], table[7]]
        bits = tl.inline_asm_elementwise(assembly, _OPERANDS_OF_16, words, dtype=tl.int16, is_pure=True, pack=4)
    return bits.to(like.dtype.element_ty, bitcast=True)
