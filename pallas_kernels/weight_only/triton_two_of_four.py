"""Values of 2:4 sparse weights at the places of their inputs, inside the Triton kernels of the packed matmul.

A stored element is a word of 64 bits, the four values of eight inputs, and a byte that tells which of the eight have a
value. It is never put back into the order of the row: the weights of each of the eight places are a matrix of their
own, which is multiplied by the activations at that place. Of four inputs, the first has the first value or none, the
last the second value or none; the second has the second value if the first has one, and the third the first value if
the last has one. Zeros come from masks: the instruction `prmt` fills bytes with copies of a bit.
"""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

PLACES = tl.constexpr(8)
"""Inputs of a stored element."""


def _assembly(place: int) -> str:
    """Return the instructions that give the weights of a place, of four stored elements, as two registers of two.

    $2 to $5 are the words of values, $6 the bytes. What the assemblies of several places share is computed once.
    """
    four, within = divmod(place, 4)
    other = {1: 0, 2: 3}.get(within)
    """Which of the four inputs decides, for one in the middle, which of the two values it has."""
    lines = [".reg .b32 m, o, f, s, v<4>;", ".reg .b64 q;"]
    for element in range(4):
        lines += [f"shr.u64 q, ${2 + element}, {32 * four};", f"cvt.u32.u64 v{element}, q;"]
    for half, (one, two) in enumerate((("v0", "v1"), ("v2", "v3"))):
        copies = ("0x9988", "0xBBAA")[half]
        lines += [
            f"prmt.b32 f, {one}, {two}, 0x5410;",
            f"prmt.b32 s, {one}, {two}, 0x7632;",
            f"shl.b32 m, $6, {7 - place};",
            f"prmt.b32 m, m, 0, {copies};",
        ]
        if other is not None:
            chosen = "s, f" if other == 0 else "f, s"
            lines += [
                f"shl.b32 o, $6, {7 - 4 * four - other};",
                f"prmt.b32 o, o, 0, {copies};",
                f"lop3.b32 f, o, {chosen}, 0xCA;",
            ]
        lines.append(f"and.b32 ${half}, {'s' if within == 3 else 'f'}, m;")
    return "{\n" + "\n".join(lines) + "\n}"


_ASSEMBLY = tl.constexpr(tuple(map(_assembly, range(PLACES.value))))
_OPERANDS = tl.constexpr("=r,=r,l,l,l,l,r")


@triton.jit
def _weights_of(words, kept, place: tl.constexpr, plan: tl.constexpr, like):
    """Return the weights of one of the eight places of stored elements, in the dtype of `like`, that of the values."""
    dtype: tl.constexpr = like.dtype.element_ty
    if plan.assembly:
        assembly: tl.constexpr = _ASSEMBLY[place]
        bits = tl.inline_asm_elementwise(assembly, _OPERANDS, [words, kept], dtype=tl.int16, is_pure=True, pack=4)
        return bits.to(dtype, bitcast=True)
    else:
        within: tl.constexpr = place % 4
        values = (words >> (place // 4 * 32)).to(tl.int32)
        pair = (kept.to(tl.int32) >> (place // 2 * 2)) & 3
        if within == 0:
            bits = values
        elif within == 1:
            bits = tl.where(pair == 3, values >> 16, values)
        elif within == 2:
            bits = tl.where(pair == 3, values, values >> 16)
        else:
            bits = values >> 16
        has_value = (pair >> (within % 2)) & 1
        return tl.where(has_value == 1, bits, 0).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def add_product(total, words, kept, x, beside, valid, plan: tl.constexpr):
    """Add the products of stored elements with the activations x [places, rows, in / places] to a sum.

    Args:
      total: the sum, [..., block_out, padded_rows].
      words: int64 [..., block_out, width].
      kept: int8, as words.
      x: pointer to the activations.
      beside: places of the activations of the first of the eight, [..., width, padded_rows].
      valid: which rows there are.
      plan: constants of the call.
    """
    for place in tl.static_range(PLACES):
        part = tl.load(x + place * (plan.rows * plan.inputs // PLACES) + beside, valid, 0.0)
        total = tl.dot(_weights_of(words, kept, place, plan, x), part, total)
    return total
