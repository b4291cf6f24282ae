"""The kernels compiled for absent H200s: registers, shared memory, and what XLA makes of the calls."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import all_gather_matmul, lowering_platform, matmul_reduce_scatter
from tests.hopper import compile_for_hopper, hopper_array, hopper_mesh

pytestmark = [
    pytest.mark.compiles_for_gpu,
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11"),
]
UP = P(None, "tensor")
DOWN = P("tensor", None)
KERNEL = 'custom_call_target="mosaic_gpu_v2"'


def mlp(implementation):
    def local(x, gate, up, down):
        gate, up = all_gather_matmul(x, (gate, up), axis_name="tensor", implementation=implementation)
        return matmul_reduce_scatter(gate * up, down, axis_name="tensor", implementation=implementation)

    return local


@pytest.fixture(scope="module")
def arrays():
    mesh = hopper_mesh({"tensor": 4})
    shapes = ((16384, 4096), DOWN), ((4096, 14336), UP), ((4096, 14336), UP), ((14336, 4096), DOWN)
    return mesh, [hopper_array(shape, jnp.bfloat16, mesh, spec) for shape, spec in shapes]


def compiled(arrays, implementation):
    mesh, arguments = arrays
    specs = DOWN, UP, UP, DOWN
    mapped = jax.shard_map(mlp(implementation), mesh=mesh, in_specs=specs, out_specs=DOWN, check_vma=False)

    def loss(*arguments):
        return (mapped(*arguments).astype(jnp.float32) ** 2).mean()

    with lowering_platform("cuda"):
        return compile_for_hopper(jax.grad(loss, argnums=(0, 1, 2, 3)), *arguments, mesh=mesh).as_text()


def test_two_kernels_forward_two_backward_no_spills_no_other_collective(arrays, monkeypatch, capfd):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    text = compiled(arrays, "mosaic")
    output = "".join(capfd.readouterr())
    assert text.count(KERNEL) == 4
    assert not re.findall(r"(all-gather|reduce-scatter|collective-permute)(-start)?\(", text)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", output)
    assert spills and set(spills) == {("0", "0")}
    assert "serialized" not in output  # ptxas warns where products of the tensor cores wait for each other
    assert "wgmma.mma_async" in output and "multimem" not in output


def test_the_serialised_form_gathers_and_scatters_in_bfloat16(arrays):
    text = compiled(arrays, "xla")
    assert KERNEL not in text
    moved = re.findall(r"= (\S+?)\[[\d,]*\]\S* (all-gather|reduce-scatter)\(", text)
    assert moved and {dtype for dtype, _ in moved} == {"bf16"}
