"""What XLA makes of a decoding step for H200s: weights and caches are read where they lie."""

import dataclasses
import functools
import re
import types
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxstack.checkpoint.compressed import named_leaves
from jaxstack.compress.matrix import MatrixLayout, layer_kernels
from jaxstack.decoding.decode import has_many
from jaxstack.decoding.rows import Column
from jaxstack.decoding.step import Programs, StepVariant
from jaxstack.decoding.step_shapes import ChunkShape
from jaxstack.distributed.xla_options import is_supported
from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.layer import CacheRoom
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import AxisRules, StepLayout, make_rules
from jaxstack.parallel.packed_weights import packed_specs
from jaxstack.parameter_paths import nest
from pallas_kernels import Grid, PackedWeight, lowering_platform
from pallas_kernels.weight_only.api import many_row_options
from pallas_kernels.weight_only.float8_products import MOST_EXACT_ROWS
from pallas_kernels.weight_only.formats import Format, IntegerFormat, RoundedInputFloat8Format, integer_dtype
from pallas_kernels.weight_only.xla import COMPILER_OPTIONS
from tests.hopper import compile_for_hopper, hopper_array, hopper_mesh
from tests.pallas_kernels.triton_interpreter import needs_triton

BATCH = 16
ROOM = 512
PAGE = 16
SPLITS = "xla_gpu_experimental_force_split_k"


SHAPE = {
    "vocab_size": 4096, "hidden_size": 1024, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "scan_layers": False,
}  # fmt: skip
WINDOWS = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 256}
ONE_DEVICE = {"pipeline": 1, "data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}


def compiled_steps(
    rules: AxisRules,
    steps: int = 1,
    batch: int = BATCH,
    changes: Mapping[str, Any] = WINDOWS,
    joined: bool = False,
    options: dict[str, Any] | None = None,
    sums: Literal["auto", "never"] = "never",
    packed: Format | None = None,
    room: int = ROOM,
    prompts: ChunkShape | None = None,
) -> str:
    """The program of a few steps of a model in bfloat16, unrolled unless `changes` say otherwise.

    With `packed` the kernels of dense layers have this format, and the options are those of `ModelOnMesh.options`. With
    `prompts` it is one step with chunks of prompts, up to the logits. A sequence has `room` tokens at most.
    """
    config = ModelConfig(**{**SHAPE, **changes})

    def make(rngs: nnx.Rngs) -> Transformer:
        model = Transformer(config, rngs, dtype=jnp.bfloat16)
        for block in model.decoder.layers if joined else ():
            parts = rules.mesh.shape["tensor"]
            assert block.attention.join_projections(parts) and block.mlp.join_projections(parts)
        return model

    module = ModuleArrays(make)

    def place(x: jax.ShapeDtypeStruct, spec: jax.P) -> jax.ShapeDtypeStruct:
        return hopper_array(x.shape, jnp.bfloat16 if x.ndim > 1 else x.dtype, rules.mesh, spec)

    params = jax.tree.map(place, module.abstract_params, module.parameter_specs(rules))
    if packed is not None:
        kernels = layer_kernels(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
        specs = named_leaves(module.parameter_specs(rules))
        weights = {path: packed_weight(layout, packed, rules, specs[path]) for path, layout in kernels.items()}
        params = nest({**named_leaves(params), **weights}.items())
        with lowering_platform("cuda"):
            several = rules.mesh.size > 1
            more = many_row_options([*weights.values()], jnp.bfloat16, partitioned=several) if has_many(batch) else {}
        options = {**COMPILER_OPTIONS, **more}
    programs = Programs.__new__(Programs)  # the constructor makes arrays, of which there are none here
    programs.model = types.SimpleNamespace(module=module, rules=rules, layout=StepLayout(peer_sums=sums))
    programs.slots = batch
    programs.vocab_size = None
    programs.keeps_states = False
    cache = CacheRoom(batch, room, batch * room // PAGE, PAGE)
    pages = jax.eval_shape(lambda: module.merge(params, {}).make_shared_cache(cache))
    pages = jax.tree.map(
        lambda x: hopper_array(x.shape, x.dtype, rules.mesh, jax.P(*[None] * (x.ndim - 2), "tensor")), pages
    )
    columns = Column.PAGES + room // PAGE
    rows = hopper_array((batch, columns), jnp.int32, rules.mesh)
    last = hopper_array((batch,), jnp.int32, rules.mesh)
    program = functools.partial(programs._decode_steps, most=steps, steps=steps, mode="greedy", variant=StepVariant())
    arguments: tuple[Any, ...] = (params, {}, last, rows, pages)
    if prompts is not None:
        chunks = tuple(hopper_array((prompts.rows, n), jnp.int32, rules.mesh) for n in (columns, prompts.width))
        program = functools.partial(programs._forward_step, variant=StepVariant())
        arguments = (params, {}, last, rows, None, None, chunks, pages)
    with lowering_platform("cuda"), jax.set_mesh(rules.mesh):
        jitted = jax.jit(program, donate_argnums=len(arguments) - 1)
        return compile_for_hopper(jitted, *arguments, mesh=rules.mesh, options=options).as_text()


def packed_weight(layout: MatrixLayout, format: Format, rules: AxisRules, spec: jax.P) -> PackedWeight:
    """A packed weight without values, sharded as the plain one would be."""
    outputs, inputs = layout.size
    grid = format.grid if isinstance(format, IntegerFormat) else Grid(8)
    dtype = integer_dtype(grid.bits) if isinstance(format, IntegerFormat) else jnp.float8_e4m3fn
    shapes: Any = {
        "q": jax.ShapeDtypeStruct((outputs, inputs), dtype),
        "scales": jax.ShapeDtypeStruct((outputs, grid.groups(inputs)), jnp.bfloat16),
    }
    weight = PackedWeight(shapes, format, *layout.dims)
    specs = packed_specs(weight, spec, rules.mesh)
    arrays: Any = {name: hopper_array(x.shape, x.dtype, rules.mesh, specs[name]) for name, x in shapes.items()}
    return dataclasses.replace(weight, arrays=arrays)


def main_loop(program: str) -> str:
    """The computation of a program's loop over steps, or over stacked layers."""
    return max(program.split("\n\n"), key=lambda text: text.count("gemm_fusion") * ("ENTRY" not in text))


def launches(computation: str) -> list[str]:
    """The opcodes of a computation's operations that are launched."""
    return re.findall(r" = .* (fusion|custom-call|copy)\(", computation)


@needs_triton
@pytest.mark.exhaustive
def test_eight_steps_are_one_loop_whose_attention_reads_what_is_filled():
    """Two rows: no product of a matrix and a row is written to memory."""
    program = compiled_steps(make_rules(hopper_mesh(ONE_DEVICE)), steps=8, batch=2)
    assert program.count(" while(") == program.count('"known_trip_count":{"n":"8"}') == 1
    assert program.count('custom_call_target="triton_kernel_call_ffi"') == 4, "ranges and their sum in each layer"
    loop = main_loop(program)
    assert len(launches(loop)) <= 45, launches(loop)
    made = re.findall(r"= bf16\[64,16,4,128\]\S* ([\w-]+)\(", loop)
    assert not {"copy", "transpose", "concatenate"} & set(made), made


@needs_triton
@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", [2, MOST_EXACT_ROWS, 2 * MOST_EXACT_ROWS])
def test_fp8_weights_are_read_as_stored(batch):
    """By the Triton kernel, or with many rows by cuBLASLt's FP8 matmul; no copy of a weight is written.

    With many rows another kernel rounds the hidden values of a layer, which no fusion of XLA writes.
    """
    rules = make_rules(hopper_mesh(ONE_DEVICE))
    changes = {"intermediate_size": 2048}
    program = compiled_steps(rules, batch=batch, changes=changes, joined=True, packed=RoundedInputFloat8Format())
    in_fp8 = 8 if has_many(batch) else 0
    assert program.count('custom_call_target="__cublas$lt$matmul$f8"') == in_fp8
    calls = [line for line in program.splitlines() if 'custom_call_target="triton_kernel_call_ffi"' in line]
    assert sum("f8e4m3fn[" in line for line in calls) == 8 - in_fp8 + 2 * has_many(batch)
    hidden = re.findall(rf" = .*\[(?:1,)?{batch},(?:1,)?2048\].* fusion\(.*/mlp/", program)
    assert bool(hidden) == (not has_many(batch))
    sizes = r"(2048|1024|4096),(1024|2048)"  # [out, in] of the four matrices of a layer
    assert not re.findall(rf"= (?:bf16|f32)\[{sizes}\]\S* (?!parameter|bitcast)[\w-]+\(", program)


@needs_triton
@pytest.mark.exhaustive
@pytest.mark.parametrize("format", [IntegerFormat(Grid(4, 128)), RoundedInputFloat8Format()], ids=["int4", "fp8"])
def test_under_tensor_parallelism_the_kernel_reads_the_part_of_each_device(format):
    """Half of the outputs of joined projections, or half of the inputs; and no device gets the part of another."""
    rules = make_rules(hopper_mesh({**ONE_DEVICE, "tensor": 2}))
    program = compiled_steps(rules, changes={"intermediate_size": 2048}, joined=True, packed=format)
    calls = [line for line in program.splitlines() if 'custom_call_target="triton_kernel_call_ffi"' in line]
    stored = (r"s8\[%d,%d(?:,1)?\]", 2) if isinstance(format, IntegerFormat) else (r"f8e4m3fn\[%d,%d\]", 1)
    for outputs, inputs in ((1024, 1024), (1024, 512), (2048, 1024)):
        found = sum(bool(re.search(stored[0] % (outputs, inputs // stored[1]), line)) for line in calls)
        assert found == 2 + 2 * ((outputs, inputs) == (1024, 1024)), (outputs, inputs, calls)
    sent = re.findall(r"= (.*) (?:all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", program)
    assert all(f"f32[{BATCH},2]" in shapes for shapes in sent), "of logits, the largest of each device"
    assert len(re.findall(r" all-reduce(?:-start)?\(", program)) == 5, "as with plain weights"
    assert not re.findall(r"= (?:bf16|f32)\[(?:1024|2048),(?:1024|512)\]\S* (?!parameter|bitcast)[\w-]+\(", program)


@needs_triton
@pytest.mark.exhaustive
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_step_with_prompts_has_no_branch_that_the_host_waits_for(tensor):
    """One kernel a layer copies the prompt's tokens, whatever the width of the page table, and one attends to them."""
    rules = make_rules(hopper_mesh({**ONE_DEVICE, "tensor": tensor}))
    changes = {"intermediate_size": 2048}
    program = compiled_steps(
        rules, batch=8, changes=changes, joined=True, room=8192, prompts=ChunkShape(1, 64), sums="auto"
    )
    assert not re.findall(r" (?:conditional|while)\(", program)
    copies = re.findall(r"= \(bf16\[1,8192,\d,128\]\S*, bf16\[1,8192,\d,128\]\S*\) custom-call", program)
    assert len(copies) == 2
    assert program.count('custom_call_target="mosaic_gpu_v2"') == 2 + 5 * (tensor == 2)


@needs_triton
@pytest.mark.exhaustive
def test_layers_of_chunks_read_their_pages_in_place():
    chunks = {"layer_types": ("chunked_attention", "full_attention_no_rope"), "attention_chunk_size": 128}
    program = compiled_steps(make_rules(hopper_mesh(ONE_DEVICE)), batch=2, changes=chunks)
    assert program.count('custom_call_target="triton_kernel_call_ffi"') == 4, "as in layers that see every key"


@needs_triton
@pytest.mark.exhaustive
def test_a_layer_with_joined_projections_launches_ten_kernels():
    """What several layers share, such as rotations and slots of the tokens, is computed once in a step.

    The kernels: a norm, the joined projection, the update of the cache, attention to ranges of the keys, their sum, the
    output projection; a norm, the joined matmul, the activation, the matmul down. Without an autotuner XLA splits
    matmuls into parts whose sums are further kernels; an option keeps them whole.
    """
    if not is_supported(SPLITS, 1):
        pytest.skip(f"needs a jaxlib with the option {SPLITS}")
    rules = make_rules(hopper_mesh(ONE_DEVICE))
    found = []
    for layers in (2, 3):
        program = compiled_steps(rules, 8, 2, {"num_layers": layers}, joined=True, options={SPLITS: 1})
        loop = main_loop(program)
        assert loop.count('custom_call_target="triton_kernel_call_ffi"') == 3 * layers
        assert loop.count("output_to_operand_aliasing={{1}: (4, {}), {2}: (5, {})}") == layers
        made = re.findall(r"= bf16\[64,16,4,128\]\S* ([\w-]+)\(", program)
        assert set(made) <= {"parameter", "get-tuple-element", "bitcast"}, made
        found.append(len(launches(loop)))
    assert found[1] - found[0] == 10 and found[0] <= 35, found


@needs_triton
@pytest.mark.exhaustive
def test_the_update_of_a_stacked_layers_cache_is_one_call_in_place():
    """XLA must not merge it with the slices of the stack (see `pallas_kernels.kv_cache_update.triton`)."""
    changes = {"num_layers": 4, "scan_layers": True}
    program = compiled_steps(make_rules(hopper_mesh(ONE_DEVICE)), 8, 2, changes, joined=True)
    updates = [line for line in program.splitlines() if "output_to_operand_aliasing" in line]
    assert len(updates) == 1 and updates[0] in main_loop(program).splitlines()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("data", "tensor", "count"), [(1, 1, 0), (1, 2, 5), (2, 2, 7)])
def test_a_step_copies_no_cache_and_sends_one_sum_a_sublayer(data, tensor, count):
    """Where batches are divided, the devices also exchange the rows' queries, keys and values."""
    axes = {"pipeline": 1, "data": data, "fsdp": 1, "expert": 1, "context": 1, "tensor": tensor}
    program = compiled_steps(make_rules(hopper_mesh(axes)))
    shape = re.escape(f"bf16[{BATCH * ROOM // PAGE * PAGE},{4 // tensor},128]")
    made = re.findall(rf"= {shape}\S* ([\w-]+)\(", program)
    assert "scatter" in made and not {"copy", "transpose", "all-gather", "concatenate"} & set(made), made
    sums = re.findall(r"all-reduce(?:-start)?\(", program)
    others = re.findall(r"(?:reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", program)
    # The embedding's rows, then one after attention and one after the MLP of each layer.
    assert (len(sums), others) == (count, [])


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")
@pytest.mark.parametrize("packed", [None, pytest.param(IntegerFormat(Grid(4, 128)), marks=needs_triton)], ids=str)
def test_the_sums_of_a_step_are_kernels_which_end_no_cuda_graph(packed):
    """XLA cannot record its own all-reduces in a graph, nor, by default, those of NCCL."""
    axes = {"pipeline": 1, "data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2}
    changes = {**WINDOWS, "intermediate_size": 2048}
    program = compiled_steps(make_rules(hopper_mesh(axes)), changes=changes, joined=True, sums="auto", packed=packed)
    # The embedding's rows, then one after attention and one after the MLP of each layer.
    assert program.count('custom_call_target="mosaic_gpu_v2"') == 5
    # One kernel a layer rotates the device's heads and writes their keys and values to its part of the cache.
    assert program.count("output_to_operand_aliasing={{1}: (4, {}), {2}: (5, {})}") == 2
    assert not re.findall(r" (all-reduce|collective-permute|reduce-scatter|all-to-all)(?:-start)?\(", program)
