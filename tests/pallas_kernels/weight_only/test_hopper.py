"""What XLA makes of packed matmuls for H200s: the weight is read as stored, without a copy in bfloat16."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import Grid, PackedWeight, lowering_platform, packed_matmul
from pallas_kernels.weight_only.api import many_row_options
from pallas_kernels.weight_only.formats import (
    BlockFloatFormat,
    Float8Format,
    Format,
    IntegerFormat,
    RoundedInputFloat8Format,
    RoundedInputFormat,
)
from pallas_kernels.weight_only.xla import COMPILER_OPTIONS
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.triton_interpreter import needs_triton

OUT = 14336
IN = 4096
S = jax.ShapeDtypeStruct
FORMATS: dict[str, tuple[Format, dict[str, jax.ShapeDtypeStruct]]] = {
    "int8": (IntegerFormat(Grid(8)), {"q": S((OUT, IN), jnp.int8), "scales": S((OUT, 1), jnp.bfloat16)}),
    "int4": (IntegerFormat(Grid(4, 128)), {"q": S((OUT, IN), jnp.int4), "scales": S((OUT, IN // 128), jnp.bfloat16)}),
    "bfp8": (
        BlockFloatFormat(Grid(8, 32)),
        {"q": S((OUT, IN), jnp.int8), "exponents": S((OUT, IN // 32), jnp.int8)},
    ),
    "fp8": (Float8Format(), {"q": S((OUT, IN), jnp.float8_e4m3fn), "scales": S((OUT, 1), jnp.bfloat16)}),
    "fp8-dynamic": (
        RoundedInputFloat8Format(),
        {"q": S((OUT, IN), jnp.float8_e4m3fn), "scales": S((OUT, 1), jnp.bfloat16)},
    ),
    "w8a8": (RoundedInputFormat(), {"q": S((OUT, IN), jnp.int8), "scales": S((OUT, 1), jnp.bfloat16)}),
    "int4-zeros": (
        IntegerFormat(Grid(4, 128)),
        {
            "q": S((OUT, IN), jnp.int4),
            "scales": S((OUT, IN // 128), jnp.bfloat16),
            "zeros": S((OUT, IN // 128), jnp.int4),
        },
    ),
}
"""Format -> its arrays, of the largest matrices of llama3-8b."""


def compile_product(kind: str, rows: int, options: dict[str, bool]) -> Any:
    """A product with bfloat16 inputs, compiled."""
    format, arrays = FORMATS[kind]
    weight = PackedWeight(arrays, format, (IN,), (OUT,))  # type: ignore[arg-type]
    return compile_for_hopper(packed_matmul, S((rows, IN), jnp.bfloat16), weight, options=options)


def temporary_bytes(kind: str, rows: int, options: dict[str, bool]) -> tuple[int, int]:
    """Bytes of temporary arrays and of the arguments of a product."""
    memory = compile_product(kind, rows, options).memory_analysis()
    return memory.temp_size_in_bytes, memory.argument_size_in_bytes


@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("kind", FORMATS)
def test_the_weight_is_read_as_stored(kind, rows):
    temporary, arguments = temporary_bytes(kind, rows, dict(COMPILER_OPTIONS))
    assert arguments < OUT * IN * (0.6 if "int4" in kind else 1.1)
    assert temporary < OUT * IN * 0.15, "a copy in bfloat16 takes 2 bytes a weight"


def test_without_the_options_a_copy_is_written():
    temporary, _ = temporary_bytes("int4", 2, {"xla_gpu_enable_triton_gemm": False})
    assert temporary >= 2 * OUT * IN


@needs_triton
@pytest.mark.parametrize("rows", [65, 512])
def test_inputs_of_many_rows_are_multiplied_in_fp8_by_cublas(rows):
    format, arrays = FORMATS["fp8-dynamic"]
    with lowering_platform("cuda"):
        weight = PackedWeight(arrays, format, (IN,), (OUT,))  # type: ignore[arg-type]
        more = many_row_options([weight], jnp.bfloat16, partitioned=False)
    program = compile_product("fp8-dynamic", rows, {**COMPILER_OPTIONS, **more}).as_text()
    assert program.count('custom_call_target="__cublas$lt$matmul$f8"') == 1
    assert not re.search(rf"(bf16|f32)\[({OUT},{IN}|{IN},{OUT})\]", program), "the weight is widened"


@needs_triton
def test_options_of_many_rows_are_for_weights_that_are_never_widened():
    format, arrays = FORMATS["fp8-dynamic"]
    rounded = PackedWeight(arrays, format, (IN,), (OUT,))  # type: ignore[arg-type]
    odd = PackedWeight({k: S((OUT - 8, x.shape[1]), x.dtype) for k, x in arrays.items()}, format, (IN,), (OUT - 8,))  # type: ignore[arg-type]
    exact = PackedWeight(arrays, Float8Format(), (IN,), (OUT,))  # type: ignore[arg-type]
    with lowering_platform("cuda"):
        assert many_row_options([rounded], jnp.bfloat16, partitioned=False)
        for weights, dtype, partitioned in (
            ([rounded, exact], jnp.bfloat16, False),
            ([odd], jnp.bfloat16, False),
            ([rounded], jnp.float32, False),
            ([rounded], jnp.bfloat16, True),
            ([], jnp.bfloat16, False),
        ):
            assert not many_row_options(weights, dtype, partitioned=partitioned)
    assert not many_row_options([rounded], jnp.bfloat16, partitioned=False), "on a CPU"


@pytest.mark.parametrize(
    ("rows", "triton", "product"),
    [
        (512, False, r'custom_call_target="__cublas\$lt\$matmul"'),
        (512, True, r"= s32\[512,14336\]\S* dot\("),
        (16, True, r"= s32\[\S* dot\("),
        (1, True, r"= s32\[14336\]\S* reduce\("),
    ],
)
def test_rounded_inputs_are_multiplied_as_integers(rows, triton, product):
    options = {**COMPILER_OPTIONS, "xla_gpu_enable_triton_gemm": triton}
    program = compile_product("w8a8", rows, options).as_text()
    assert re.search(product, program) and f"s8[{rows},{IN}]" in program and "s32[" in program
    assert not re.search(rf"(bf16|f32)\[({OUT},{IN}|{IN},{OUT})\]", program), "the weight is widened"
