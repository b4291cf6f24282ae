"""Packed matmuls whose threads load their operands: interpreted on the CPU, and compiled for an H200.

Triton decides at its import whether kernels are interpreted, so that runs in a process of its own:
`TRITON_INTERPRET=1 python -m tests.pallas_kernels.weight_only.test_fragments sparse int4`.
"""

import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxstack.compress.formats.sparse import Pattern
from pallas_kernels import Grid, PackedWeight, lowering_platform, packed_matmul
from pallas_kernels.target import Target
from pallas_kernels.weight_only import fragments, triton
from pallas_kernels.weight_only.formats import IntegerFormat, TwoOfFourFormat
from pallas_kernels.weight_only.fragments import FragmentTile
from pallas_kernels.weight_only.packed import pack_integers, pack_two_of_four
from pallas_kernels.weight_only.request import PackedMatmulRequest
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
OUT = 32
CASES = {
    "sparse": (512, 1, "bfloat16", FragmentTile(1, 2)),
    "sparse_float16": (1024, 9, "float16", FragmentTile(2, 1, 2)),
    "sparse_24_rows": (256, 24, "bfloat16", FragmentTile(1, 1)),
    "int4": (512, 3, "bfloat16", FragmentTile(1, 2, 2)),
    "int4_16_rows": (256, 16, "bfloat16", FragmentTile(2, 1)),
    "int4_groups_of_256": (512, 8, "bfloat16", FragmentTile(1, 4)),
    "int4_one_scale": (256, 11, "bfloat16", FragmentTile(1, 2)),
}
"""Name -> inputs, rows, dtype, tile."""


def halves(numbers) -> np.ndarray:
    """Numbers of 4 bits as kernels receive them, two in a byte."""
    bits = np.asarray(numbers).astype(np.int8).view(np.uint8) & 15
    return (bits[:, ::2] | bits[:, 1::2] << 4).view(np.int8)


def request_of(name: str) -> PackedMatmulRequest:
    inputs, rows, dtype, _ = CASES[name]
    w = jax.random.normal(jax.random.key(0), (OUT, inputs))
    if name.startswith("sparse"):
        weight = pack_two_of_four(Pattern(keep_of=(2, 4)).prune(w, jnp.abs(w)).astype(dtype))
    else:
        grid = Grid(4, {"int4_one_scale": None, "int4_groups_of_256": 256}.get(name, 128))
        scales = grid.scales(w)
        weight = pack_integers(grid, grid.quantize(w, scales), scales.astype(jnp.float32))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(rows, inputs)), dtype)
    return PackedMatmulRequest(x, weight, jnp.float32, Target("cuda", (9, 0)))


def interpret(name: str) -> None:
    from pallas_kernels.weight_only.triton_fragments import dense_fragment_kernel, sparse_fragment_kernel

    request = request_of(name)
    assert fragments.unsupported_reason(request) is None
    plan = fragments.make_plan(request, CASES[name][-1])
    assert fragments.tile_problem(plan) is None
    arrays = request.weight.arrays
    x = Array(np.asarray(fragments.arrange(request.x, plan)), "i32")
    out = np.full((plan.tile.ranges, plan.rows, OUT), np.nan, np.float32)
    grid = (OUT // (16 * plan.blocks), plan.tile.ranges)
    if plan.sparse:
        values = np.ascontiguousarray(np.asarray(arrays["values"])).view(np.int8)
        operands = Array(values, "i8"), Array(halves(arrays["kept"].astype(jnp.int8)), "i8")
        sparse_fragment_kernel[grid](x, *operands, Array(out, "fp32"), plan=plan)
    else:
        operands = Array(halves(arrays["q"]), "i8"), Array(np.asarray(arrays["scales"]), "fp32")
        dense_fragment_kernel[grid](x, *operands, Array(out, "fp32"), plan=plan)
    wanted = np.asarray(request.x, np.float32) @ np.asarray(request.weight.dense(), np.float32)
    np.testing.assert_allclose(out.sum(0), wanted, rtol=2e-5, atol=1e-4)


@needs_triton
def test_the_kernels_multiply_by_the_matrix():
    done = run_interpreted(__spec__.name, *CASES)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
def test_places_are_those_of_the_two_inputs_with_a_value():
    """Metadata of 16 groups of each of two rows, for the six patterns in random order."""
    from pallas_kernels.weight_only.triton_fragments import _places

    patterns = np.asarray([bits for bits in range(16) if bits.bit_count() == 2])
    masks = np.random.default_rng(0).choice(patterns, (50, 2, 16))
    words = (masks.reshape(50, 4, 8) << (4 * np.arange(8))).sum(-1).astype(np.uint64)
    registers = {f"${4 + n}": words[:, n] for n in range(4)}
    run_instructions(_places(), registers)
    places = np.asarray([[n for n in range(4) if mask >> n & 1] for mask in range(16) if mask.bit_count() == 2])
    for instruction in range(4):
        found = registers[f"${instruction}"][:, None] >> np.uint64(2) * np.arange(16, dtype=np.uint64) & np.uint64(3)
        chosen = masks[:, :, instruction::4].reshape(50, 8)
        np.testing.assert_array_equal(found.reshape(50, 8, 2), places[np.searchsorted(patterns, chosen)])


@needs_triton
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_compiled_for_hopper_one_kernel_reads_values_with_two_of_four_sparsity(rows):
    arrays = {"values": S((4096, 7168), jnp.bfloat16), "kept": S((4096, 3584), jnp.uint4)}
    weight = PackedWeight(arrays, TwoOfFourFormat(), (14336,), (4096,))
    compiled, tile = compile_product(S((rows, 14336), jnp.bfloat16), weight)
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes < 1.01 * (2 * 14336 * rows + 1.125 * 4096 * 14336)
    # The sums of ranges, and the arranged activations.
    assert memory.temp_size_in_bytes <= 4 * tile.ranges * rows * 4096 + 2 * 14336 * rows + 1024


@needs_triton
@pytest.mark.parametrize("rows", [1, 16])
def test_compiled_for_hopper_one_kernel_reads_integers(rows):
    arrays = {"q": S((28672, 4096), jnp.int4), "scales": S((28672, 32), jnp.bfloat16)}
    weight = PackedWeight(arrays, IntegerFormat(Grid(4, 128)), (4096,), (28672,))
    compiled, tile = compile_product(S((rows, 4096), jnp.bfloat16), weight)
    assert tile == FragmentTile(1, 2)
    assert compiled.memory_analysis().temp_size_in_bytes <= 2 * 4096 * rows + 1024


def compile_product(x, weight):
    with lowering_platform("cuda"):
        compiled = compile_for_hopper(packed_matmul, x, weight)
    assert compiled.as_text().count('custom_call_target="triton_kernel_call_ffi"') == 1
    return compiled, triton.fragment_tile(PackedMatmulRequest(x, weight, x.dtype, Target("cuda", (9, 0))))


@pytest.mark.parametrize(
    ("outputs", "inputs", "group", "rows", "tile"),
    [
        (28672, 4096, 128, 1, FragmentTile(1, 2)),
        (57344, 8192, 128, 16, FragmentTile(1, 2)),  # as many outputs keep a GPU busy
        (4096, 14336, 128, 1, None),  # a tile of the other kernel was measured
        (1024, 4096, 128, 1, None),
        (57344, 8192, 64, 1, None),
        (57344, 8192, 128, 17, None),
    ],
)
def test_integers_with_many_outputs_are_read_as_fragments(outputs, inputs, group, rows, tile):
    arrays = {"q": S((outputs, inputs), jnp.int4), "scales": S((outputs, inputs // group), jnp.bfloat16)}
    weight = PackedWeight(arrays, IntegerFormat(Grid(4, group)), (inputs,), (outputs,))
    x = S((rows, inputs), jnp.bfloat16)
    assert triton.fragment_tile(PackedMatmulRequest(x, weight, x.dtype, Target("cuda", (9, 0)))) == tile


@pytest.mark.parametrize("shape", [(4096, 14336), (16, 256), (128256, 2048), (48, 5120)])
def test_tiles_of_any_shape_fit(shape):
    weight = PackedWeight(
        {"values": S((shape[0], shape[1] // 2), ml_dtypes.bfloat16), "kept": S((shape[0], shape[1] // 4), jnp.uint4)},
        TwoOfFourFormat(),
        shape[1:],
        shape[:1],
    )
    plan = fragments.make_plan(
        PackedMatmulRequest(S((1, shape[1]), jnp.bfloat16), weight, jnp.bfloat16, Target("cuda", (9, 0)))
    )
    assert fragments.tile_problem(plan) is None and plan.steps >= 1


if __name__ == "__main__":
    let_numpy_index()
    let_assembly_run()
    for case in sys.argv[1:]:
        interpret(case)
