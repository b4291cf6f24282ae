"""Packed matmuls by Triton: interpreted on the CPU against the matrix, and compiled for an H200.

Triton decides at its import whether kernels are interpreted, so that runs in a process of its own:
`TRITON_INTERPRET=1 python -m tests.pallas_kernels.weight_only.test_triton int4 int8`.
"""

import dataclasses
import functools
import sys
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxstack.compress.formats.fp4 import Nf4Format
from pallas_kernels import (
    Grid,
    NotSupported,
    PackedWeight,
    grouped_matmul,
    lowering_platform,
    packed_matmul,
    record_choices,
)
from pallas_kernels.target import Target
from pallas_kernels.weight_only import triton, widened, xla
from pallas_kernels.weight_only.api import _tell_fallback
from pallas_kernels.weight_only.float8_products import MOST_EXACT_ROWS
from pallas_kernels.weight_only.formats import (
    FP4_VALUES,
    Float8Format,
    IntegerFormat,
    LookupFormat,
    LowRankFormat,
    RoundedInputFloat8Format,
    RoundedInputFormat,
    TwoOfFourFormat,
)
from pallas_kernels.weight_only.packed import pack_float8, pack_integers, pack_lookup, pack_nearest
from pallas_kernels.weight_only.request import PackedMatmulRequest, make_request
from pallas_kernels.weight_only.triton import Tile
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.triton_interpreter import (
    Array,
    let_assembly_run,
    let_numpy_index,
    needs_triton,
    run_instructions,
    run_interpreted,
)

S = jax.ShapeDtypeStruct
CASES = {
    "int4": (Grid(4, 32), 3, Tile(16, 32, 1, 1, 2, 2, assembly=False)),
    "int8": (Grid(8), 3, Tile(32, 64, 2, 1, 2, 2, assembly=False)),
    "int4_sliced": (Grid(4, 64), 1, Tile(16, 32, 2, 2, 2, 2, assembly=False)),
    "int8_sliced": (Grid(8, 64), 9, Tile(16, 64, 1, 4, 4, 2, assembly=False)),
    "fp8": (None, 3, Tile(32, 64, 2, 1, 2, 2, assembly=False)),
    "fp8_sliced": (None, 16, Tile(16, 64, 1, 4, 4, 2, assembly=False)),
}
"""Name -> grid of the integers, or None for FP8; rows; tile."""
WHOLE = Tile(16, 32, 2, 1, 2, 2)
SLICED = Tile(16, 64, 1, 4, 4, 2)
LOOKUPS = {f"lookup{bits}_{rows}": (bits, rows, (SLICED, WHOLE)[(bits + rows) % 2])
           for bits in (1, 2, 3, 4, 8) for rows in (1, 4, 16)}  # fmt: skip
SCALED = {"nf4": (3, WHOLE), "nf4_sliced": (9, SLICED)}
"""Rows and tile of products with indices into the table of NF4, whose groups of 64 inputs have scales."""
FEW_LOOKUPS = ("lookup1_1", "lookup2_16", "lookup3_4", "lookup4_1", "lookup8_16")
TILES = {
    "mxfp4": Tile(16, 64, 2, 1, 2, 2, assembly=False),
    "mxfp4_sliced": Tile(16, 64, 1, 4, 4, 2, assembly=False),
    "nf4_experts": Tile(16, 64, 1, 2, 2, 2, assembly=False),
    "fp8_blocks": Tile(16, 64, 1, 1, 2, 2, assembly=False),
    "fp8_blocks_sliced": Tile(32, 64, 1, 2, 2, 2, assembly=False),
}
OUT = 32
IN = 256


def stored_weight(name: str):
    """The packed weight of a case, its bytes as a kernel receives them, and its scales or tables."""
    if name in LOOKUPS:
        bits = LOOKUPS[name][0]
        random = np.random.default_rng(1)
        indices = random.integers(0, 2**bits, (OUT, IN))
        # The values of a table are numbers of 16 bits, whose products with activations are exact in float32.
        codebook = random.normal(size=(OUT // 16, 2**bits)).astype(np.float16)
        weight = pack_lookup(bits, jnp.asarray(indices), jnp.asarray(codebook, jnp.float32))
        constants = Array(codebook, "fp16") if bits > 4 else Array(codebook.astype(np.float32), "fp32")
        return weight, np.asarray(weight.arrays["indices"].astype(jnp.uint8)).view(np.int8), constants
    if name in SCALED:
        weight = Nf4Format().pack(jax.random.normal(jax.random.key(0), (OUT, IN)))
        table = np.asarray(weight.arrays["codebook"]).astype(np.float16).astype(np.float32)
        weight = dataclasses.replace(weight, arrays={**weight.arrays, "codebook": jnp.asarray(table)})
        return weight, np.asarray(weight.arrays["indices"].astype(jnp.uint8)).view(np.int8), Array(table, "fp32")
    grid = CASES[name][0]
    w = jax.random.normal(jax.random.key(0), (OUT, IN))
    if grid is None:
        weight = pack_float8(w, jax.random.uniform(jax.random.key(1), (OUT, 1)).astype(jnp.float16), round_inputs=True)
        scales = Array(np.asarray(weight.arrays["scales"]), "fp16")
        return weight, np.asarray(weight.arrays["q"]), scales
    scales = grid.scales(w)
    weight = pack_integers(grid, grid.quantize(w, scales), scales.astype(jnp.float16))
    return weight, np.asarray(weight.arrays["q"].astype(jnp.int8)), Array(np.asarray(weight.arrays["scales"]), "fp16")


def interpret(name: str) -> None:
    from pallas_kernels.weight_only.triton_kernel import product_kernel, sliced_product_kernel

    *_, rows, tile = {**CASES, **LOOKUPS, **SCALED}[name]
    weight, q, constants = stored_weight(name)
    x = np.random.default_rng(0).normal(size=(rows, IN)).astype(np.float16)
    request, _ = make_request(x, weight, jnp.float32)
    plan = triton.make_plan(request, tile)
    assert triton.tile_problem(plan) is None
    if plan.halves == 2:
        q = ((q[:, 1::2] << 4) | (q[:, ::2] & 15)).astype(np.int8)
    beside = Array(np.asarray(weight.arrays["scales"]), "fp32") if name in SCALED else constants
    arrays = [Array(x, "fp16"), Array(q, "fp8e4nv" if plan.float8 else "i8"), constants, beside, constants]
    out = np.full((tile.ranges, rows, OUT), np.nan, np.float32)
    kernel = product_kernel if tile.slices == 1 else sliced_product_kernel
    kernel[(OUT // tile.block_out, tile.ranges)](*arrays, Array(out, "fp32"), plan=plan)
    np.testing.assert_allclose(out.sum(0), x.astype(np.float32) @ np.asarray(weight.dense()), rtol=2e-5, atol=2e-5)


def interpret_tiles(name: str) -> None:
    """Tiles of rows with a matrix each: MXFP4, NF4, or FP8 by blocks."""
    from pallas_kernels.weight_only.triton_kernel import product_kernel, sliced_product_kernel

    tile = TILES[name]
    random = np.random.default_rng(0)
    rows, matrices = 5, 3
    x = random.normal(size=(3 * rows, IN)).astype(np.float16)
    groups = np.asarray([2, 0, -1], np.int32)
    if name.startswith(("mxfp4", "nf4")):
        indices = random.integers(0, 16, (matrices, OUT, IN)).astype(np.uint8)
        codebook = np.broadcast_to(np.arange(16, dtype=np.float32) - 5.5, (matrices, 1, 16)).copy()
        exponents = random.integers(-4, 3, (matrices, OUT, IN // 32)).astype(np.int8)
        scales = random.uniform(size=(matrices, OUT, IN // 64)).astype(np.float32)
        beside, form = (exponents, "i8") if name.startswith("mxfp4") else (scales, "fp32")
        kind = "exponents" if name.startswith("mxfp4") else "scales"
        stored = {"indices": jnp.asarray(indices, jnp.uint4), "codebook": codebook, kind: beside}
        q = Array((indices[..., ::2] | indices[..., 1::2] << 4).view(np.int8), "i8")
        weight = PackedWeight(stored, LookupFormat(4), (IN,), (OUT,), (matrices,))
        constants = (Array(codebook, "fp32"), Array(beside, form))
    else:
        values = jnp.asarray(random.normal(size=(matrices, OUT, IN)), jnp.float8_e4m3fn)
        scales = random.uniform(size=(matrices, OUT // 16, IN // 64)).astype(np.float32)
        weight = PackedWeight({"q": values, "scales": scales}, Float8Format(16, 64), (IN,), (OUT,), (matrices,))
        q = Array(np.asarray(values), "fp8e4nv")
        constants = (Array(scales, "fp32"),) * 2
    plan = triton.make_plan(PackedMatmulRequest(jnp.asarray(x), weight, jnp.float32, Target("cuda", (9, 0))), tile, 3)
    assert triton.tile_problem(plan) is None
    out = np.full((tile.ranges, 3 * rows, OUT), np.nan, np.float32)
    kernel = product_kernel if tile.slices == 1 else sliced_product_kernel
    arrays = (Array(x, "fp16"), q, *constants, Array(groups, "i32"), Array(out, "fp32"))
    kernel[(OUT // tile.block_out, tile.ranges, 3)](*arrays, plan=plan)
    dense = np.asarray(weight.dense())
    wanted = [x[:rows].astype(np.float32) @ dense[2], x[rows : 2 * rows].astype(np.float32) @ dense[0]]
    np.testing.assert_allclose(out.sum(0), np.concatenate([*wanted, 0 * wanted[0]]), rtol=1e-4, atol=1e-4)


ROUNDED = {
    "w8a8": (3, Tile(32, 64, 2, 1, 2, 2)),
    "w8a8_sliced": (9, Tile(16, 64, 1, 4, 4, 2)),
}
"""Rows and tile of products of integers of 8 bits."""


def interpret_rounded(name: str) -> None:
    """Products of integers of 8 bits: the kernels return their sums, exactly."""
    from pallas_kernels.weight_only.triton_kernel import product_kernel, sliced_product_kernel

    rows, tile = ROUNDED[name]
    random = np.random.default_rng(0)
    x = random.integers(-127, 128, (rows, IN), dtype=np.int8)
    q = random.integers(-128, 128, (OUT, IN), dtype=np.int8)
    scales = random.uniform(size=(OUT, 1)).astype(np.float32)
    weight = PackedWeight({"q": jnp.asarray(q), "scales": jnp.asarray(scales)}, RoundedInputFormat(), (IN,), (OUT,))
    request, _ = make_request(jnp.asarray(x, jnp.bfloat16), weight, None)
    plan = triton.make_plan(request, tile)
    assert triton.tile_problem(plan) is None
    out = np.full((tile.ranges, rows, OUT), -(2**31), np.int32)
    constants = Array(scales, "fp32")
    arrays = [Array(x, "i8"), Array(q, "i8"), constants, constants, constants, Array(out, "i32")]
    kernel = product_kernel if tile.slices == 1 else sliced_product_kernel
    kernel[(OUT // tile.block_out, tile.ranges)](*arrays, plan=plan)
    np.testing.assert_array_equal(out.sum(0), x.astype(np.int32) @ q.astype(np.int32).T)


WIDENED = ("int4", "int4_sliced", "int8_sliced", "fp8", "lookup3_4", "lookup8_16", "nf4", "mxfp4", "2:4")
"""Weights that are written for products of many rows."""


def interpret_widening(name: str) -> None:
    """The kernels write the values of the matrix, rounded once; scales of whole outputs are left out."""
    from pallas_kernels.weight_only.triton_widen import widen_kernel, widen_sparse_kernel

    random = np.random.default_rng(0)
    kernel = widen_kernel
    if name == "2:4":
        values = random.normal(size=(OUT, IN // 2)).astype(np.float16)
        kept = random.choice([3, 5, 6, 9, 10, 12], size=(OUT, IN // 4)).astype(np.uint8)
        kept[:, ::7] = random.choice([1, 2, 4, 8], size=kept[:, ::7].shape)  # a value by itself is the first
        stored = {"values": jnp.asarray(values), "kept": jnp.asarray(kept, jnp.uint4)}
        weight = PackedWeight(stored, TwoOfFourFormat(), (IN,), (OUT,))
        arrays = [Array(values, "fp16"), Array((kept[:, ::2] | kept[:, 1::2] << 4).view(np.int8), "i8")]
        kernel = widen_sparse_kernel
    elif name == "mxfp4":
        indices = random.integers(0, 16, (OUT, IN)).astype(np.uint8)
        table = FP4_VALUES[None]
        exponents = random.integers(-4, 3, (OUT, IN // 32)).astype(np.int8)
        stored = {"indices": jnp.asarray(indices, jnp.uint4), "codebook": table, "exponents": exponents}
        weight = PackedWeight(stored, LookupFormat(4), (IN,), (OUT,))
        q = (indices[:, ::2] | indices[:, 1::2] << 4).view(np.int8)
        arrays = [Array(q, "i8"), Array(table, "fp32"), Array(exponents, "i8")]
    else:
        weight, q, constants = stored_weight(name)
        if triton.stored_bits(make_request(np.zeros((1, IN), np.float16), weight, None)[0]) == 4:
            q = ((q[:, 1::2] << 4) | (q[:, ::2] & 15)).astype(np.int8)
        beside = Array(np.asarray(weight.arrays["scales"]), "fp32") if name in SCALED else constants
        arrays = [Array(q, "fp8e4nv" if q.dtype == ml_dtypes.float8_e4m3fn else "i8"), constants, beside]
    request, _ = make_request(np.zeros((100, IN), np.float16), weight, None)
    plan = widened.widening_plan(request)
    out = np.full((OUT, IN), np.nan, np.float16)
    kernel[(OUT // plan.block_out, plan.tile.ranges)](*arrays, Array(out, "fp16"), plan=plan)
    wanted = np.asarray(weight.dense()).T  # [out, in]
    if not plan.scaled and "scales" in weight.arrays:
        wanted = wanted / np.asarray(weight.arrays["scales"], np.float32)
    # Entries of a table are rounded before they are multiplied by a scale.
    np.testing.assert_allclose(out.astype(np.float32), wanted, rtol=2**-10 if name == "nf4" else 2**-11, atol=1e-7)


@needs_triton
def test_the_kernels_write_the_matrix():
    done = run_interpreted(__spec__.name, *(f"widened {name}" for name in WIDENED))
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
def test_the_kernels_multiply_by_the_matrix():
    done = run_interpreted(
        __spec__.name, *CASES, *FEW_LOOKUPS, "mxfp4", "nf4_experts", "fp8_blocks_sliced", *ROUNDED, *SCALED
    )
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
def test_assembly_converts_every_fp8_number_exactly():
    from pallas_kernels.weight_only.triton_kernel import _FLOAT8

    codes = np.arange(256, dtype=np.uint8)
    registers = {"$2": codes.view(np.uint32).astype(np.uint64)}
    run_instructions(_FLOAT8.value, registers)
    pairs = np.stack([registers["$0"], registers["$1"]], -1).astype(np.uint32)
    found = pairs.view(ml_dtypes.bfloat16).reshape(-1).astype(np.float32)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(found[number], expected[number])
    np.testing.assert_array_equal(np.signbit(found), codes >= 128)


@needs_triton
@pytest.mark.exhaustive
def test_the_kernels_look_up_indices_of_any_bits():
    done = run_interpreted(__spec__.name, *LOOKUPS, *TILES)
    assert done.returncode == 0, done.stderr[-3000:]


def abstract_float8(format):
    """A weight of FP8 numbers with a scale for each output, without values."""
    arrays = {"q": S((4096, 14336), jnp.float8_e4m3fn), "scales": S((4096, 1), jnp.bfloat16)}
    return PackedWeight(arrays, format, (14336,), (4096,))


def abstract(bits, group=None, outputs=4096, inputs=14336):
    """A packed weight without values."""
    groups = 1 if group is None else inputs // group
    arrays = {
        "q": S((outputs, inputs), jnp.int4 if bits == 4 else jnp.int8),
        "scales": S((outputs, groups), jnp.bfloat16),
    }
    return PackedWeight(arrays, IntegerFormat(Grid(bits, group)), (inputs,), (outputs,))


@needs_triton
@pytest.mark.parametrize(("bits", "group", "rows"), [(4, 128, 1), (8, None, 16), ("fp8", None, 1), ("fp8", None, 64)])
def test_compiled_for_hopper_one_kernel_reads_the_stored_weight(bits, group, rows):
    x = S((rows, 14336), jnp.bfloat16)
    weight = abstract_float8(Float8Format()) if bits == "fp8" else abstract(bits, group)
    with lowering_platform("cuda"):
        compiled = compile_for_hopper(packed_matmul, x, weight)
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 1
    # The one fusion there may be adds the partial sums of the programs that share an output, in float32.
    ranges = triton.make_plan(PackedMatmulRequest(x, weight, x.dtype, Target("cuda", (9, 0)))).tile.ranges
    assert text.count(" fusion(") == (ranges > 1) and " copy(" not in text
    assert memory.temp_size_in_bytes <= 4 * ranges * rows * 4096


@needs_triton
@pytest.mark.parametrize("rows", [1, 64])
def test_compiled_for_hopper_integers_of_8_bits_are_multiplied_as_such(rows):
    """Beside the kernel, inputs are rounded and sums scaled; no weight is written, in any dtype."""
    weight = abstract(8)
    weight = dataclasses.replace(weight, format=RoundedInputFormat())
    x = S((rows, 14336), jnp.bfloat16)
    with lowering_platform("cuda"):
        compiled = compile_for_hopper(packed_matmul, x, weight)
    assert compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 1
    tile = triton.make_plan(PackedMatmulRequest(x, weight, x.dtype, Target("cuda", (9, 0)))).tile
    rounded, sums = rows * 14336, 4 * tile.ranges * rows * 4096
    assert compiled.memory_analysis().temp_size_in_bytes <= rounded + 2 * sums + 1024 < 4096 * 14336 / 4


def abstract_lookup(bits, tables=1, outputs=4096, inputs=14336):
    """A weight of indices and their tables, without values."""
    indices = S((outputs, inputs), jnp.uint4 if bits <= 4 else jnp.uint8)
    arrays = {"indices": indices, "codebook": S((tables, 2**bits), jnp.float32)}
    return PackedWeight(arrays, LookupFormat(bits), (inputs,), (outputs,))


@needs_triton
@pytest.mark.parametrize(("bits", "rows"), [(3, 1), (1, 4), (2, 1), (4, 16), (4, 64), ("nf4", 16), (8, 1), (8, 16)])
def test_compiled_for_hopper_no_values_of_a_table_are_written(bits, rows):
    x = S((rows, 14336), jnp.bfloat16)
    weight = abstract_lookup(4 if bits == "nf4" else bits)
    if bits == "nf4":
        bits, scales = 4, S((4096, 14336 // 64), jnp.float32)
        weight = dataclasses.replace(weight, arrays={**weight.arrays, "scales": scales})
    with lowering_platform("cuda"):
        compiled = compile_for_hopper(packed_matmul, x, weight)
    assert compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 1
    memory = compiled.memory_analysis()
    dense = 2 * 4096 * 14336
    assert memory.argument_size_in_bytes < dense * (0.3 if bits <= 4 else 0.6)
    ranges = triton.make_plan(PackedMatmulRequest(x, weight, x.dtype, Target("cuda", (9, 0)))).tile.ranges
    assert memory.temp_size_in_bytes <= 4 * ranges * rows * 4096 + 1024 < dense / 20


@needs_triton
@pytest.mark.parametrize("tile", [8, 64])
def test_compiled_for_hopper_one_kernel_multiplies_all_experts(tile):
    """gpt-oss-20b in MXFP4: no values are written."""
    size = 2880
    arrays = {
        "indices": S((32, size, size), jnp.uint4),
        "codebook": S((32, 1, 16), jnp.float32),
        "exponents": S((32, size, size // 32), jnp.int8),
    }
    weight = PackedWeight(arrays, LookupFormat(4), (size,), (size,), (32,))
    with lowering_platform("cuda"):
        product = functools.partial(grouped_matmul, alignment=tile)
        compiled = compile_for_hopper(product, S((16 * tile, size), jnp.bfloat16), weight, S((32,), jnp.int32))
    assert compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 1
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 1024 and memory.argument_size_in_bytes < 0.56 * 32 * size**2


@needs_triton
@pytest.mark.exhaustive
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(
    "tile", sorted({tile for key, tile in triton.MEASURED.items() if key[0] == 4 and isinstance(tile, Tile)}, key=str)
)
def test_every_tile_compiles_for_hopper(tile, group):
    """At 16 rows, which need more registers and shared memory than 1."""
    tile = dataclasses.replace(tile, block_in=min(tile.block_in, group))
    weight = abstract(4, group)

    def product(x, weight):
        return triton.multiply(make_request(x, weight, None)[0], tile)

    with lowering_platform("cuda"):
        compile_for_hopper(product, S((16, 14336), jnp.bfloat16), weight)


@needs_triton
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(128256, 2048, None), (16, 128, 32), (4096, 384, None)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["integer", "lookup"])
def test_products_of_any_shape_compile_for_hopper(kind, bits, outputs, inputs, group, dtype):
    lookup = abstract_lookup(bits, outputs // 16, outputs, inputs)
    for rows in (5, 16, 64):
        with lowering_platform("cuda"):
            weight = lookup if kind == "lookup" else abstract(bits, group, outputs, inputs)
            compile_for_hopper(packed_matmul, S((rows, inputs), dtype), weight)


@needs_triton
def test_the_choice_and_its_reasons():
    x = S((1, 14336), jnp.bfloat16)
    int4 = abstract(4, 128)
    arrays = {"u": S((4096, 64), jnp.bfloat16), "v": S((64, 14336), jnp.bfloat16)}
    low_rank = PackedWeight(arrays, LowRankFormat(), (14336,), (4096,))

    def float8(columns: int) -> PackedWeight:
        q, scales = S((4096, 14336), jnp.float8_e4m3fn), S((32, -(-14336 // columns)), jnp.float32)
        return PackedWeight({"q": q, "scales": scales}, Float8Format(128, columns), (14336,), (4096,))

    zeros = dataclasses.replace(int4, arrays={**int4.arrays, "zeros": S((4096, 112), jnp.int4)})
    calls = {
        "got float32": (S((1, 14336), jnp.float32), int4),
        "LowRankFormat": (x, low_rank),
        "whole blocks": (x, float8(100)),
        "zero points": (x, zeros),
        "multiple of 16": (x, abstract(8, outputs=4100)),
        "multiple of 32": (x, abstract(4, 16)),
        "tables of a multiple of 16": (x, abstract_lookup(4, 4096 // 8)),
    }
    plain = abstract_float8(Float8Format())
    rounded = abstract_float8(RoundedInputFloat8Format())
    calls[f"takes 1 to {MOST_EXACT_ROWS} rows"] = S((MOST_EXACT_ROWS + 1, 14336), jnp.bfloat16), rounded
    tables = abstract_lookup(1), abstract_lookup(4, 4096 // 16), abstract_lookup(8)
    integers = dataclasses.replace(abstract(8), format=RoundedInputFormat())
    blocks = abstract_lookup(4)
    nf4 = dataclasses.replace(blocks, arrays={**blocks.arrays, "scales": S((4096, 14336 // 64), jnp.float32)})
    supported = (int4, float8(128), plain, rounded, integers, nf4, *tables)
    for words, call in (*calls.items(), *(("", (x, weight)) for weight in supported)):
        with lowering_platform("cuda"), record_choices() as choices:
            jax.eval_shape(packed_matmul, *call)
        refused = dict(choices[0].refused)
        assert choices[0].backend == ("xla" if words else "triton") and words in refused.get("triton", "")
    written = (int4, float8(128), plain, nf4, *tables)
    unwritten = {"zero points": zeros, "LowRankFormat": low_rank, "whole blocks": float8(100), "Float8Format": rounded}
    unwritten["RoundedInputFormat"] = integers
    for words, weight in (*unwritten.items(), *(("", weight) for weight in written)):
        with lowering_platform("cuda"), record_choices() as choices:
            for rows in (512, 511, 65):
                jax.eval_shape(packed_matmul, S((rows, 14336), jnp.bfloat16), weight)
        read_as_stored = "q" in weight.arrays and weight.format != Float8Format(128, 128)
        wanted = ["xla"] * 3 if words else ["widened", *["xla" if read_as_stored else "widened"] * 2]
        assert [choice.backend for choice in choices] == wanted
        refused = dict(choices[0].refused)
        assert words in refused.get("widened", "") and refused["triton"]
    with pytest.raises(NotSupported, match="compute capability"):
        jax.eval_shape(lambda *call: packed_matmul(*call, implementation="triton"), x, int4)


@needs_triton
def test_a_fallback_to_xla_on_a_gpu_is_told_once():
    int4 = abstract(4, 128)
    _tell_fallback.cache_clear()

    def said(rows: int, platform: str = "cuda", axes: int = 1) -> list[str]:
        mesh = jax.sharding.AbstractMesh((axes,), ("tensor",))
        with warnings.catch_warnings(record=True) as found, jax.sharding.use_abstract_mesh(mesh):
            warnings.simplefilter("always")
            with lowering_platform(platform):
                jax.eval_shape(packed_matmul, S((rows, 14336), jnp.bfloat16), int4)
        return [str(warning.message) for warning in found]

    assert said(64) == said(65) == said(4096) == said(1, "cpu", axes=2) == []
    (line,) = said(1, axes=2)
    assert "over a mesh of several devices, tensor=2" in line and "0.4 to 0.65" in line
    assert said(65, axes=2) == []


_OTHERS = ("int8", "fp8", "nf4", "mxfp4")


@needs_triton
@pytest.mark.parametrize(
    "kind", ["int4", "2:4", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in _OTHERS)]
)
def test_compiled_for_hopper_a_weight_at_a_time_is_written_for_many_rows(kind):
    """In both passes, with the memory of one; the gradient of a frozen weight is not computed."""
    tables = abstract_lookup(4)
    kept = {"values": S((4096, 14336 // 2), jnp.bfloat16), "kept": S((4096, 14336 // 4), jnp.uint4)}
    weight = {
        "int4": abstract(4, 128),
        "int8": abstract(8),
        "fp8": abstract_float8(Float8Format()),
        "nf4": dataclasses.replace(tables, arrays={**tables.arrays, "scales": S((4096, 14336 // 64), jnp.float32)}),
        "mxfp4": dataclasses.replace(tables, arrays={**tables.arrays, "exponents": S((4096, 14336 // 32), jnp.int8)}),
        "2:4": PackedWeight(kept, TwoOfFourFormat(), (14336,), (4096,)),
    }[kind]

    def loss(x, weights):
        for one in weights:
            x = x + jnp.tile(jnp.sin(packed_matmul(x, one)), (1, 4))[:, :14336]
        return x.astype(jnp.float32).sum()

    x = S((512, 14336), jnp.bfloat16)
    for function, count in ((loss, 3), (jax.grad(loss), 6)):
        with lowering_platform("cuda"):
            compiled = compile_for_hopper(function, x, (weight,) * 3, options=dict(xla.COMPILER_OPTIONS))
        assert compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"') == count
        assert compiled.memory_analysis().temp_size_in_bytes < 2 * 4096 * 14336 + 4 * 2 * 512 * 14336


@pytest.mark.parametrize("group", [None, 64])
def test_products_and_gradients_with_a_written_weight_are_those_of_xla(group, monkeypatch):
    """In float32, of a weight that another function than the kernel writes; the gradient of its scales too."""
    weight = pack_nearest(Grid(8, group), 1e-3 * jax.random.normal(jax.random.key(0), (48, 128)))
    x = jax.random.normal(jax.random.key(1), (100, 128))

    def written(request: PackedMatmulRequest):
        whole = group is None
        matrix = request.weight.arrays["q"].astype(jnp.float32) if whole else request.weight.matrix()
        return matrix, request.weight.arrays["scales"][:, 0] if whole else None

    def loss(x, scales, multiply):
        changed = dataclasses.replace(weight, arrays={**weight.arrays, "scales": scales})
        y = multiply(PackedMatmulRequest(x, changed, jnp.float32, Target("cuda", (9, 0))))
        return jnp.sum(jnp.sin(1e2 * y))

    monkeypatch.setattr(widened, "widen", written)
    value_and_gradients = jax.value_and_grad(loss, (0, 1))
    found, expected = (value_and_gradients(x, weight.arrays["scales"], backend.multiply) for backend in (widened, xla))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), found, expected)


@needs_triton
def test_the_gradients_are_those_of_xla():
    """Compiled for an H200 the backward holds no kernel, as the weight is only read there."""
    weight = abstract(8, None, 256, 512)

    def gradient(x, scales):
        changed = dataclasses.replace(weight, arrays={"q": jnp.ones((256, 512), jnp.int8), "scales": scales})
        return packed_matmul(x, changed).astype(jnp.float32).sum()

    with lowering_platform("cuda"):
        shapes = jax.eval_shape(jax.grad(gradient, (0, 1)), S((2, 512), jnp.bfloat16), weight.arrays["scales"])
    assert [shape.shape for shape in shapes] == [(2, 512), (256, 1)]


if __name__ == "__main__":
    let_numpy_index()
    let_assembly_run()
    for case in sys.argv[1:]:
        if case.startswith("widened "):
            interpret_widening(case.removeprefix("widened "))
            continue
        one = interpret_tiles if case in TILES else interpret_rounded if case in ROUNDED else interpret
        one(case)
