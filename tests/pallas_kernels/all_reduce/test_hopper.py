"""The kernel compiled for absent H200s: registers, the width of its loads, and what XLA makes of the calls."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import all_reduce, all_reduce_rms_norm, lowering_platform
from tests.hopper import compile_for_hopper, hopper_array, hopper_mesh

pytestmark = [
    pytest.mark.compiles_for_gpu,
    pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="our Hopper kernels need jax 0.11"),
]


@pytest.mark.parametrize(("devices", "rows", "width"), [(2, 256, 4096), (8, 512, 8192)])
def test_vectors_are_read_from_other_devices_without_spills(devices, rows, width, monkeypatch, capfd):
    """With eight devices the sum takes two shots, which also write to the others."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    mesh = hopper_mesh({"data": 1, "tensor": devices})

    def local(parts, residual, weight):
        out = all_reduce(parts[0], axis_name="tensor", implementation="mosaic")
        return out, all_reduce_rms_norm(parts[0], residual, weight, axis_name="tensor", implementation="mosaic")

    specs = P("tensor"), P(), P()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), axis_names={"tensor"}, check_vma=False)
    arrays = (
        hopper_array((devices, rows, width), jnp.bfloat16, mesh, P("tensor")),
        hopper_array((rows, width), jnp.bfloat16, mesh),
        hopper_array((width,), jnp.float32, mesh),
    )
    with lowering_platform("cuda"):
        text = compile_for_hopper(mapped, *arrays, mesh=mesh).as_text()
    output = "".join(capfd.readouterr())
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 2 and "all-reduce" not in text
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", output)
    assert spills and set(spills) == {("0", "0")}
    narrow = re.findall(r"\b(?:ld|st)(?:\.global)?\.[bu]16\s", output)
    assert not narrow and re.search(r"\bld\.v4\.b32\s", output)
    assert "multimem" not in output
