"""Adapters beside a compressed model that stays packed (QLoRA), through the command's own functions."""

import json
import shutil

import jax
import numpy as np
import pytest

from jaxstack import load_config, train
from jaxstack.checkpoint import compressed
from jaxstack.compress.after_training.run import CompressOptions, compress
from jaxstack.compress.config import Recipe
from jaxstack.config.loader import build_component
from jaxstack.cost_model.cluster import parse_cluster
from jaxstack.cost_model.forecast import forecast
from jaxstack.cost_model.memory import PackedSize
from jaxstack.errors import ConfigError
from jaxstack.module_arrays.packed_base import NAME
from jaxstack.parallel import ParallelConfig
from jaxstack.run.convert import export_checkpoint
from jaxstack.run.evaluate import evaluate
from jaxstack.run.load import load
from jaxstack.run.train import Task
from jaxstack.run_config import PACKED_STATE
from jaxstack.stored import StoredModel
from jaxstack.stored.packed_base import open_packed_base
from tests.word_models import make_word_model

RULES = {"layers": [{"path": "^decoder/", "method": "rtn", "bits": 4, "group_size": 16}]}


class Kept(Task):
    """The usual task, which keeps its trainer."""

    def make_trainer(self, config, data, base):
        self.trainer = super().make_trainer(config, data, base)
        return self.trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A compressed model, the same as plain numbers, and text."""
    folder = tmp_path_factory.mktemp("qlora")
    source = make_word_model("llama", folder / "source")
    recipe = build_component(Recipe, RULES, "recipe")
    compress(source, recipe, folder / "packed", CompressOptions(layer_tokens=0))
    export_checkpoint(folder / "packed", folder / "plain")
    (folder / "text.txt").write_text("\n\n".join(" ".join(f"w{i * j % 63 + 1}" for j in range(40)) for i in range(60)))
    return folder


def trained(folder, name: str, base: str, steps: int = 4, **more):
    settings = {
        "run": {"dir": str(folder), "name": name, "init_from": str(folder / base)},
        "model": {"scan_layers": False},
        "data": {"sources": [{"path": str(folder / "text.txt")}], "cache_dir": str(folder / "cache")},
        "train": {"steps": steps, "global_batch_size": 8, "sequence_length": 16, "eval_every_steps": 4},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "checkpoint": {"every_steps": 2},
        "adapters": {"rules": [{"path": "attention|mlp", "rank": 2}]},
        "optimizer": {"learning_rate": 0.05},
        "parallel": {"data": -1},
        "precision": {"compute": "float32"},
        "observe": {"trackers": ["jsonl"], "progress": False, "log_every": 1},
    }
    (folder / f"{name}.yaml").write_text(json.dumps(settings | more))
    return run(folder, name, folder / f"{name}.yaml")


def run(folder, name: str, file, *overrides: str):
    task = Kept()
    values = train(load_config(file, overrides), task=task).metrics
    return task.trainer, values, losses(folder / name)


def losses(run) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def both(folder):
    return trained(folder, "tuned", "packed"), trained(folder, "beside", "plain")


pytestmark = [
    pytest.mark.longer,
    pytest.mark.skipif(jax.__version_info__ < PACKED_STATE, reason="this jax passes no 4-bit integers to a step"),
]


def test_losses_are_those_on_the_dequantized_values(both):
    (packed, values, found), (plain, plain_values, expected) = both
    assert len(found) == 4
    trained = [x for path, x in compressed.named_leaves(packed.state.params).items() if path.endswith("adapter/b")]
    assert all(abs(x).max() > 0.01 for x in trained)
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    np.testing.assert_allclose(values["eval_loss"], plain_values["eval_loss"], rtol=2e-5)
    assert packed.frozen_parameters() == plain.frozen_parameters(), "so FLOPs and counts are the same"


def test_the_magnitudes_of_dora_are_those_of_the_packed_weights(folder):
    dora = {"rules": [{"path": "attention|mlp", "rank": 2, "method": "dora"}]}
    _, _, found = trained(folder, "dora", "packed", steps=2, adapters=dora)
    _, _, expected = trained(folder, "dora-plain", "plain", steps=2, adapters=dora)
    np.testing.assert_allclose(found, expected, rtol=2e-5)


def test_packed_weights_cannot_be_trained(folder):
    groups = {"learning_rate": 0.05, "groups": [{"path": "q_proj/kernel|norm", "frozen": False}]}
    with pytest.raises(ConfigError, match="groups trains decoder/layers/0/attention/q_proj/kernel, which stays packed"):
        trained(folder, "whole", "packed", optimizer=groups)


def test_the_step_takes_packed_bytes_and_checkpoints_none_of_them(folder, both):
    (packed, _, _), (plain, _, _) = both
    weights = open_packed_base(folder / "tuned" / "base").weights
    values = sum(int(np.prod(weight.shape)) for weight in weights.values())
    sizes = [trainer.program.compiled.memory_analysis().argument_size_in_bytes for trainer in (packed, plain)]
    assert sizes[1] - sizes[0] > (4 - 1.3) * values, "float32 against 4 bits and a scale for 16 of them, int4 as int8"
    state = packed.state
    assert NAME in state.params and NAME not in packed.stored_state.params
    stored = {path for path in compressed.named_leaves(packed.stored_state.params)}
    assert not stored & weights.keys()
    assert len(jax.tree.leaves(state.optimizer)) < len(jax.tree.leaves(plain.state.params)) * 2


def test_the_merged_run_is_that_on_plain_values(folder, both):
    tokens = np.arange(1, 33).reshape(2, 16)
    found, expected = (load(folder / name, ["precision.compute=float32"]).model(tokens) for name in ("tuned", "beside"))
    np.testing.assert_allclose(found, expected, atol=2e-4)
    (_, values, _), _ = both
    text = evaluate(folder / "tuned").text
    assert text is not None and text.loss == pytest.approx(values["eval_loss"], rel=1e-4)
    export_checkpoint(folder / "tuned", folder / "merged")
    again = load(folder / "merged", ["precision.compute=float32"]).model(tokens)
    np.testing.assert_allclose(again, expected, atol=2e-4)


def test_a_stopped_run_goes_on_without_the_weights_that_it_started_from(folder, both):
    shutil.copytree(folder / "packed", folder / "moved")
    trained(folder, "stopped", "moved", steps=2, parallel={"data": 2, "fsdp": -1})
    shutil.rmtree(folder / "moved" / "compressed")
    _, _, found = run(folder, "stopped", folder / "stopped" / "config.yaml", "train.steps=4")
    np.testing.assert_allclose(found, both[0][2], rtol=1e-5)
    with pytest.raises(ConfigError, match="which this run cannot: parallel.tensor splits them"):
        load_config(folder / "stopped" / "config.yaml", ["parallel.tensor=2"]).packed_base()


def test_the_forecast_counts_packed_bytes(folder, both):
    size = PackedSize.of(open_packed_base(folder / "tuned" / "base"))
    assert size.bytes == pytest.approx(size.values * (0.5 + 2 / 16)), "4 bits, and bfloat16 for 16 inputs"
    configs = (load_config(folder / name / "config.yaml") for name in ("tuned", "beside"))
    alone = [config.model_copy(update={"parallel": ParallelConfig()}) for config in configs]
    packed, plain = (forecast(config, parse_cluster("1 h200")).memory["weights"] for config in alone)
    assert plain - packed == pytest.approx(4 * size.values - size.bytes)


def test_without_adapters_the_weights_are_unpacked(folder, both):
    config = load_config(folder / "tuned.yaml", ["run.name=other"])
    assert config.packed_base().directory == folder / "packed"
    said = []
    stacked = config.model_copy(update={"model": config.model.model_copy(update={"scan_layers": True})})
    assert stacked.packed_base(said.append) is None and "model.scan_layers stacks them" in said[0]
    split = config.model_copy(update={"parallel": ParallelConfig(data=2, tensor=4)})
    assert split.packed_base(said.append) is None and "parallel.tensor splits them" in said[1]
    plain = config.model_copy(update={"adapters": type(config.adapters)()})
    assert plain.packed_base(said.append) is None and len(said) == 2
    assert StoredModel.open(folder / "packed").packed
