"""Releases whose files are quantized in formats of their own: gpt-oss in MXFP4, DeepSeek in FP8 by blocks."""

import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxstack.checkpoint.compressed import named_leaves
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.sampling import Sampling
from jaxstack.errors import ConfigError
from jaxstack.models import Transformer, from_huggingface
from jaxstack.models.huggingface.files import WeightFiles, read_json, write_json
from jaxstack.models.huggingface.quantized_weights import Mxfp4Experts
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.run.convert import export_checkpoint, import_checkpoint
from pallas_kernels.weight_only.packed import is_packed
from tests.run.test_compressed_tensors import raw_tensors
from tests.stored.decoders import decoder_of

FIXTURES = Path(__file__).parent


def copy(name: str, folder: Path, tensors: dict[str, np.ndarray], quantization: dict) -> Path:
    shutil.copytree(FIXTURES / name, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    write_json(folder / "config.json", read_json(folder / "config.json") | {"quantization_config": quantization})
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


def parameter(model, path: str) -> np.ndarray:
    found = {"/".join(map(str, key)): value[...] for key, value in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    return np.asarray(found[path])


def mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[E, out, in / 32, 16] and [E, out, in / 32] -> [E, in, out], value by value as the specification says."""
    out = np.zeros((*blocks.shape[:2], 32 * blocks.shape[2]))
    for at in np.ndindex(blocks.shape):
        for half, code in enumerate((blocks[at] & 15, blocks[at] >> 4)):
            exponent, mantissa = (code >> 1) & 3, code & 1
            size = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (int(exponent) - 1)
            value = -size if code & 8 else size
            out[at[0], at[1], 32 * at[2] + 2 * at[3] + half] = value * 2.0 ** (int(scales[at[:3]]) - 127)
    return out.swapaxes(1, 2)


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The fixture with random experts in MXFP4, its tensors, and the experts' values."""
    random = np.random.default_rng(0)
    tensors = load_file(str(FIXTURES / "gpt-oss" / "model.safetensors"))
    values = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = random.integers(118, 126, blocks.shape[:3], dtype=np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = mxfp4(blocks, scales)
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return copy("gpt-oss", tmp_path_factory.mktemp("mxfp4") / "model", tensors, said), tensors, values


def test_experts_in_mxfp4_are_read_exactly(gpt_oss):
    folder, _, values = gpt_oss
    lines: list[str] = []
    model = from_huggingface(folder, report=lines.append)
    joined = values["model.layers.0.mlp.experts.gate_up_proj"]
    for number, name in enumerate(("gate_proj", "up_proj")):
        kernel = parameter(model, f"decoder/layers/0/mlp/{name}/kernel")
        first = kernel if kernel.ndim == 3 else kernel[0]
        np.testing.assert_array_equal(first, joined[..., number::2])
    assert any("8 of 8 quantized weights are read as plain float32" in line for line in lines)


def test_any_slice_of_experts_in_mxfp4_is_read(gpt_oss):
    folder, _, values = gpt_oss
    name = "model.layers.1.mlp.experts.down_proj"
    files = WeightFiles(folder)
    found = Mxfp4Experts(files, name)
    part = (slice(1, 3), slice(5, 31), slice(2, 9))
    np.testing.assert_array_equal(found[part], values[name][part])
    packed = found.pack(slice(1, None, 2))
    assert packed is not None
    np.testing.assert_array_equal(packed.matrix(), values[name][..., 1::2].swapaxes(1, 2))


def test_scales_that_do_not_fit_the_blocks_are_refused(gpt_oss, tmp_path):
    folder, tensors, _ = gpt_oss
    name = "model.layers.0.mlp.experts.down_proj_scales"
    said = read_json(folder / "config.json")["quantization_config"]
    broken = copy("gpt-oss", tmp_path / "model", {**tensors, name: tensors[name][:, :-1].copy()}, said)
    with pytest.raises(ConfigError, match=r"down_proj_scales \[E, out, in / 32\]"):
        from_huggingface(broken)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> tuple[Path, dict[str, np.ndarray]]:
    """The fixture with all projections in FP8 by blocks of 8 x 8, and their values."""
    tensors = load_file(str(FIXTURES / "deepseek-v3" / "model.safetensors"))
    size = 8  # the latent's projection has 20 rows: its last block is half full
    wanted = {}
    for name in [name for name in tensors if name.endswith("_proj.weight") or "kv_a_proj" in name]:
        weight = tensors[name].astype(np.float32)
        rows, columns = (-(-count // size) for count in weight.shape)
        scales = np.random.default_rng(0).uniform(0.5, 2, (rows, columns)).astype(np.float32)
        wide = np.kron(scales, np.ones((size, size), np.float32))[: weight.shape[0], : weight.shape[1]]
        stored = np.asarray(jnp.asarray(weight / wide).astype(jnp.float8_e4m3fn))
        tensors |= {name: stored, f"{name}_scale_inv": scales}
        wanted[name] = stored.astype(np.float32) * wide
    said = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [size, size], "activation_scheme": "dynamic"}
    return copy("deepseek-v3", tmp_path_factory.mktemp("fp8") / "model", tensors, said), wanted


def test_weights_in_fp8_by_blocks_are_products_with_their_scales(deepseek, tmp_path):
    folder, wanted = deepseek
    found = parameter(from_huggingface(folder, report=lambda line: None), "decoder/layers/0/attention/kv_a_proj/kernel")
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    np.testing.assert_array_equal(found if found.ndim == 2 else found[0], wanted[name].T)
    broken = json.loads((folder / "config.json").read_text())
    broken["quantization_config"]["weight_block_size"] = None
    write_json(tmp_path / "config.json", broken)
    with pytest.raises(ConfigError, match=r"weight_block_size None"):
        from_huggingface(tmp_path)


@pytest.mark.longer
@pytest.mark.parametrize(("name", "most", "layers"), [("gpt_oss", 0.6, 4), ("deepseek", 1.1, 2)])
def test_weights_stay_packed_for_generation(request, name, most, layers):
    """Logits and tokens are those of the dequantized model; `most` bounds the bytes of a quantized weight."""
    folder = request.getfixturevalue(name)[0]
    plain = decoder_of(folder, ["parallel.data=1"], form="plain")
    packed = decoder_of(folder, ["parallel.data=1"])
    kept = {path: leaf for path, leaf in named_leaves(packed.params).items() if is_packed(leaf)}
    experts = [path for path, leaf in kept.items() if leaf.stack]
    assert len(experts) == 3 * layers
    assert all(leaf.device_bytes <= most * math.prod(leaf.shape) for leaf in kept.values() if leaf.ndim > 1)
    saved = sum(4 * math.prod(leaf.shape) - leaf.device_bytes for leaf in kept.values())
    assert plain.weight_bytes - packed.weight_bytes == saved
    prompts = np.random.default_rng(0).integers(0, 64, (2, 8), np.int32)
    chosen = np.stack(list(packed.generate(prompts.tolist(), 4, Sampling(temperature=0))), axis=1)
    tokens = np.concatenate([prompts, chosen], axis=1)
    logits = plain.logits(tokens)
    np.testing.assert_allclose(packed.logits(tokens), logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(chosen, np.argmax(logits[:, 7:-1], axis=-1))


@pytest.mark.parametrize(("name", "format"), [("gpt_oss", "mxfp4"), ("deepseek", "fp8")])
def test_files_come_back_bit_by_bit(request, name, format, tmp_path):
    folder = request.getfixturevalue(name)[0]
    import_checkpoint(folder, tmp_path / "run", warn=lambda line: None)
    export_checkpoint(tmp_path / "run", tmp_path / "back", dtype="bfloat16", format=format, warn=lambda line: None)
    before, after = (raw_tensors(part) for part in (folder, tmp_path / "back"))
    stored = {key: value for key, value in before.items() if value[0] in ("F8_E4M3", "U8") or "scale" in key}
    assert before.keys() == after.keys() and len(stored) > 10
    assert {key: after[key] for key in stored} == stored
    said, again = (read_json(part / "config.json")["quantization_config"] for part in (folder, tmp_path / "back"))
    assert again | {"modules_to_not_convert": None} == said | {"modules_to_not_convert": None}


def float64_logits(decoder: Decoder, tokens: np.ndarray) -> np.ndarray:
    """Return logits [B, T, V] of a model computed in float64, but for rotations, the router's scores and the head."""
    decoder.module = ModuleArrays(lambda rngs: Transformer(decoder.config, rngs, dtype=jnp.float64))
    with jax.enable_x64(True):
        return np.asarray(decoder.logits(tokens))


@pytest.mark.exhaustive
def test_packed_experts_are_split_over_devices(gpt_oss):
    folder = gpt_oss[0]
    tokens = np.random.default_rng(0).integers(0, 64, (4, 12), np.int32)
    whole = decoder_of(folder, ["parallel.data=1"])
    split = decoder_of(folder, ["parallel.tensor=2", "parallel.expert=2"])
    kernel = split.params["decoder"]["layers"]["1"]["mlp"]["down_proj"]["kernel"]
    assert kernel.arrays["indices"].sharding.spec == jax.P("expert", None, "tensor")
    # In float32 the order of sums shows: the first attention of one token rounds six times as much as the others', and
    # its logits, which are up to 5, are off by 4e-5 on one device and by 3e-6 on four. Of 12 batches in float64 the
    # logits differed by at most 1.5e-6, as the head's sums of 32 terms are rounded to float32.
    np.testing.assert_allclose(float64_logits(split, tokens), float64_logits(whole, tokens), rtol=0, atol=4e-6)
