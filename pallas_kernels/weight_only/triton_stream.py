"""Triton kernel of the packed matmul that keeps the activations in registers and streams weights of 4 bits past them.

Each warp of a program has its own part of the inputs, whose activations it loads once, and multiplies blocks of outputs
by them, one after the other. The weights of the next blocks are copied to shared memory meanwhile. The tensor core's
instruction is written out in inline assembly: so each thread reads from shared memory what it has copied there itself,
and the order of the inputs of a product, which does not matter if weights and activations have the same, is the one in
which the stored bytes are converted with the fewest instructions.
"""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false
import triton
import triton.language as tl

CHUNK = 128
"""Inputs of a row that four threads load with one instruction each."""


def _product_assembly(columns: int) -> str:
    """Return assembly that multiplies 16 outputs x 128 inputs of 4 bits by 8 * columns rows of activations.

    Operands, four registers each: sums (results) of each 8 columns; weights of the first and the second 8 outputs;
    then the activations of each 8 columns for each of the four registers of weights. Bits become a bfloat16 of 128 to
    143 whose lowest ones they are, from which 136 is taken.
    """
    weights, activations = 4 * columns, 4 * columns + 8
    registers = ", ".join(f"{half}{n}" for half in "ab" for n in range(4))
    lines = ["{", f".reg .b32 {registers}, c, s;", ".reg .f32 z;", "mov.b32 c, 0x43084308;", "mov.f32 z, 0f00000000;"]
    for word in range(4):
        for half, first in (("a", weights), ("b", weights + 4)):
            for n in range(4):
                source = f"${first + word}"
                if n:
                    lines.append(f"shr.u32 s, {source}, {4 * n};")
                    source = "s"
                lines.append(f"lop3.b32 {half}{n}, {source}, 0x000F000F, c, 0x6A;")
                lines.append(f"sub.rn.bf16x2 {half}{n}, {half}{n}, c;")
        for pair in (0, 2):
            for column in range(columns):
                total = ", ".join(f"${4 * column + n}" for n in range(4))
                before = total if word or pair else "z, z, z, z"
                x = activations + 16 * column + 4 * word + pair
                lines.append(
                    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                    f"{{{total}}}, {{a{pair}, b{pair}, a{pair + 1}, b{pair + 1}}}, {{${x}, ${x + 1}}}, {{{before}}};"
                )
    return "\n".join([*lines, "}"])


def reduction_assembly(warps: int, tensors: int) -> str:
    """Return assembly that adds the sums of all warps of a program.

    Operands, four registers each: the results, then each of `tensors` partial sums. Element e of the results, in
    register e / threads of thread e mod threads, is the sum of register e mod 4 of lane e / 4 mod 32 of tensor e / 128
    over the warps.
    """
    size, threads = 128 * tensors, 32 * warps
    lines = [
        "{",
        f".shared .align 16 .b8 part[{4 * size * warps}];",
        ".reg .b32 t, l, w, a, r;",
        ".reg .f32 v<4>;",
        ".reg .pred p;",
        "mov.u32 t, %tid.x;",
        "and.b32 l, t, 31;",
        "shr.u32 w, t, 5;",
        "mov.u32 a, part;",
        f"mad.lo.u32 r, w, {4 * size}, a;",
        "mad.lo.u32 r, l, 16, r;",
    ]
    for tensor in range(tensors):
        values = ", ".join(f"${4 + 4 * tensor + n}" for n in range(4))
        lines.append(f"st.shared.v4.f32 [r+{512 * tensor}], {{{values}}};")
    lines += ["bar.sync 0;", "mad.lo.u32 r, t, 4, a;", f"setp.lt.u32 p, t, {min(size, threads)};"]
    lines += [f"mov.f32 ${n}, 0f00000000;" for n in range(4)]
    for n in range(max(1, size // threads)):
        for first in range(0, warps, 4):
            count = min(4, warps - first)
            for k in range(count):
                lines.append(f"@p ld.shared.f32 v{k}, [r+{4 * (size * (first + k) + threads * n)}];")
            for k in range(count):
                lines.append(f"@p add.f32 ${n}, ${n}, v{k};")
    return "\n".join([*lines, "}"])


def constraints(results: int, kind: str, *inputs: tuple[int, str]) -> str:
    return ",".join([f"=&{kind}"] * results + [name for count, name in inputs for _ in range(count)])


_PRODUCT_8 = tl.constexpr(_product_assembly(1))
_PRODUCT_16 = tl.constexpr(_product_assembly(2))
_OPERANDS_8 = tl.constexpr(constraints(4, "f", (24, "r")))
_OPERANDS_16 = tl.constexpr(constraints(8, "f", (40, "r")))


@triton.jit
def _thread(plan: tl.constexpr):
    """Return the warp, the place of 8, and the place of 4 of each thread, [threads, 1], and the places 0 to 3."""
    thread = tl.arange(0, 32 * plan.warps)[:, None]
    return thread // 32, thread // 4 % 8, thread % 4, tl.arange(0, 4)[None, :]


@triton.jit
def _load_activations(x, plan: tl.constexpr):
    """Return the warp's activations for each chunk, each 8 rows and each register of weights."""
    warp, eighth, quarter, place = _thread(plan)
    chunk = (tl.program_id(1) * plan.warps + warp) * plan.chunks
    here = x + eighth * (plan.inputs // 2) + chunk * 64 + quarter * 16 + place
    found = ()
    for step in tl.static_range(tl.constexpr(plan.chunks)):
        for column in tl.static_range(tl.constexpr(plan.columns)):
            for word in tl.static_range(4):
                there = here + 8 * column * (plan.inputs // 2) + 64 * step + 4 * word
                found = found + (tl.load(there, 8 * column + eighth < plan.rows, 0),)
    return found


@triton.jit
def _scale(words, step: tl.constexpr, plan: tl.constexpr):
    """Return the scale of a chunk, a bfloat16, out of words that hold two each."""
    if plan.chunks == 1:
        odd = (tl.program_id(1) * plan.warps + _thread(plan)[0]) % 2
        return ((words >> 16 * odd) << 16).to(tl.float32, bitcast=True)
    elif step % 2 == 0:
        return (words << 16).to(tl.float32, bitcast=True)
    else:
        return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _multiply(upper, lower, held, first: tl.constexpr, plan: tl.constexpr):
    """Return the products of 16 outputs with a chunk of the inputs of each 8 rows, 4 values a thread."""
    if plan.columns == 1:
        words = [upper, lower, held[first], held[first + 1], held[first + 2], held[first + 3]]
        return (tl.inline_asm_elementwise(_PRODUCT_8, _OPERANDS_8, words, dtype=tl.float32, is_pure=True, pack=4),)
    else:
        words = [
            upper, lower, held[first], held[first + 1], held[first + 2], held[first + 3],
            held[first + 4], held[first + 5], held[first + 6], held[first + 7],
        ]  # fmt: skip
        return tl.inline_asm_elementwise(
            _PRODUCT_16, _OPERANDS_16, words, dtype=(tl.float32, tl.float32), is_pure=True, pack=4
        )


@triton.jit
def _block(q, scales, held, output, plan: tl.constexpr):
    """Return the sums of a warp's part of the inputs for 16 outputs, for each 8 rows."""
    warp, eighth, quarter, place = _thread(plan)
    chunk = (tl.program_id(1) * plan.warps + warp) * plan.chunks
    here = q + (output + eighth) * (plan.inputs // 8) + chunk * 16 + quarter * 4 + place
    scale = scales + (output + eighth) * (plan.groups // 2) + chunk // 2
    total = ()
    for _ in tl.static_range(tl.constexpr(plan.columns)):
        total = total + (tl.zeros([32 * plan.warps, 4], tl.float32),)
    for step in tl.static_range(tl.constexpr(plan.chunks)):
        upper, lower = tl.load(here + 16 * step), tl.load(here + 8 * (plan.inputs // 8) + 16 * step)
        if step % 2 == 0:
            upper_scales, lower_scales = tl.load(scale + step // 2), tl.load(scale + 4 * plan.groups + step // 2)
        both = tl.where(place < 2, _scale(upper_scales, step, plan), _scale(lower_scales, step, plan))
        products = _multiply(upper, lower, held, 4 * plan.columns * step, plan)
        if plan.columns == 1:
            total = (total[0] + products[0] * both,)
        else:
            total = (total[0] + products[0] * both, total[1] + products[1] * both)
    return total


@triton.jit
def stream_kernel(x, q, scales, out, plan: tl.constexpr):
    """Multiply x with blocks of rows of the packed matrix, one after the other, over one range of inputs.

    The program ids are the first block and the range. `x` is [rows, in], of each eight inputs ordered as 0, 4, 1, 5, 2,
    6, 3, 7. `q` holds the bytes of the matrix, [out, in / 2], `scales` are [out, groups]. `out` is [rows, out] if there
    is one range, otherwise float32 [ranges, rows, out].
    """
    x, q = x.to(tl.pointer_type(tl.int32)), q.to(tl.pointer_type(tl.int32))
    scales = scales.to(tl.pointer_type(tl.int32))
    held = _load_activations(x, plan)
    element = tl.arange(0, 32 * plan.warps)[:, None] + 32 * plan.warps * tl.arange(0, 4)[None, :]
    tensor, lane, place = element // 128, element // 4 % 32, element % 4
    block: tl.constexpr = 128 * plan.columns
    output = element // block * 16 + lane // 4 + place // 2 * 8
    row = lane % 4 * 2 + place % 2 + tensor % plan.columns * 8
    valid = (element < block * plan.blocks) & (row < plan.rows)
    target = out + (tl.program_id(1) * plan.rows + row) * plan.outputs + output
    for tile in tl.range(tl.program_id(0), plan.tiles, plan.programs, num_stages=plan.stages):
        sums = ()
        for part in tl.static_range(tl.constexpr(plan.blocks)):
            sums = sums + _block(q, scales, held, tile * plan.block_out + 16 * part, plan)
        result = tl.inline_asm_elementwise(
            plan.reduction, plan.reduction_operands,
            sums, dtype=tl.float32, is_pure=False, pack=4,
        )  # fmt: skip
        tl.store(target + tile * plan.block_out, result.to(out.dtype.element_ty), valid)
