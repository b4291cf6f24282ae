"""Exports: bit-equal to what was imported, in files of a bounded size, never over something that is there."""

import json
import math
import re
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.models import ModelConfig, Transformer, from_huggingface, to_huggingface
from jaxstack.models.huggingface import files, load
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import ParallelConfig, make_mesh
from tests.marks import longer

HERE = Path(__file__).parent
FAMILIES = sorted(path.parent.name for path in HERE.glob("*/config.json"))
USUAL = ("deepseek-v3", "gpt-oss", "gpt2", "llama", "mixtral", "qwen3-5-moe")
"""Families with different parts, which the default command tests."""


def assert_equal_files(found: Path, expected: Path) -> None:
    ours: dict[str, np.ndarray] = {}
    for path in found.glob("*.safetensors"):
        ours |= load_file(path)
    theirs = {
        re.sub(r"^language_model\.", "", name): tensor  # the text model of a multimodal one
        for name, tensor in load_file(expected / "model.safetensors").items()
        if not name.startswith(("vision_tower.", "multi_modal_projector."))
    }
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].tobytes() == tensor.tobytes(), name


@pytest.mark.parametrize("name", [*USUAL, *longer(*(name for name in FAMILIES if name not in USUAL))])
def test_there_and_back_is_bit_equal(name, tmp_path):
    said = json.loads((HERE / name / "config.json").read_text())
    kind = to_huggingface(from_huggingface(HERE / name), tmp_path, family=said["model_type"], dtype="bfloat16")
    assert_equal_files(tmp_path, HERE / name)
    assert kind == json.loads((tmp_path / "config.json").read_text())["model_type"]
    assert kind == said.get("text_config", said)["model_type"]


def test_sharded_parameters_go_into_several_files_with_an_index(tmp_path):
    model = from_huggingface(HERE / "llama-biases", mesh=make_mesh(ParallelConfig(fsdp=4, tensor=2)))
    params, _ = ModuleArrays(lambda rngs: Transformer(model.config, rngs)).split(model)
    to_huggingface(params, tmp_path, config=model.config, dtype="bfloat16", max_shard_bytes=12_000)
    assert_equal_files(tmp_path, HERE / "llama-biases")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    written = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(written) > 2 and sorted(set(index["weight_map"].values())) == written
    assert all(path.stat().st_size < 12_000 + 4_000 for path in tmp_path.glob("*.safetensors"))
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for t in load_file(HERE / "llama-biases/model.safetensors").values()
    )
    again = from_huggingface(tmp_path)
    np.testing.assert_array_equal(again.head[...], np.asarray(model.head[...]))


def test_nothing_is_written_over_and_nothing_is_left_of_a_failure(tmp_path, monkeypatch):
    model = from_huggingface(HERE / "llama")
    to_huggingface(model, tmp_path / "a")
    with pytest.raises(ConfigError, match="already holds a checkpoint"):
        to_huggingface(model, tmp_path / "a")

    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", fail)
    with pytest.raises(JaxstackError, match="No space left"):
        to_huggingface(model, tmp_path / "b")
    assert list((tmp_path / "b").iterdir()) == []


def test_what_the_dtype_cannot_hold_is_refused(tmp_path):
    model = from_huggingface(HERE / "llama")
    model.final_norm.scale[...] = jnp.full(32, 1e5)
    with pytest.raises(ConfigError, match=r"model.norm.weight has values up to 1e\+05"):
        to_huggingface(model, tmp_path, dtype="float16")
    with pytest.raises(ConfigError, match="did you mean 'float16'"):
        to_huggingface(model, tmp_path, dtype="float15")


def test_a_fresh_model_comes_back_in_float32(tmp_path):
    config = ModelConfig(vocab_size=64, hidden_size=32, num_layers=3, qkv_bias=True, layer_types=("full_attention",))
    model = Transformer(config, nnx.Rngs(0))
    assert to_huggingface(model, tmp_path) == "qwen2"
    again = from_huggingface(tmp_path)
    for (path, ours), (_, theirs) in zip(
        nnx.to_flat_state(nnx.state(model, nnx.Param)), nnx.to_flat_state(nnx.state(again, nnx.Param)), strict=True
    ):
        np.testing.assert_array_equal(ours.get_value(), theirs.get_value(), err_msg=str(path))


class Transfers(load.Transfers):
    """Transfers that note the bytes of each array."""

    def __init__(self, most_bytes, noted):
        super().__init__(most_bytes)
        assert most_bytes == load._CHUNK_BYTES
        self._noted = noted

    def add(self, array):
        self._noted.append(array.nbytes)
        return super().add(array)


class _NumPyThatIsCopied:
    """NumPy, whose empty arrays begin where the CPU backend takes no array as its own, but copies it as a GPU does.

    It takes those whose address is a multiple of 64. Which are so by chance would count as read, and not as placed.
    """

    def __getattr__(self, name):
        return getattr(np, name)

    def empty(self, shape, dtype):
        size = math.prod(shape)
        values = np.empty(size + 1, dtype)
        start = int(values.ctypes.data % 64 == 0)
        return values[start : start + size].reshape(shape)


def test_reading_needs_less_host_memory_than_two_files(tmp_path, monkeypatch):
    """Into shards of eight devices, whose memory (here host memory too) NumPy's allocations leave out."""
    config = ModelConfig(vocab_size=512, hidden_size=256, num_layers=12, num_heads=4, intermediate_size=1024)
    model = Transformer(config, nnx.Rngs(0))
    to_huggingface(model, tmp_path, dtype="float32", max_shard_bytes=8 * 2**20)
    largest = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    whole = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert whole > 5 * largest
    monkeypatch.setattr(load, "_CHUNK_BYTES", largest // 2)
    monkeypatch.setattr(load, "np", _NumPyThatIsCopied())
    bounded = []
    monkeypatch.setattr(load, "Transfers", lambda most: Transfers(most, bounded))
    mesh = make_mesh(ParallelConfig(fsdp=4, tensor=2))
    tracemalloc.start()
    found = from_huggingface(tmp_path, mesh=mesh)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest / 16 < peak < 2 * largest
    parameters = jax.tree.leaves(nnx.state(found, nnx.Param))
    assert sum(bounded) >= sum(x.nbytes for x in parameters), "all that is on its way is bounded"
    kernel = found.decoder.layers[0].mlp.up_proj.kernel[...]
    assert kernel.addressable_shards[0].data.size == kernel.size // 8
    np.testing.assert_array_equal(kernel, model.decoder.layers[0].mlp.up_proj.kernel[...])
