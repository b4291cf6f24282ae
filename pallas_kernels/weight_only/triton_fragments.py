"""Triton kernels of the packed matmul whose threads load their operands of the tensor cores from memory themselves.

`tl.dot` brings its operands into the order of the tensor cores by way of shared memory, which takes longer than reading
few-bit weights. Which inputs of a product the hardware calls the first, the second and so on is free, however, as long
as both operands agree. Here 16 consecutive bytes of a row of the weight, which a thread loads with one instruction, are
the operands of this thread in several instructions of the tensor cores, and XLA brings the few activations into the
order that follows from that. A tensor is one register of each thread: element 32 w + l belongs to lane l of warp w.

The instruction for 2:4 sparse weights (`mma.sp`) reads two values of each four inputs and their places, so that zeros
are neither stored nor multiplied. Its operands, and those of the dense one, are in NVIDIA's "PTX ISA 8.7", sections
9.7.14.5 and 9.7.14.6.
"""

# Constants of a Triton kernel are annotated as constexpr, whose attributes type checkers do not know.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
import triton
import triton.language as tl


def _block(*lines: str) -> str:
    return "{\n" + "\n".join(lines) + "\n}"


def _registers(first: int, count: int) -> str:
    return ", ".join(f"${first + n}" for n in range(count))


def _sparse_products(half: int, *, float16: bool) -> str:
    """Return the instructions that multiply half of a step's 256 inputs: sums $0 to $3, from those in $4 to $7.

    $8 to $11 and $12 to $15 are loads 2 half and 2 half + 1 of a row, $16 to $23 those of the row 8 further down, $24
    to $27 the places of their values, $28 to $43 the activations.
    """
    dtype = "f16" if float16 else "bf16"
    lines = [f"mov.f32 ${n}, ${4 + n};" for n in range(4)]
    for word in range(4):
        weights = f"${8 + word}, ${16 + word}, ${12 + word}, ${20 + word}"
        lines.append(
            f"mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{dtype}.{dtype}.f32 "
            f"{{$0, $1, $2, $3}}, {{{weights}}}, {{{_registers(28 + 4 * word, 4)}}}, {{$0, $1, $2, $3}}, "
            f"${24 + word}, 0x{half};"
        )
    return _block(*lines)


def _dense_products(*, from_zero: bool) -> str:
    """Return the instructions that multiply 128 inputs: sums $0 to $3, from those in $4 to $7 or from zero.

    $8 to $23 are the weights of a row, $24 to $39 those of the row 8 further down, $40 to $55 the activations.
    """
    lines = [f"mov.f32 ${n}, {'0f00000000' if from_zero else f'${4 + n}'};" for n in range(4)]
    for n in range(8):
        weights = f"${8 + 2 * n}, ${24 + 2 * n}, ${9 + 2 * n}, ${25 + 2 * n}"
        lines.append(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            f"{{$0, $1, $2, $3}}, {{{weights}}}, {{{_registers(40 + 2 * n, 2)}}}, {{$0, $1, $2, $3}};"
        )
    return _block(*lines)


def _places() -> str:
    """Return the instructions that make the metadata $0 to $3 of `mma.sp` from masks of the inputs with a value.

    $4 and $5 are the masks of 16 groups of four inputs of a row, $6 and $7 those of the row 8 further down. A group's
    metadata are the numbers of its two inputs with a value, of 2 bits each. With a value at the inputs i < j, their
    bits follow from the bits b0 to b3 of the mask: i = 2 (not b0 and not b1) + (not b0 and b1), and
    j = 2 (b2 or b3) + (b3 or not b2). The groups n, n + 4, n + 8 and n + 12 belong to instruction n: a transposition.
    """
    lines = [".reg .b32 l, r, u, o, t, m<4>, p<4>;"]
    for n in range(4):
        mask = f"${4 + n}"
        lines += [
            f"shl.b32 l, {mask}, 1;",
            f"shr.u32 r, {mask}, 1;",
            f"or.b32 u, {mask}, l;",
            "lop3.b32 u, u, 0x22222222, 0xAAAAAAAA, 0x28;",  # (u ^ 0x2...) & 0xA...
            f"lop3.b32 o, r, {mask}, 0x44444444, 0xA2;",  # (r | ~mask) & 0x4...
            f"lop3.b32 t, r, {mask}, 0x11111111, 0x20;",  # r & ~mask & 0x1...
            f"lop3.b32 m{n}, u, o, t, 0xFE;",
            # Transposes each two by two of the eight groups in two rows of four.
            f"shr.u32 l, m{n}, 12;",
            f"lop3.b32 t, m{n}, l, 0x0000F0F0, 0x28;",
            "shl.b32 l, t, 12;",
            f"lop3.b32 m{n}, m{n}, t, l, 0x96;",
        ]
    for row in range(2):
        low, high = f"m{2 * row}", f"m{2 * row + 1}"
        lines += [f"prmt.b32 p{2 * row}, {low}, {high}, 0x6240;", f"prmt.b32 p{2 * row + 1}, {low}, {high}, 0x7351;"]
    for n in range(4):
        lines.append(f"prmt.b32 ${n}, p{n // 2}, p{2 + n // 2}, {('0x5410', '0x7632')[n % 2]};")
    return _block(*lines)


def _widened_halves() -> str:
    """Return the instructions that convert the eight integers of 4 bits in $4 to bfloat16: s and s + 4 in $s."""
    lines = [".reg .b32 t, c;", "mov.b32 c, 0x43084308;"]
    for n in range(4):
        lines += [
            f"shr.u32 t, $4, {4 * n};",
            "lop3.b32 t, t, 0x000F000F, c, 0x6A;",  # (bits xor 8) + 128, which is the value plus 136
            f"sub.rn.bf16x2 ${n}, t, c;",
        ]
    return _block(*lines)


_LOAD_WEIGHTS = tl.constexpr("ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {$0, $1, $2, $3}, [$4];")
_LOAD_ACTIVATIONS = tl.constexpr("ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];")
_LOAD_SOME = tl.constexpr(
    _block(
        ".reg .pred p;",
        "setp.ne.s32 p, $5, 0;",
        *(f"mov.b32 ${n}, 0;" for n in range(4)),
        "@p ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];",
    )
)
_LOAD_MASKS = tl.constexpr("ld.global.nc.v2.b32 {$0, $1}, [$2];")
_FIRST_HALF = tl.constexpr({float16: _sparse_products(0, float16=float16) for float16 in (False, True)})
_SECOND_HALF = tl.constexpr({float16: _sparse_products(1, float16=float16) for float16 in (False, True)})
_DENSE = tl.constexpr({from_zero: _dense_products(from_zero=from_zero) for from_zero in (False, True)})
_SPARSE_OPERANDS = tl.constexpr(",".join(["=&f"] * 4 + ["f"] * 4 + ["r"] * 36))
_DENSE_OPERANDS = tl.constexpr(",".join(["=&f"] * 4 + ["f"] * 4 + ["r"] * 48))
_PLACES = tl.constexpr(_places())
_HALVES = tl.constexpr(_widened_halves())


@triton.jit
def _load(assembly: tl.constexpr, place):
    words: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
    return tl.inline_asm_elementwise(
        assembly, "=r,=r,=r,=r,l", [place.to(tl.int64)], dtype=words, is_pure=False, pack=1
    )


@triton.jit
def _load_activations(x, number, lane, plan: tl.constexpr):
    """Return 16 words of the activations from the load `number` on, of which each lane has four; zeros for no row."""
    lanes: tl.constexpr = 4 * plan.lane_rows
    words: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
    found = ()
    for n in tl.static_range(4):
        place = x + ((number + n) * lanes + lane) * 4
        if lanes == 32:
            found = found + _load(_LOAD_ACTIVATIONS, place)
        else:
            found = found + tl.inline_asm_elementwise(
                _LOAD_SOME,
                "=&r,=&r,=&r,=&r,l,r",
                [place.to(tl.int64), (lane < lanes).to(tl.int32)],
                dtype=words,
                is_pure=False,
                pack=1,
            )
    return found


@triton.jit
def _load_masks(place):
    words: tl.constexpr = (tl.int32, tl.int32)
    return tl.inline_asm_elementwise(_LOAD_MASKS, "=r,=r,l", [place.to(tl.int64)], dtype=words, is_pure=False, pack=1)


@triton.jit
def _four_words(assembly: tl.constexpr, operands: tl.constexpr, arguments):
    """Return the four results of instructions, of 32 bits."""
    words: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
    return tl.inline_asm_elementwise(assembly, operands, arguments, dtype=words, is_pure=True, pack=1)


@triton.jit
def _four_sums(assembly: tl.constexpr, operands: tl.constexpr, arguments):
    """Return the four results of instructions, in float32."""
    sums: tl.constexpr = (tl.float32, tl.float32, tl.float32, tl.float32)
    return tl.inline_asm_elementwise(assembly, operands, arguments, dtype=sums, is_pure=True, pack=1)


@triton.jit
def _widen(place):
    """Return 16 registers of two weights each, in bfloat16: a thread's part of 128 inputs of a row."""
    words = _load(_LOAD_WEIGHTS, place)
    found = ()
    for n in tl.static_range(4):
        found = found + _four_words(_HALVES, "=&r,=&r,=&r,=&r,r", (words[n],))
    return found


@triton.jit
def _load_scales(scales, row, group, plan: tl.constexpr):
    """Return the scales of 128 inputs for the outputs `row` and those 8 further down, in float32."""
    place = scales + row * plan.groups + group * 128 // plan.group_size
    return tl.load(place).to(tl.float32), tl.load(place + 8 * plan.groups).to(tl.float32)


@triton.jit
def _store(sums, out, first_output, plan: tl.constexpr):
    """Add the sums of all warps, and store those of the first `plan.rows` rows."""
    blocks: tl.constexpr = plan.blocks
    warps: tl.constexpr = plan.warps
    all_columns: tl.constexpr = plan.columns
    lane = tl.arange(0, 32)
    part = out + tl.program_id(1) * (plan.rows * plan.outputs)
    for block in tl.static_range(blocks):
        for columns in tl.static_range(all_columns):
            for n in tl.static_range(4):
                total = tl.sum(tl.reshape(sums[block * all_columns + columns][n], [warps, 32]), 0)
                row = 8 * columns + lane % 4 * 2 + n % 2
                output = first_output + 16 * block + lane // 4 + n // 2 * 8
                tl.store(part + row * plan.outputs + output, total.to(out.dtype.element_ty), row < plan.rows)


@triton.jit
def sparse_fragment_kernel(x, values, kept, out, plan: tl.constexpr):
    """Multiply x with blocks of 16 rows of a 2:4 sparse matrix, over one range of the inputs.

    The program ids are the blocks and the range. `x` is what `fragments.arrange` returns, as int32 [in / 256, columns,
    8, lanes, 4], `values` the bytes [out, in] of the values, `kept` the masks [out, in / 8]. `out` is [rows, out] if
    there is one range, otherwise float32 [ranges, rows, out].
    """
    blocks: tl.constexpr = plan.blocks
    warps: tl.constexpr = plan.warps
    all_columns: tl.constexpr = plan.columns
    thread = tl.arange(0, 32 * warps)
    lane = thread % 32
    first_output = tl.program_id(0) * (16 * blocks)
    zero = tl.zeros([32 * warps], tl.float32)
    sums = ((zero, zero, zero, zero),) * (blocks * all_columns)
    begin = tl.program_id(1) * plan.steps
    for step in range(begin, begin + plan.steps):
        inputs = step * warps + thread // 32
        next_sums = ()
        for block in tl.static_range(blocks):
            row = (first_output + 16 * block + lane // 4).to(tl.int64)
            place = values + row * plan.inputs + inputs * 256 + lane % 4 * 16
            below = place + 8 * plan.inputs
            a0, a1 = _load(_LOAD_WEIGHTS, place), _load(_LOAD_WEIGHTS, place + 64)
            a2, a3 = _load(_LOAD_WEIGHTS, place + 128), _load(_LOAD_WEIGHTS, place + 192)
            b0, b1 = _load(_LOAD_WEIGHTS, below), _load(_LOAD_WEIGHTS, below + 64)
            b2, b3 = _load(_LOAD_WEIGHTS, below + 128), _load(_LOAD_WEIGHTS, below + 192)
            mask = kept + row * (plan.inputs // 8) + inputs * 32 + lane % 4 * 8
            upper = _load_masks(mask)
            lower = _load_masks(mask + plan.inputs)
            places = _four_words(_PLACES, "=&r,=&r,=&r,=&r,r,r,r,r", upper + lower)
            for columns in tl.static_range(all_columns):
                number = (inputs * all_columns + columns) * 8
                total = sums[block * all_columns + columns]
                weights = a0 + a1 + b0 + b1 + places
                total = _multiply_sparse(total, weights + _load_activations(x, number, lane, plan), 0, plan)
                weights = a2 + a3 + b2 + b3 + places
                next_sums = next_sums + (
                    _multiply_sparse(total, weights + _load_activations(x, number + 4, lane, plan), 1, plan),
                )
        sums = next_sums
    _store(sums, out, first_output, plan)


@triton.jit
def _multiply_sparse(total, operands, half: tl.constexpr, plan: tl.constexpr):
    """Return `total` and the products of half of a step's inputs."""
    if half == 0:
        first: tl.constexpr = _FIRST_HALF[plan.float16]
        return _four_sums(first, _SPARSE_OPERANDS, total + operands)
    else:
        second: tl.constexpr = _SECOND_HALF[plan.float16]
        return _four_sums(second, _SPARSE_OPERANDS, total + operands)


@triton.jit
def dense_fragment_kernel(x, q, scales, out, plan: tl.constexpr):
    """Multiply x with blocks of 16 rows of a matrix of integers of 4 bits with scales, over one range of the inputs.

    The program ids are the blocks and the range. `x` is what `fragments.arrange` returns, as int32 [in / 128, columns,
    4, lanes, 4], `q` the bytes of the matrix, [out, in / 2], `scales` [out, groups], `out` as in
    `sparse_fragment_kernel`.
    """
    blocks: tl.constexpr = plan.blocks
    warps: tl.constexpr = plan.warps
    all_columns: tl.constexpr = plan.columns
    assembly: tl.constexpr = _DENSE[plan.groups > 1]
    thread = tl.arange(0, 32 * warps)
    lane = thread % 32
    first_output = tl.program_id(0) * (16 * blocks)
    zero = tl.zeros([32 * warps], tl.float32)
    sums = ((zero, zero, zero, zero),) * (blocks * all_columns)
    begin = tl.program_id(1) * plan.steps
    for step in range(begin, begin + plan.steps):
        inputs = step * warps + thread // 32
        next_sums = ()
        for block in tl.static_range(blocks):
            row = (first_output + 16 * block + lane // 4).to(tl.int64)
            place = q + row * (plan.inputs // 2) + inputs * 64 + lane % 4 * 16
            weights = _widen(place) + _widen(place + 4 * plan.inputs)
            scale, scale_below = 1.0, 1.0
            if plan.groups > 1:
                scale, scale_below = _load_scales(scales, row, inputs, plan)
            for columns in tl.static_range(all_columns):
                parts = _load_activations(x, (inputs * all_columns + columns) * 4, lane, plan)
                total = sums[block * all_columns + columns]
                found = _four_sums(assembly, _DENSE_OPERANDS, total + weights + parts)
                if plan.groups > 1:
                    found = _add_scaled(total, found, scale, scale_below)
                next_sums = next_sums + (found,)
        sums = next_sums
    if plan.groups == 1:
        scaled = ()
        for block in tl.static_range(blocks):
            scale, scale_below = _load_scales(scales, first_output + 16 * block + lane // 4, 0, plan)
            for columns in tl.static_range(all_columns):
                none = (0.0, 0.0, 0.0, 0.0)
                scaled = scaled + (_add_scaled(none, sums[block * all_columns + columns], scale, scale_below),)
        sums = scaled
    _store(sums, out, first_output, plan)


@triton.jit
def _add_scaled(total, found, scale, scale_below):
    """Return the sums of two outputs, 8 apart, and two rows of x, with what was found times the outputs' scales."""
    return (
        total[0] + found[0] * scale,
        total[1] + found[1] * scale,
        total[2] + found[2] * scale_below,
        total[3] + found[3] * scale_below,
    )
