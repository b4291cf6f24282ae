"""Checkpoints in the formats of compressed-tensors, against files and values that this library wrote.

scripts/make_compressed_tensors_fixtures.py makes them.
"""

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxstack.errors import ConfigError
from jaxstack.models import Transformer, from_huggingface
from jaxstack.models.huggingface.families import read_model_config
from jaxstack.models.huggingface.files import WeightFiles, read_json
from jaxstack.models.huggingface.load import read_parameters
from jaxstack.models.huggingface.quantization_config import (
    Scheme,
    is_quantized,
    make_quantization_config,
    read_quantization,
)
from jaxstack.models.huggingface.quantized_weights import (
    QuantizedTensor,
    open_quantized,
    pack_words,
    store,
    unpack_words,
)
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules
from pallas_kernels import Grid, PackedWeight
from pallas_kernels.weight_only.formats import Float8Format, IntegerFormat, RoundedInputFormat
from pallas_kernels.weight_only.packed import stack_packed

FIXTURES = Path(__file__).parent / "compressed_tensors"
KINDS = ("int4", "int4-zeros", "int8", "fp8")
Q_PROJ = "decoder/layers/1/attention/q_proj/kernel"


def load_packed(kind: str, **degrees: int) -> tuple[ModuleArrays, dict[str, Any], list[str]]:
    """A fixture's unrolled model, its parameters with packed weights, and the lines reported."""
    config = read_model_config(FIXTURES / kind).model_copy(update={"scan_layers": False})
    parallel = ParallelConfig(**degrees)
    rules = make_rules(make_mesh(parallel, jax.devices()[: int(np.prod(list(degrees.values()) or [1]))]))
    module = ModuleArrays(lambda rngs: Transformer(config, rngs))
    shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules))
    lines: list[str] = []
    params = read_parameters(FIXTURES / kind, config, shardings, packed=True, report=lines.append)
    return module, params, lines


def leaves(params: dict[str, Any]) -> dict[str, Any]:
    named = jax.tree_util.tree_leaves_with_path(params, is_leaf=lambda x: isinstance(x, PackedWeight))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in named}


@pytest.mark.parametrize("bits", range(1, 9))
def test_words_are_those_of_the_library(bits):
    arrays = load_file(FIXTURES / "packing.safetensors")
    values, rows, columns = (arrays[f"{name}{bits}"] for name in ("values", "rows", "columns"))
    np.testing.assert_array_equal(pack_words(values, bits), rows)
    np.testing.assert_array_equal(pack_words(np.ascontiguousarray(values.T), bits).T, columns)
    np.testing.assert_array_equal(unpack_words(rows, bits, values.shape[1]), values)
    np.testing.assert_array_equal(unpack_words(np.ascontiguousarray(columns.T), bits, values.shape[0]).T, values)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_library(kind):
    expected = json.loads((FIXTURES / kind / "dequantized.json").read_text())
    quantization = read_quantization(read_json(FIXTURES / kind / "config.json"))
    assert quantization is not None and len(expected) == 14
    files = WeightFiles(FIXTURES / kind)
    found = open_quantized(files, quantization)
    assert {f"{module}.weight" for module in expected} == found.keys()
    for module, digest in expected.items():
        tensor = found[f"{module}.weight"]
        whole = tensor[:]
        assert hashlib.sha256(whole.astype(jnp.bfloat16).tobytes()).hexdigest() == digest, module
        np.testing.assert_array_equal(tensor[3:9, 5:20], whole[3:9, 5:20])


@pytest.mark.quick
def test_packed_weights_hold_what_the_files_hold():
    _, params, lines = load_packed("int4")
    weight = leaves(params)[Q_PROJ]
    assert isinstance(weight, PackedWeight) and weight.format == IntegerFormat(Grid(4, 32))
    assert (weight.inputs, weight.outputs) == ((64,), (4, 16)) and weight.arrays["q"].dtype == jnp.int4
    scheme, tensors = store(weight, "pack-quantized")
    assert (scheme.bits, scheme.group_size, scheme.activations) == (4, 32, False)
    files = load_file(FIXTURES / "int4" / "model.safetensors")
    for part, tensor in tensors.items():
        expected = files[f"model.layers.1.self_attn.q_proj.{part}"]
        assert tensor.dtype == expected.dtype and tensor.tobytes() == expected.tobytes(), part
    assert not lines
    plain = from_huggingface(FIXTURES / "int4", report=lines.append)  # its layers are stacked
    kernel = plain.decoder.layers[0].attention.q_proj.kernel[1]  # type: ignore[union-attr]
    np.testing.assert_array_equal(kernel, weight.dense())
    assert lines == [f"{FIXTURES / 'int4'}: 14 of 14 quantized weights are read as plain float32 numbers"]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_dequantized_weights(kind):
    expected = load_file(FIXTURES / kind / "expected.safetensors")
    module, params, lines = load_packed(kind)
    packed = [leaf for leaf in leaves(params).values() if isinstance(leaf, PackedWeight)]
    assert len(packed) == 14
    wanted = {"int4": "integer", "int4-zeros": "integer", "int8": "integer_w8a8", "fp8": "float8_w8a8"}
    assert {weight.format.name for weight in packed} == {wanted[kind]}
    assert not any("are not rounded here" in line for line in lines)
    tokens = jnp.asarray(expected["tokens"])
    non_params = module.init(jax.random.key(0))[1]
    forward = jax.jit(lambda params, tokens: module.merge(params, non_params)(tokens))
    # FP8 inputs are rounded in products of more rows than those of one text.
    parts = [text[None] for text in tokens] if kind == "fp8" else [tokens]
    found = np.concatenate([forward(params, part) for part in parts])
    error = np.abs(found - expected["logits"])
    if kind == "int8":  # inputs are rounded too, which the expected logits are without
        assert 1e-3 < error.std() < 0.03 * expected["logits"].std()
    else:
        assert error.max() < 1e-4


@pytest.mark.exhaustive
def test_packed_weights_are_split_as_plain_ones():
    whole, split = (leaves(load_packed("int4-zeros", **degrees)[1]) for degrees in ({}, {"fsdp": 2, "tensor": 2}))
    for path, leaf in whole.items():
        np.testing.assert_array_equal(jax.tree.leaves(leaf)[0], jax.tree.leaves(split[path])[0])
    q = split[Q_PROJ].arrays["q"]
    assert {shard.data.shape for shard in q.addressable_shards} == {(32, 32)}


def written(folder: Path, **tensors: np.ndarray) -> WeightFiles:
    folder.mkdir(exist_ok=True)
    arrays = {f"m.{name}": np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(arrays, folder / "model.safetensors")
    return WeightFiles(folder)


RANDOM = np.random.default_rng(0)
Q = RANDOM.integers(-128, 128, (6, 8)).astype(np.int8)


def test_other_layouts_of_scales(tmp_path):
    scale = np.float32(RANDOM.random((6, 4)))
    whole = Scheme("int-quantized", 8, strategy="tensor")
    files = written(tmp_path / "tensor", weight=Q, weight_scale=scale[0, :1])
    tensor = QuantizedTensor(files, "m", whole)
    np.testing.assert_array_equal(tensor[:], Q * scale[0, 0])
    weight = tensor.pack((8,), (6,))
    assert weight is not None
    np.testing.assert_array_equal(weight.matrix(), Q * scale[0, 0])
    blocks = Scheme("float-quantized", 8, "float", strategy="block", block=(4, 4))
    q = Q.astype(jnp.float8_e4m3fn)
    files = written(tmp_path / "block", weight=q, weight_scale=scale[:2, :2])
    tensor = QuantizedTensor(files, "m", blocks)
    expected = q.astype(np.float32) * np.repeat(np.repeat(scale[:2, :2], 4, 0), 4, 1)[:6]
    np.testing.assert_array_equal(tensor[:], expected)
    np.testing.assert_array_equal(tensor[3:5, 2:7], expected[3:5, 2:7])
    weight = tensor.pack((8,), (6,))
    assert weight is not None
    np.testing.assert_array_equal(weight.matrix(), expected)


def test_groups_of_reordered_columns(tmp_path):
    """GPTQ's activation order, in files of compressed-tensors before 0.16."""
    q = np.int8(Q >> 4)
    order = np.int32([1, 0, 0, 1, 2, 3, 3, 2])
    scale = np.float32(RANDOM.random((6, 4)))
    shape = np.int64([6, 8])
    arrays = {"weight_packed": pack_words(q, 4), "weight_scale": scale, "weight_shape": shape}
    scheme = Scheme("pack-quantized", 4, strategy="group", group_size=2)
    files = written(tmp_path / "ordered", **arrays, weight_g_idx=order)
    tensor = QuantizedTensor(files, "m", scheme)
    np.testing.assert_array_equal(tensor[1:5], (q * scale[:, order])[1:5])
    assert tensor.pack((8,), (6,)) is None
    files = written(tmp_path / "plain", **arrays, weight_g_idx=np.full(8, -1, np.int32))
    np.testing.assert_array_equal(QuantizedTensor(files, "m", scheme)[:], q * np.repeat(scale, 2, 1))
    files = written(tmp_path / "wrong", **arrays)
    with pytest.raises(ConfigError, match=r"weight_scale is \[6, 4\]"):
        QuantizedTensor(files, "m", Scheme("pack-quantized", 4))


def test_weights_of_experts_are_stacked():
    weight = PackedWeight({"q": Q, "scales": np.ones((6, 1), np.float32)}, RoundedInputFormat(), (8,), (6,))
    stacked = stack_packed([weight, weight])
    assert stacked is not None and stacked.format == IntegerFormat(Grid(8)) and stacked.shape == (2, 8, 6)
    np.testing.assert_array_equal(stacked.take(1).matrix(), Q)
    assert stack_packed([weight, None]) is None
    assert stack_packed([weight, dataclasses.replace(weight, outputs=(2, 3))]) is None


def test_zero_points_and_fp8_are_stored_again():
    zeros = RANDOM.integers(-8, 8, (6, 2)).astype(np.int8)
    scales = np.float32(RANDOM.random((6, 2)))
    q = np.int8(Q >> 4)
    arrays = {"q": jnp.asarray(q, jnp.int4), "scales": jnp.asarray(scales), "zeros": jnp.asarray(zeros, jnp.int4)}
    weight = PackedWeight(arrays, IntegerFormat(Grid(4, 4)), (8,), (6,))
    expected = (q.reshape(6, 2, 4).astype(np.float32) - zeros[:, :, None]) * scales[:, :, None]
    np.testing.assert_array_equal(weight.matrix(), expected.reshape(6, 8))
    scheme, tensors = store(weight, "pack-quantized")
    assert not scheme.symmetric
    np.testing.assert_array_equal(unpack_words(tensors["weight_zero_point"].T, 4, 6).T, zeros)
    fp8 = PackedWeight({"q": jnp.asarray(Q, jnp.float8_e4m3fn), "scales": scales[:, :1]}, Float8Format(), (8,), (6,))
    scheme, tensors = store(fp8, "float-quantized")
    assert (scheme.kind, scheme.strategy, scheme.activations, scheme.rounds_inputs) == ("float", "channel", True, True)
    assert tensors["weight"].dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize(
    ("change", "rounds"),
    [
        ({}, True),
        ({"observer": "memoryless", "group_size": None}, True),
        ({"symmetric": False}, False),
        ({"strategy": "tensor"}, False),
        ({"dynamic": False}, False),
        ({"type": "float"}, False),
        ({"num_bits": "four"}, False),
    ],
)
def test_which_inputs_are_rounded(change, rounds):
    scheme, _ = store(
        PackedWeight({"q": Q, "scales": np.ones((6, 1), np.float32)}, IntegerFormat(Grid(8)), (8,), (6,)),
        "int-quantized",
    )
    said = make_quantization_config({"m": scheme}, [], "int-quantized")
    inputs = said["config_groups"]["group_0"]["input_activations"]
    assert inputs == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
        "group_size": None,
    }
    inputs |= change
    found = read_quantization({"quantization_config": said})
    assert found is not None and found.groups[0][1].rounds_inputs == rounds and found.groups[0][1].activations


def test_a_model_of_two_schemes_names_their_modules():
    four = Scheme("pack-quantized", 4, strategy="group", group_size=32)
    eight = Scheme("pack-quantized", 8)
    said = make_quantization_config({"a.x": four, "a.y": eight, "b.x": four}, ["lm_head"], "pack-quantized")
    found = read_quantization({"quantization_config": said})
    assert found is not None and said["ignore"] == ["lm_head"]
    assert (found.scheme("a.x"), found.scheme("b.x"), found.scheme("a.y")) == (four, four, eight)
    assert found.scheme("a.z") is None
    single = make_quantization_config({"a.x": four}, [], "pack-quantized")["config_groups"]
    assert single["group_0"]["targets"] == ["Linear"] and single["group_0"]["input_activations"] is None


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
WHOLE = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": GROUP}}


def group(**changes: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {**GROUP, **changes}}}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config (sparse-24-bitmask)"),
        ({"transform_config": {"config_groups": {}}}, "transform_config"),
        ({"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        (group(format="marlin-24"), "format 'marlin-24'"),
        (group(weights={"num_bits": 4, "type": "float"}), "'num_bits': 4, 'type': 'float'"),
        (group(weights={"num_bits": 16}), "'num_bits': 16"),
        (group(weights={"num_bits": "four"}), "weights.num_bits 'four'"),
        (group(weights={"strategy": "tensor_group", "group_size": 16}), "tensor_group"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16"),
        ({"config_groups": {}}, "no config_groups"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, named):
    assert read_quantization({"quantization_config": WHOLE}) is not None
    with pytest.raises(ConfigError, match="config.json: quantization_config") as error:
        read_quantization({"quantization_config": {**WHOLE, **change}})
    assert named in str(error.value)


def test_files_that_do_not_fit_are_named(tmp_path):
    folder = Path(shutil.copytree(FIXTURES / "int4", tmp_path / "int4"))
    assert is_quantized(folder) and not is_quantized(FIXTURES.parent / "llama")
    said = json.loads((folder / "config.json").read_text())
    said["quantization_config"]["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]
    (folder / "config.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match="self_attn.k_proj is quantized, but no group"):
        from_huggingface(folder)
    said["quantization_config"]["config_groups"]["group_0"] |= {"targets": ["Linear"], "weights": {"num_bits": 8}}
    (folder / "config.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match="integers of 8 bits take"):
        from_huggingface(folder)
