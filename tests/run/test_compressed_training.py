"""Runs with compressed weights and a teacher: exact resume, what evaluation and export get, errors of the command."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxstack.evaluate as evaluate
import jaxstack.train as command
from jaxstack import convert
from jaxstack.checkpoint.manager import CheckpointManager
from jaxstack.compress.during_training import compress_in_training
from jaxstack.compress.formats.integer_grid import Rtn
from jaxstack.config.loader import dump_yaml
from jaxstack.files import write_file
from jaxstack.models import from_huggingface
from jaxstack.parameter_paths import flatten, nest
from jaxstack.run.build_model import build_model
from jaxstack.run.load import read_run_config
from jaxstack.run.train import train
from jaxstack.run_config import load_config
from tests.stored.decoders import decoder_of

REPOSITORY = Path(__file__).resolve().parents[2]
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 255, (2, 12)), jnp.int32)
RULES = [
    {"path": "attention/(q|k)_proj/kernel", "method": "qat", "bits": 4, "group_size": 8},
    {"path": "attention/(v|o)_proj/kernel", "method": "mask"},
    {"path": "mlp/up_proj/kernel", "method": "low_rank", "penalty": 1e-3},
    {"path": "mlp/down_proj/kernel", "method": "cluster", "bits": 3},
]


@pytest.fixture(scope="module")
def configured(tmp_path_factory) -> Path:
    """Configurations of a run `base`, and of one that compresses the pruned base in training; nothing is trained."""
    place = tmp_path_factory.mktemp("compressed")
    texts = place / "texts"
    texts.mkdir()
    source = (REPOSITORY / "jaxstack" / "loop.py").read_text()
    for index, start in enumerate(range(0, len(source), 700)):
        (texts / f"{index}.txt").write_text(source[start : start + 700])
    config: dict[str, Any] = {
        "run": {"dir": str(place), "name": "base"},
        "model": {"hidden_size": 32, "num_layers": 3, "num_heads": 4, "intermediate_size": 48, "scan_layers": True},
        "data": {
            "sources": [{"path": str(texts)}],
            "tokenizer": {"name": "byte"},
            "cache_dir": str(place / "cache"),
            "held_out_fraction": 0.1,
        },
        "train": {"steps": 4, "global_batch_size": 8, "sequence_length": 32},
        "schedule": {"name": "constant"},
        "optimizer": {"learning_rate": 0.01, "weight_decay": 0.1},
        "parallel": {"fsdp": 4, "data": 2},
        "checkpoint": {"every_steps": 2},
        "observe": {"trackers": ["jsonl"], "log_every": 1, "progress": False},
    }
    (place / "base.yaml").write_text(json.dumps(config))
    new = {"name": "small", "init_from": str(place / "pruned")}
    changed = {"run": config["run"] | new, "compression": {"rules": RULES}, "distill": {"teacher": str(place / "base")}}
    (place / "small.yaml").write_text(json.dumps(config | changed))
    return place


@pytest.fixture(scope="module")
def folder(configured) -> Path:
    """The same with the trained run `base`, and that run pruned."""
    train(load_config(configured / "base.yaml"))
    prune(configured / "base", configured / "pruned")
    return configured


def prune(source: Path, target: Path) -> None:
    """Write the run `source` with the smaller half of each attention matrix at zero."""
    decoder = decoder_of(source)
    config = load_config(source / "config.yaml", [f"run.name={target.name}", "model.scan_layers=false"])

    def halve(x):
        return jnp.where(jnp.abs(x) < jnp.median(jnp.abs(x)), 0, x)

    flat = flatten(decoder.params)
    params = nest((path, halve(x) if "attention" in path and x.ndim > 1 else x) for path, x in flat.items())
    with CheckpointManager(target / "checkpoints") as manager:
        manager.save(0, {"params": params, "non_params": decoder.non_params}, {"batches": 0, "data": None}, wait=True)
    write_file(target / "config.yaml", dump_yaml(config).encode())
    (target / "tokenizer").symlink_to(source / "tokenizer")


@pytest.fixture(scope="module")
def small(folder) -> dict[str, float]:
    """The last metrics of the compressed run, which is never interrupted."""
    return dict(train(load_config(folder / "small.yaml")).metrics)


def stored(folder: Path, name: str) -> dict[str, np.ndarray]:
    """The parameters in a run's newest checkpoint, by path."""
    config = read_run_config(folder / name)
    module = compress_in_training(build_model(config, jnp.float32), config.compression.rules)
    manager = CheckpointManager(folder / name / "checkpoints")
    step = manager.latest_step()
    assert step is not None
    wanted = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), module.abstract_params)
    tree: Any = manager.restore(step, {"params": wanted}, subset=True)[0]
    return {"/".join(path): x for path, x in flatten(tree["params"]).items()}


@pytest.mark.exhaustive
def test_a_stopped_run_goes_on_exactly(folder, small):
    train(load_config(folder / "small.yaml", ["run.name=stopped", "train.steps=2"]))
    resumed = train(load_config(folder / "small.yaml", ["run.name=stopped"])).metrics
    assert resumed["loss"] == small["loss"] and resumed["eval_loss"] == small["eval_loss"]
    one = stored(folder, "small")
    other = stored(folder, "stopped")
    assert one.keys() == other.keys() and not any("teacher" in path for path in one)
    for path, value in one.items():
        np.testing.assert_array_equal(value, other[path], err_msg=path)


@pytest.mark.exhaustive
def test_evaluation_and_export_have_the_compressed_weights(folder, small):
    weights = stored(folder, "small")
    pruned = stored(folder, "pruned")
    decoder = decoder_of(folder / "small")
    found = {"/".join(path): np.asarray(x) for path, x in flatten(decoder.params).items()}
    for layer in range(3):

        def name(part, layer=layer):
            return f"decoder/layers/{layer}/{part}/kernel"

        q = weights["decoder/layers/0/attention/q_proj/kernel"][layer]
        rounded = Rtn(path=".*", bits=4, group_size=8).compress(jnp.asarray(q.reshape(32, -1).T), None)
        np.testing.assert_allclose(found[name("attention/q_proj")].reshape(32, -1).T, rounded.matrix(), rtol=1e-6)
        zeros = pruned[name("attention/v_proj")] == 0
        assert 0.4 < zeros.mean() < 0.6
        np.testing.assert_array_equal(found[name("attention/v_proj")] == 0, zeros)
        u, v = (weights[f"decoder/layers/0/mlp/up_proj/kernel/{part}"][layer] for part in "uv")
        np.testing.assert_allclose(found[name("mlp/up_proj")].T, u @ v, atol=1e-6)
        assert len(np.unique(found[name("mlp/down_proj")])) <= 8
    master = decoder_of(folder / "small", form="master")
    kernel = master.params["decoder"]["layers"]["1"]["attention"]["q_proj"]["kernel"]
    np.testing.assert_array_equal(kernel, weights["decoder/layers/0/attention/q_proj/kernel"][1])
    assert convert.main([str(folder / "small"), "--output", str(folder / "exported")]) == 0
    expected = decoder.module.merge(decoder.params, decoder.non_params)(TOKENS)
    np.testing.assert_allclose(from_huggingface(folder / "exported")(TOKENS), expected, atol=1e-5)


@pytest.mark.exhaustive
def test_another_run_starts_from_the_compressed_weights(folder, small):
    again = ["run.name=again", f"run.init_from={folder / 'small'}", "train.steps=1", "optimizer.learning_rate=1e-12"]
    found = train(load_config(folder / "base.yaml", again)).metrics
    assert found["eval_loss"] == pytest.approx(small["eval_loss"], rel=1e-5)


@pytest.mark.exhaustive
def test_a_pipeline_trains_and_evaluates_as_other_layouts(folder, capsys):
    alone = ["distill.teacher=null", "train.steps=2", "observe.progress=true"]
    pipelined = ["parallel.pipeline=2", "parallel.fsdp=2", "run.name=pipelined"]
    said = []
    wanted = train(load_config(folder / "small.yaml", [*alone, "run.name=alone"]), report=said.append).metrics
    found = train(load_config(folder / "small.yaml", [*alone, *pipelined]), report=said.append).metrics
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=1e-4)
    lines = [line for line in said if line.startswith(("quantized to", "sparse:", "clustered around"))]
    assert len(lines) == 6 and lines[:3] == lines[3:], said
    capsys.readouterr()
    one = stored(folder, "alone")
    other = stored(folder, "pipelined")
    assert one.keys() == other.keys()
    for path, value in one.items():
        assert np.linalg.norm(other[path] - value) < 0.01 * np.linalg.norm(value), path
    losses = []
    for layout in ([], ["parallel.pipeline=3"]):
        assert evaluate.main(["--run", str(folder / "pipelined"), "--json", *layout]) == 0
        losses.append(json.loads(capsys.readouterr().out)["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.exhaustive
def test_a_mask_needs_zeros(folder, capsys):
    rules = ["compression.rules=[{path: mlp, method: mask}]", "distill.teacher=null", "run.name=without-zeros"]
    assert command.main(["--config", str(folder / "small.yaml"), *rules]) == 2
    assert "has no zeros" in capsys.readouterr().err


@pytest.mark.quick
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["compression.rules=[{path: misspelt, method: qat}]"], "'misspelt' matches no parameter"),
        (
            ["compression.rules=[{path: mlp, method: qat, group_size: 8}, {path: up_proj, method: cluster}]"],
            "a weight has one method",
        ),
        (["compression.rules=[{path: mlp, method: qat, group_size: 7}]"], "Groups of 7 do not divide"),
        (["compression.rules=[{path: mlp, method: bfp, block_size: 7}]"], "block_size 7 does not divide its"),
        (["compression.rules=[{path: mlp, method: mask}]"], "name its directory"),
        (["compression.rules=[{path: mlp, method: low_rank, rank: 99}]"], "rank 99 is more than"),
        (["compression.rules=[{path: mlp, method: cluster}]", "adapters.rules=[{path: mlp}]"], "exclude each other"),
        (
            ["compression.rules=[{path: mlp, method: cluster}]", "optimizer.groups=[{path: up_proj, frozen: true}]"],
            "which optimizer.groups freezes",
        ),
        (["distill.teacher=base", "parallel.pipeline=2"], "distill.teacher does not support a pipeline"),
        (["distill.teacher=other", "compression.rules=[]"], "has a vocabulary of 64 ids"),
    ],
)
def test_errors_are_one_message_and_exit_code_2(configured, monkeypatch, capsys, overrides, message):
    monkeypatch.chdir(configured)
    other = configured / "other"
    other.mkdir(exist_ok=True)
    (other / "config.yaml").write_text(json.dumps({"model": {"hidden_size": 32, "num_layers": 1, "vocab_size": 64}}))
    arguments = ["--config", "small.yaml", "run.name=refused", "run.init_from=null", "distill.teacher=null", *overrides]
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
