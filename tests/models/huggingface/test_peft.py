"""Adapters of PEFT: with them our matrices change the weights as theirs change the tensors of the checkpoint."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxstack.errors import ConfigError
from jaxstack.models import from_huggingface
from jaxstack.models.huggingface.families import read_model_config
from jaxstack.models.huggingface.peft import read_peft
from tests.marks import longer

HERE = Path(__file__).parent
SETTINGS = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none", "use_dora": False}
TENSORS = {
    "llama": ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"),
    "phi3": ("self_attn.qkv_proj", "mlp.gate_up_proj"),
    "gpt2": ("attn.c_attn", "mlp.c_fc", "mlp.c_proj"),
    "llama4": ("self_attn.q_proj", "self_attn.k_proj"),
}
"""Also of joined matrices, of such that are stored transposed, and of heads whose channels rotate in other pairs."""


def kernels(folder: Path) -> dict[str, np.ndarray]:
    model = from_huggingface(folder, config=unrolled(folder))
    leaves = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): np.asarray(x.get_value()) for path, x in leaves if path[-1] == "kernel"}


def unrolled(folder: Path):
    return read_model_config(folder).model_copy(update={"scan_layers": False})


def write_adapter(folder: Path, tensors: dict[str, np.ndarray], **settings) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    return folder


@pytest.mark.parametrize("family", ["phi3", *longer(*(name for name in TENSORS if name != "phi3"))])
@pytest.mark.parametrize("rslora", [True, *longer(False)])
def test_matrices_change_the_weights_as_peft_does(family, rslora, tmp_path):
    key = np.random.default_rng(0)
    shutil.copytree(HERE / family, tmp_path / "base")
    weights = load_file(str(tmp_path / "base" / "model.safetensors"))
    tensors = {}
    for name in [name for name in weights if name.removesuffix(".weight").endswith(TENSORS[family])]:
        weight = weights[name].astype(np.float32)
        outputs, inputs = weight.shape[::-1] if family == "gpt2" else weight.shape
        rank = 3 if "o_proj" not in name else 2
        scale = 6 / (rank**0.5 if rslora else rank)
        a = key.normal(size=(rank, inputs)).astype(np.float32)
        b = key.normal(size=(outputs, rank)).astype(np.float32)
        weights[name] = weight + scale * ((b @ a).T if family == "gpt2" else b @ a)
        stem = "base_model.model." + name.removesuffix(".weight")
        tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    before = kernels(tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", tensors, use_rslora=rslora, rank_pattern={"o_proj": 2})
    found = read_peft(adapter, unrolled(tmp_path / "base"))
    save_file(weights, str(tmp_path / "base" / "model.safetensors"))
    for path, after in kernels(tmp_path / "base").items():
        own = found.get(path.removesuffix("/kernel"))
        change = 0 if own is None else jnp.tensordot(own.a, own.b, 1)
        np.testing.assert_allclose(after, before[path] + change, atol=1e-4, err_msg=path)
    assert tensors and found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "use_dora=True, which adapters that are served together do not support"),
        ({"peft_type": "IA3"}, "must have an adapter of peft_type LORA; found 'IA3'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({}, "lm_head.lora_A.weight, which belongs to no dense layer"),
    ],
)
def test_adapters_of_other_kinds_are_told_why(settings, message, tmp_path):
    a, b = np.zeros((3, 8), np.float32), np.zeros((16, 3), np.float32)
    tensors = {"base_model.model.lm_head.lora_A.weight": a, "base_model.model.lm_head.lora_B.weight": b}
    with pytest.raises(ConfigError, match=message):
        read_peft(write_adapter(tmp_path / "adapter", tensors, **settings), unrolled(HERE / "llama"))
