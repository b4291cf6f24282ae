"""Triton's interpreter, which runs kernels on a CPU.

Triton decides at its import whether kernels are interpreted, so a test module whose kernels are has a main part, and
`run_interpreted` runs that in a process of its own.
"""

import ctypes
import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

needs_triton = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("triton", "jax_triton")),
    reason="needs Triton: pip install 'jaxstack[cuda]'",
)
_ROOT = Path(__file__).resolve().parents[2]


def run_interpreted(module: str, *words: str) -> subprocess.CompletedProcess:
    """`python -m MODULE WORDS...` with kernels interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True, timeout=500, check=False)


class Array:
    """A numpy array with what Triton's interpreter asks of a torch tensor on the CPU."""

    def __init__(self, array, name):
        self.array = array
        self.dtype = name

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return Array(self.array, self.dtype)

    def set_(self, *_):
        pass

    copy_ = set_

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    stride = size


def let_numpy_index():
    """Triton's interpreter makes integers of arrays of one element, which numpy 2.5 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend


def let_casts_round():
    """Triton's interpreter cuts bfloat16 off, and loses the carry when it rounds to FP8: round both by numpy."""
    from triton import language
    from triton.runtime import interpreter

    convert = interpreter._convert_float
    dtypes = {
        language.float8e4nv: (ml_dtypes.float8_e4m3fn, np.uint8),
        language.bfloat16: (ml_dtypes.bfloat16, np.uint16),
    }

    def round_numbers(numbers, source, target, mode):
        if source == language.float32 and target in dtypes:
            dtype, stored = dtypes[target]
            return numbers.view(np.float32).astype(dtype).view(stored)
        return convert(numbers, source, target, mode)

    interpreter._convert_float = round_numbers


def let_assembly_run():
    """Triton's interpreter refuses inline assembly: run the instructions that kernels here use, by numpy."""
    from triton import language
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    # The compiler adds Python's tuples and Triton's in either order.
    language.tuple.__radd__ = lambda self, other: language.tuple([*other, *self])

    class Result:
        def __init__(self, handle):
            self.handle = handle

        def get_result(self, _):
            return self.handle

    class Results:
        def __init__(self, handles):
            self.handles = handles

        def get_result(self, number):
            return self.handles[number]

    def create_inline_asm(self, assembly, constraints, values, types, pure, pack):
        """Elements of the last axis that fill a register, four bytes or two of 16 bits; one result of 16 bits.

        Of further operands each register has one element, and of all operands and results with `pack` 1.
        """
        if pack == 1:
            return run_words(assembly, constraints, values, types)
        assert pack * values[0].data.itemsize == 4 and len(types) == 1
        results = pack // 2
        assert constraints.startswith("=r," * results + "r")
        shape = values[0].data.shape
        words = np.ascontiguousarray(values[0].data).reshape(-1).view(np.uint32)
        registers = {f"${results}": words.astype(np.uint64)}
        for value in values[1:]:
            wide = value.data.astype(np.uint64) & (2 ** (8 * value.data.itemsize) - 1)
            for one in wide.reshape(-1, pack).T:
                registers[f"${len(registers) + results}"] = one
        assert constraints.count(",") == len(registers) + results - 1
        run_instructions(assembly, registers)
        found = np.stack([registers[f"${number}"] for number in range(results)], -1).astype(np.uint32)
        dtype = np.float16 if types[0].scalar.is_fp16() else np.int16
        return Result(TensorHandle(found.view(dtype).reshape(shape), types[0].scalar))

    def run_words(assembly, constraints, values, types):
        registers = {}
        for number, value in enumerate(values, len(types)):
            registers[f"${number}"] = value.data.view(f"u{value.data.itemsize}").astype(np.uint64)
        assert constraints.count(",") == len(values) + len(types) - 1
        run_instructions(assembly, registers)
        found = [registers[f"${number}"].astype(np.uint32) for number in range(len(types))]
        dtypes = [np.float32 if one.scalar.is_fp32() else np.int32 for one in types]
        handles = [TensorHandle(a.view(dtype), one.scalar) for a, dtype, one in zip(found, dtypes, types, strict=True)]
        return Results(handles)

    InterpreterBuilder.create_inline_asm = create_inline_asm


def run_instructions(assembly, registers):
    """Run PTX instructions on arrays of registers, name -> uint64 numbers."""
    for line in re.findall(r"^(?![.{}])\s*(\S.*);", assembly, re.MULTILINE):
        predicate, operation, rest = re.fullmatch(r"(?:@(\w+) )?(\S+) (.*)", line).groups()
        names = re.findall(r"[\w$]+", rest)
        count = _RESULTS.get(operation, 1)
        given = [
            registers[name] if name in registers else np.uint64(int(name.replace("0f", "0x"), 0))
            for name in names[count:]
        ]
        where = {} if predicate is None else {"where": registers[predicate] != 0}
        found = _INSTRUCTIONS[operation](*given, **where)
        for name, value in zip(names[:count], found if count > 1 else [found], strict=True):
            registers[name] = value if predicate is None else np.where(where["where"], value, registers[name])


def _permute(a, b, selectors):
    """`prmt.b32`: byte i is the one of (a, b) that the i-th 4 bits select; with the fourth bit, copies of its sign."""
    both = a | (b << np.uint64(32))
    found = np.uint64(0)
    for place in range(4):
        selector = (selectors >> np.uint64(4 * place)) & np.uint64(15)
        byte = (both >> (np.uint64(8) * (selector & np.uint64(7)))) & np.uint64(255)
        byte = np.where(selector > 7, (byte >> np.uint64(7)) * np.uint64(255), byte)
        found = found | (byte << np.uint64(8 * place))
    return found


def _combine(a, b, c, table):
    """`lop3.b32`: each bit is that of the table at the place that the bits of a, b and c give."""
    found = np.uint64(0)
    for place in range(32):
        bits = [(x >> np.uint64(place)) & np.uint64(1) for x in (a, b, c)]
        chosen = (table >> (bits[0] * np.uint64(4) + bits[1] * np.uint64(2) + bits[2])) & np.uint64(1)
        found = found | (chosen << np.uint64(place))
    return found


def _multiply_bfloat16(a, b):
    """`mul.rn.bf16x2`: the products of two pairs of bfloat16 numbers, rounded to nearest."""
    halves = [[(x >> np.uint64(shift) & np.uint64(0xFFFF)).astype(np.uint16) for x in (a, b)] for shift in (0, 16)]
    low, high = [(x.view(ml_dtypes.bfloat16) * y.view(ml_dtypes.bfloat16)).view(np.uint16) for x, y in halves]
    return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(16)


def _subtract_bfloat16(a, b):
    """`sub.rn.bf16x2`: the differences of two pairs of bfloat16 numbers, rounded to nearest."""
    halves = [[(x >> np.uint64(shift) & np.uint64(0xFFFF)).astype(np.uint16) for x in (a, b)] for shift in (0, 16)]
    low, high = [(x.view(ml_dtypes.bfloat16) - y.view(ml_dtypes.bfloat16)).view(np.uint16) for x, y in halves]
    return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(16)


def _load_words(places, count, where=True):
    """`ld.global.v2.b32` and `.v4`: neighbouring words at the addresses, 0 where a lane does not load."""

    def load(place, loads):
        if not loads:
            return np.zeros(count, np.uint64)
        return np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(int(place))).astype(np.uint64)

    return np.stack([load(*one) for one in np.broadcast(places, where)], -1)


def _pairs(words, dtype):
    """The two numbers of 16 bits in each word, in float32, as a last axis."""
    return (
        np.ascontiguousarray(words.astype(np.uint32))
        .view(np.uint16)
        .view(dtype)
        .reshape(*words.shape, 2)
        .astype(np.float32)
    )


def _multiply_dense(*words, dtype=ml_dtypes.bfloat16):
    """`mma.m16n8k16`: a product of 16 rows and 8 columns of each warp, whose operands its lanes hold.

    See "Matrix Fragments for mma.m16n8k16 with floating point type" in NVIDIA's PTX ISA.
    """
    a, b, c = _fragments(words, dtype, 2)
    return _sums(c, np.einsum("wik,wkj->wij", a, b))


def _multiply_sparse(*words, dtype=ml_dtypes.bfloat16):
    """`mma.sp.m16n8k32`: as `_multiply_dense`, but of four neighbours in a row of a only two are stored, at places.

    Two neighbouring lanes of four, which the last operand selects, have the places of eight such groups of four each:
    four of row r in the low half of the word, and four of row r + 8 in the high half. See "Sparse matrix storage" and
    "Matrix fragments for sparse mma.m16n8k32 with .f16 and .bf16 types" in NVIDIA's PTX ISA.
    """
    *words, places, half = words
    stored, b, c = _fragments(words, dtype, 4)
    places = places.reshape(-1, 8, 4)[..., 2 * int(half) : 2 * int(half) + 2]
    a = np.zeros((len(stored), 16, 32), np.float32)
    for row in range(16):
        for group in range(8):
            bits = places[:, row % 8, group // 4] >> np.uint64(16 * (row // 8) + 4 * (group % 4))
            for n in range(2):
                place = (bits >> np.uint64(2 * n) & np.uint64(3)).astype(int)
                a[np.arange(len(a)), row, 4 * group + place] = stored[:, row, 2 * group + n]
    return _sums(c, np.einsum("wik,wkj->wij", a, b))


def _fragments(words, dtype, count):
    """The matrices of an instruction of which b has `count` words a lane: a [W, 16, 16], b [W, 8 count, 8], and c."""
    a, b, c = words[:4], words[4 : 4 + count], words[4 + count :]
    # [register, warp, group, thread, pair]: a register of a has rows g or g + 8 and columns from 2 t or 2 t + 8 on.
    a = _pairs(np.stack(a).reshape(2, 2, -1, 8, 4), dtype).transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 16)
    b = _pairs(np.stack(b).reshape(count, -1, 8, 4), dtype).transpose(1, 0, 3, 4, 2).reshape(-1, 8 * count, 8)
    return a, b, c


def _sums(c, product):
    """The words of c plus the product [W, 16, 8]: of a lane, two columns from 2 t on of row g, and of row g + 8."""
    parts = product.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
    before = [
        np.broadcast_to(one, part.shape).astype(np.uint32).view(np.float32) for one, part in zip(c, parts, strict=True)
    ]
    return [
        (one + part).astype(np.float32).view(np.uint32).astype(np.uint64)
        for one, part in zip(before, parts, strict=True)
    ]


_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32"
_MMA_SP = "mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{0}.{0}.f32"
_RESULTS = {
    **dict.fromkeys([name.format(dtype) for name in (_MMA, _MMA_SP) for dtype in ("bf16", "f16")], 4),
    "ld.global.nc.L1::no_allocate.L2::256B.v4.b32": 4,
    "ld.global.nc.v4.b32": 4,
    "ld.global.nc.v2.b32": 2,
}
"""Number of results of instructions that have several."""
_INSTRUCTIONS = {
    _MMA.format("bf16"): _multiply_dense,
    _MMA_SP.format("bf16"): _multiply_sparse,
    _MMA_SP.format("f16"): functools.partial(_multiply_sparse, dtype=np.float16),
    "ld.global.nc.L1::no_allocate.L2::256B.v4.b32": lambda places: _load_words(places, 4),
    "ld.global.nc.v4.b32": lambda places, where=True: _load_words(places, 4, where),
    "ld.global.nc.v2.b32": lambda places: _load_words(places, 2),
    "setp.ne.s32": lambda a, b: a != b,
    "or.b32": lambda a, b: a | b,
    "mov.f32": lambda a: a,
    "sub.rn.bf16x2": _subtract_bfloat16,
    "prmt.b32": _permute,
    "lop3.b32": _combine,
    "shr.u32": lambda a, by: a >> by,
    "shr.u64": lambda a, by: a >> by,
    "cvt.u32.u64": lambda a: a & np.uint64(0xFFFFFFFF),
    "shl.b32": lambda a, by: (a << by) & np.uint64(0xFFFFFFFF),
    "and.b32": lambda a, b: a & b,
    "bfe.u32": lambda a, first, count: (a >> first) & np.uint64(2 ** int(count) - 1),
    "mad.wide.u32": lambda a, b, c: a * b + c,
    "mov.b32": lambda low, *high: low | (high[0] << np.uint64(16)) if high else low,
    "mul.rn.bf16x2": _multiply_bfloat16,
    "ld.global.nc.b16": np.vectorize(lambda place: np.uint64(ctypes.c_uint16.from_address(int(place)).value)),
}
