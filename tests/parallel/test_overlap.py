"""Tensor parallelism with overlap: trains as one device does, and compiled for H200s only our kernels move activations.

On simulated devices the workers run with XLA's collective operations.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.observe.collectives import collectives
from jaxstack.parallel import ParallelConfig, ShardingContext, StepLayout, make_mesh, make_rules
from jaxstack.parallel.overlap import gather_project, project_scatter
from pallas_kernels import lowering_platform, record_choices
from tests.hopper_steps import compile_step
from tests.parallel.test_layouts import assert_trains_as_one_device, layout
from tests.small_runs import small_config

ALWAYS = "parallel.overlap=always"
BIASED = ("model.qkv_bias=true", "model.output_bias=true", "model.mlp_bias=true", "model.mlp=plain")
THREE = ("model.num_heads=6", "model.num_kv_heads=3", "model.head_dim=6", "train.sequence_length=12")
FEW_KV_HEADS = ("model.num_kv_heads=1",)
WORKERS = {"tensor_parallel_input", "tensor_parallel_output", "tensor_parallel_mlp"}


def overlapped(choices):
    return {choice.operation for choice in choices if choice.backend == "overlapped"}


@pytest.mark.parametrize(
    ("overrides", "shape", "workers"),
    [
        (layout(2, 1, 2, True), BIASED, WORKERS),
        pytest.param(layout(1, 1, 4, True), (), WORKERS, marks=pytest.mark.exhaustive),
        pytest.param(layout(2, 1, 3, True), THREE, WORKERS, marks=pytest.mark.exhaustive),
        pytest.param(
            (*layout(1, 2, 2, True), "train.gradient_accumulation=2"), (), WORKERS, marks=pytest.mark.exhaustive
        ),
        pytest.param(
            layout(2, 2, 2, True), FEW_KV_HEADS, WORKERS - {"tensor_parallel_input"}, marks=pytest.mark.exhaustive
        ),
    ],
    ids=lambda value: " ".join(sorted(value)),
)
def test_trains_as_one_device(overrides, shape, workers):
    with record_choices() as choices:
        assert_trains_as_one_device(*overrides, ALWAYS, shape=shape)
    assert overlapped(choices) == workers


# --- one call ------------------------------------------------------------------------------------------------------


def rules(data=2, tensor=2, sequence=True, overlap="always", pipeline=1):
    degrees = ParallelConfig(data=data, tensor=tensor, pipeline=pipeline)
    mesh = make_mesh(degrees, jax.devices()[: data * tensor * pipeline])
    return ShardingContext(make_rules(mesh, sequence=sequence), StepLayout(overlap=overlap))


def normal(*shape):
    return jax.random.normal(jax.random.key(len(shape)), shape)


def both(layout, x, kernels, last):
    """The sums of the outputs and their gradients, and the choices made."""

    def total(x, kernels, last):
        with layout.entered():
            parts = gather_project(x, kernels)
            assert parts is not None
            out = project_scatter(parts[0], last)
        assert out is not None
        return (out**2).sum() + sum((part**3).sum() for part in parts)

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(x, kernels, last)


def test_heads_and_rows_keep_their_order():
    """Two sequences a device: the kernels' order of rows is not that of the arrays."""
    x = normal(4, 6, 8)
    kernels = [normal(8, 4, 3), normal(8, 2, 3) / 2]
    last = normal(4, 3, 8)

    def plain(x, kernels, last):
        parts = [jnp.einsum("btd,dnh->btnh", x, kernel, precision="highest") for kernel in kernels]
        out = jnp.einsum("btnh,nhd->btd", parts[0], last, precision="highest")
        return (out**2).sum() + sum((part**3).sum() for part in parts)

    wanted = jax.jit(jax.value_and_grad(plain, argnums=(0, 1, 2)))(x, kernels, last)
    got = both(rules(), x, kernels, last)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3), got, wanted)


def answer(layout, length=8, heads=4, unsuitable=None, platform="cpu", **manual):
    """Whether `gather_project` computes it, and the choice recorded."""

    def run(x, kernel):
        with layout.within(manual.get("manual", ())).entered():
            return gather_project(x, [kernel], unsuitable)

    x = jax.ShapeDtypeStruct((4, length, 8), jnp.bfloat16)
    with lowering_platform(platform), record_choices() as choices:
        out = jax.eval_shape(run, x, jax.ShapeDtypeStruct((8, heads, 2), jnp.bfloat16))
    reasons = [reason for choice in choices for _, reason in choice.refused if choice.operation in WORKERS]
    return out is not None, reasons[0] if reasons else None


def test_where_it_falls_back_and_what_is_recorded():
    assert answer(rules()) == (True, None)
    assert answer(rules(sequence=False)) == (False, None), "nothing lies split along the sequence"
    assert answer(rules(tensor=1)) == (False, None)
    assert answer(rules(overlap="never")) == (False, None)
    for found, words in [
        (answer(rules(), heads=3), "must divide the length and what the kernels split, here 8 and 3"),
        (answer(rules(), length=7), "here 7 and 4"),
        (answer(rules(), unsuitable="a recipe"), "a recipe"),
        (answer(rules(pipeline=2)), "the stages of a pipeline do not"),
        (answer(rules(), manual=["data"]), "within jax.set_mesh"),
        (answer(rules(overlap="auto")), "Hopper" if jax.__version_info__ >= (0, 11) else "needs jax 0.11"),
    ]:
        assert not found[0] and words in found[1]


# --- compiled for H200s --------------------------------------------------------------------------------------------

SHAPE = (
    "model.num_layers=1", "model.hidden_size=1024", "model.num_heads=8", "model.num_kv_heads=4", "model.head_dim=128",
    "model.intermediate_size=2048", "model.vocab_size=4096", "train.sequence_length=8192",
    "train.global_batch_size=8", "model.remat=full", "parallel.sequence=true",
)  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11")
@pytest.mark.parametrize("degrees", [("parallel.tensor=4",), ("parallel.fsdp=2", "parallel.tensor=2")], ids=str)
def test_compiled_for_h200s_only_our_kernels_move_a_layers_activations(degrees):
    trainer, program = compile_step(small_config(*SHAPE, *degrees))
    text = program.as_text()
    axes = dict(trainer.rules.mesh.shape)
    assert overlapped(trainer.choices) == WORKERS
    inner = [choice for choice in trainer.choices if choice.operation in ("all_gather_matmul", "matmul_reduce_scatter")]
    assert {choice.backend for choice in inner} == {"mosaic"}
    devices = set(re.findall(r'xla_replica_ids = "([\d,]*)"', text))
    assert devices == {"0,1,2,3"}, "the kernels know whose memory they write to"
    # Forward 4, of which the remat repeats the first three, and 4 backward.
    assert text.count("xla_replica_ids") == 4 + 3 + 4
    stream = 2 * 8 * 8192 * 1024 // axes["fsdp"]
    moved = [row for row in collectives(text, axes) if row.axes == ("tensor",) and row.payload_bytes == stream]
    # What remains: the embedding's sum, the head's input, and their gradients.
    assert sum(row.calls for row in moved) <= 4


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="several processes need jax 0.11.2")
@pytest.mark.parametrize("degrees", [("parallel.tensor=2",), ("parallel.fsdp=2", "parallel.tensor=2")], ids=str)
def test_compiled_for_a_process_per_gpu_all_arrays_of_the_kernels_are_in_shared_memory(degrees):
    devices = 2 ** len(degrees)
    trainer, program = compile_step(small_config(*SHAPE, *degrees), processes=devices)
    assert overlapped(trainer.choices) == WORKERS
    kernels = [line for line in program.as_text().splitlines() if "xla_replica_ids" in line]
    assert len(kernels) == 4 + 3 + 4
    for kernel in kernels:
        (arguments,) = re.findall(r'symmetric_memory_parameters = "([\d,]*)"', kernel)
        assert set(arguments) == {"1", ","}
        results = kernel.partition(" custom-call(")[0]
        assert results.count("S(1)") == len(re.findall(r"(?:bf16|s32)\[", results))
