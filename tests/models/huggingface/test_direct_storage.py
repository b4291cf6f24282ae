"""Weights read straight onto the device are those read through host memory; without the hardware one line says why."""

import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxstack.models import Transformer
from jaxstack.models.huggingface import direct_storage, load
from jaxstack.models.huggingface.direct_storage import DirectTensor, why_unavailable
from jaxstack.models.huggingface.families import read_model_config
from jaxstack.models.huggingface.file_tensor import file_tensors
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules

HERE = Path(__file__).parent


class Reader:
    """Reads bytes as kvikio does, but on a CPU; counts them."""

    def __init__(self):
        self.bytes = 0

    def __call__(self, path, offset, count, device):
        self.bytes += count
        return jax.device_put(np.fromfile(path, np.uint8, count, offset=offset), device)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_slices_are_those_of_the_file(tmp_path, dtype):
    whole = np.arange(60).reshape(5, 4, 3).astype(jnp.dtype(dtype))
    save_file({"before": np.ones(7, np.float32), "x": whole}, tmp_path / "x.safetensors")
    read = Reader()
    tensor = DirectTensor(file_tensors(tmp_path / "x.safetensors")["x"], jax.devices()[1], read)
    found = tensor[1:3, 1:4, 0:2]
    assert found.devices() == {jax.devices()[1]} and found.dtype == whole.dtype
    np.testing.assert_array_equal(found, whole[1:3, 1:4, :2])
    assert read.bytes == 2 * 12 * whole.dtype.itemsize, "the rows alone"


def parameters(name, degrees, **options):
    config = read_model_config(HERE / name)
    rules = make_rules(make_mesh(ParallelConfig(**degrees)))
    specs = ModuleArrays(lambda rngs: Transformer(config, rngs)).parameter_specs(rules)
    return load.read_parameters(HERE / name, config, jax.tree.map(rules.sharding, specs), **options)


@pytest.mark.parametrize(
    ("name", "degrees"), [("gpt2", {"fsdp": 2, "data": 4}), ("qwen3-moe", {"expert": 4, "fsdp": 2})], ids=str
)
def test_a_sharded_model_is_that_of_the_usual_way(name, degrees, monkeypatch):
    plain = parameters(name, degrees)
    read = Reader()
    said = []
    monkeypatch.setattr(load, "why_unavailable", lambda: None)
    monkeypatch.setattr(load, "read_by_kvikio", read)
    direct = parameters(name, degrees, direct_storage=True, report=said.append)
    assert said == ["weights are read by GPUDirect Storage"] and read.bytes > 0
    for (path, found), wanted in zip(jax.tree.leaves_with_path(direct), jax.tree.leaves(plain), strict=True):
        assert found.sharding == wanted.sharding and found.dtype == wanted.dtype, path
        np.testing.assert_array_equal(found, wanted, err_msg=str(path))


def test_without_the_hardware_one_line_says_why():
    said = []
    parameters("gpt2", {"data": 8}, direct_storage=True, report=said.append)
    assert said == ["GPUDirect Storage is not used, weights are read through host memory: JAX runs on cpu"]


def test_each_thing_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(direct_storage, "DRIVER", tmp_path / "nvidia-fs")
    assert why_unavailable() == "the kernel module nvidia-fs is not loaded"
    (tmp_path / "nvidia-fs").mkdir()
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "pip install kvikio-cu13" in (why_unavailable() or "")
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    for available, reason in ((False, "cuFile finds no storage that supports it"), (True, None)):
        driver = SimpleNamespace(get=lambda name, said=available: said)
        monkeypatch.setitem(sys.modules, "kvikio.cufile_driver", driver)
        monkeypatch.setitem(sys.modules, "kvikio", SimpleNamespace(cufile_driver=driver))
        assert why_unavailable() == reason
