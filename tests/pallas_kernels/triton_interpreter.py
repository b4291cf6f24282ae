"""Triton's interpreter, which runs kernels on a CPU.

Triton decides at its import whether kernels are interpreted, so a test module whose kernels are has a main part, and
`run_interpreted` runs that in a process of its own.
"""

import ctypes
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
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    class Result:
        def __init__(self, handle):
            self.handle = handle

        def get_result(self, _):
            return self.handle

    def create_inline_asm(self, assembly, constraints, values, types, pure, pack):
        """Elements of the last axis that fill a register, four bytes or two of 16 bits; one result of 16 bits.

        Of further operands each register has one element.
        """
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

    InterpreterBuilder.create_inline_asm = create_inline_asm


def run_instructions(assembly, registers):
    """Run PTX instructions on arrays of registers, name -> uint64 numbers."""
    for line in re.findall(r"^(?![.{}])\s*(\S.*);", assembly, re.MULTILINE):
        operation, rest = line.split(" ", 1)
        target, *names = re.findall(r"[\w$]+", rest)
        given = [registers[name] if name in registers else np.uint64(int(name, 0)) for name in names]
        registers[target] = _INSTRUCTIONS[operation](*given)


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


_INSTRUCTIONS = {
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
