"""The same parameters with their layers stacked otherwise, and the runs that need it."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxstack import convert
from jaxstack.models import ModelConfig, Transformer
from jaxstack.models.restack import restack, same_stacking
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.run.train import train
from jaxstack.run_config import load_config

SCANNED = ModelConfig(vocab_size=64, hidden_size=16, num_heads=2, num_layers=5, intermediate_size=24)
FORMS = {"unrolled": {"scan_layers": False}, "ends": {"unscanned_end_layers": 1}}


def split(config: ModelConfig):
    module = ModuleArrays(lambda rngs: Transformer(config, rngs))
    return module, *module.split(Transformer(config, nnx.Rngs(0)))


@pytest.mark.parametrize("form", ["unrolled", "ends"])
def test_the_function_stays_and_the_way_back_is_bit_equal(form):
    tokens = np.arange(12).reshape(1, 12)
    target = SCANNED.model_copy(update=FORMS[form])
    assert same_stacking(SCANNED, SCANNED) and not same_stacking(SCANNED, target)
    module, params, non_params = split(SCANNED)
    other, _, other_rest = split(target)
    moved = restack(params, SCANNED, target)
    expected = module.merge(params, non_params)(tokens)
    np.testing.assert_allclose(other.merge(moved, other_rest)(tokens), expected, rtol=1e-5, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, restack(moved, target, SCANNED), params)


def run(folder, name: str, *overrides: str) -> None:
    shape = ["hidden_size=32", "num_heads=2", "num_layers=4", "intermediate_size=48", "vocab_size=512"]
    model = [] if any("init_from" in o for o in overrides) else [f"model.{key}" for key in shape]
    fixed = ["train.global_batch_size=8", "train.sequence_length=16", "parallel.fsdp=2", "parallel.data=4"]
    tree = {"run": {"dir": str(folder), "name": name}, "observe": {"trackers": ["jsonl"], "progress": False}}
    path = folder / "config.yaml"
    data = {"tokenizer": {"name": "byte"}, "sources": [{"path": str(folder / "a.txt")}], "held_out_fraction": 0.0}
    path.write_text(json.dumps({**tree, "data": data}))
    train(load_config(path, [*fixed, *model, *overrides]))


@pytest.mark.exhaustive
def test_an_fp8_run_starts_from_a_plain_one_and_from_files_and_is_exported(tmp_path):
    """Its first and last layer stay out of the scan and of FP8; its weights are those of the start."""
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    run(tmp_path, "plain", "train.steps=1", "optimizer.learning_rate=1e-3")
    assert convert.main([str(tmp_path / "plain"), "--output", str(tmp_path / "files")]) == 0
    started = load_file(tmp_path / "files" / "model.safetensors")
    for start in ("plain", "files"):
        name = f"fp8_from_{start}"
        # A rate of nearly nothing: what is exported are the weights of the start.
        still = ("train.steps=1", "optimizer.learning_rate=1e-30", "precision.fp8=delayed")
        run(tmp_path, name, f"run.init_from={tmp_path / start}", *still)
        model = load_config(tmp_path / name / "config.yaml").model
        assert (model.scan_layers, model.unscanned_end_layers) == (True, 1)
        assert convert.main([str(tmp_path / name), "--output", str(tmp_path / f"{name}_exported")]) == 0
        exported = load_file(tmp_path / f"{name}_exported" / "model.safetensors")
        assert exported.keys() == started.keys()
        for key, tensor in started.items():
            np.testing.assert_array_equal(exported[key], tensor, err_msg=key)
