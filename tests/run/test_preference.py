"""Preference training by the command: metrics, an exact resume, adapters, and what is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxstack.evaluate as evaluate
import jaxstack.train as command
from jaxstack.decoding.engine import Engine
from jaxstack.errors import ConfigError
from jaxstack.reinforce.rewards import Model, Rewards, Sample
from jaxstack.run.convert import export_checkpoint
from jaxstack.run.load import find_reward_head, load, load_reward_model
from jaxstack.run.train import train
from jaxstack.run_config import load_config
from jaxstack.serve.config import EngineConfig
from tests.word_models import make_chat_model

WORDS = [*"abcdef", "what", "is", "it", "yes", "no"]
METRICS = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_probability")
LOG_2 = pytest.approx(math.log(2), abs=1e-6)
"""Loss of pairs to which the model and its reference, being equal, give the same rewards."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint as on the Hub, with a tokenizer of words; preferences; a configuration."""
    place = tmp_path_factory.mktemp("preference")
    source = make_chat_model(place / "qwen3", WORDS)
    lines = [
        json.dumps({"prompt": f"what is {WORDS[i % 6]}", "chosen": f"it is {WORDS[i % 5]} yes", "rejected": "no"})
        for i in range(40)
    ]
    (place / "pairs.jsonl").write_text("\n".join(lines))
    (place / "texts.jsonl").write_text('{"text": "what is it"}\n' * 40)
    config = {
        "run": {"dir": str(place), "name": "dpo", "init_from": str(source)},
        "data": {
            "sources": [{"path": str(place / "pairs.jsonl"), "format": "preference"}],
            "chat": {"template": "chatml"},
            "cache_dir": str(place / "cache"),
            "held_out_fraction": 0.3,
        },
        "preference": {"loss": "dpo"},
        "train": {"steps": 3, "global_batch_size": 8, "sequence_length": 16},
        "schedule": {"name": "constant"},
        "optimizer": {"learning_rate": 0.01},
        "parallel": {"fsdp": 4, "data": 2},
        "checkpoint": {"every_steps": 2},
        "observe": {"trackers": ["jsonl"], "log_every": 1, "progress": False},
    }
    (place / "dpo.yaml").write_text(json.dumps(config))
    return place


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tuned(folder) -> dict:
    return dict(train(load_config(folder / "dpo.yaml")).metrics)


def test_a_run_logs_rewards_of_training_and_of_held_out_pairs(folder, tuned):
    steps = [line for line in metrics_of(folder / "dpo") if "loss" in line]
    assert steps[0]["loss"] == LOG_2 and abs(steps[0]["margin"]) < 1e-6
    assert steps[-1]["loss"] < steps[0]["loss"] and steps[-1]["margin"] > 0
    assert all(name in line for line in steps for name in METRICS) and steps[0]["tokens"] == 8 * 2 * 16
    held_out = metrics_of(folder / "dpo")[-1]
    assert all(f"eval_{name}" in held_out for name in METRICS) and 0 < held_out["eval_items"] < 40
    assert "eval_perplexity" not in held_out and tuned["eval_loss"] < 0.69


def test_a_stopped_run_goes_on_exactly(folder, tuned):
    train(load_config(folder / "dpo.yaml", ["run.name=stopped", "train.steps=2"]))
    resumed = train(load_config(folder / "dpo.yaml", ["run.name=stopped"])).metrics
    assert (resumed["loss"], resumed["eval_loss"]) == (tuned["loss"], tuned["eval_loss"])


def test_a_run_with_adapters_needs_no_second_model(folder):
    adapters = "adapters.rules=[{path: attention, rank: 2}]"
    more = ["run.name=lora", "preference.loss=kto", adapters, "train.steps=1"]
    found = train(load_config(folder / "dpo.yaml", more)).metrics
    assert found["loss"] == pytest.approx(0.5) and abs(found["margin"]) < 1e-6 < abs(found["eval_margin"])
    assert found["tokens"] == 8 * 3 * 16 and 0 <= found["drift"] < 1e-6 < found["eval_drift"]


def test_a_cached_reference_gives_the_same_run(folder, tuned, monkeypatch):
    cached = ["preference.cache_reference=true"]
    found = train(load_config(folder / "dpo.yaml", [*cached, "run.name=cached"])).metrics
    assert (found["loss"], found["eval_loss"]) == pytest.approx((tuned["loss"], tuned["eval_loss"]), rel=1e-5)
    steps = [line for line in metrics_of(folder / "cached") if "loss" in line]
    assert steps[0]["loss"] == LOG_2 and abs(steps[0]["margin"]) < 1e-6
    split = [*cached, "run.name=split", "parallel.context=2", "parallel.fsdp=2", "train.steps=1"]
    first = train(load_config(folder / "dpo.yaml", split)).metrics
    assert first["loss"] == LOG_2 and abs(first["margin"]) < 1e-5
    staged = [*cached, "run.name=staged", "parallel={pipeline: 2, fsdp: 2, data: 2}"]
    found = train(load_config(folder / "dpo.yaml", staged)).metrics
    assert (found["loss"], found["eval_loss"]) == pytest.approx((tuned["loss"], tuned["eval_loss"]), rel=1e-5)
    # The same values are read, those of other rows are not.
    monkeypatch.setattr("jaxstack.run.reference._Reference", None)
    again = train(load_config(folder / "dpo.yaml", [*cached, "run.name=again", "train.steps=1"])).metrics
    assert again["loss"] == steps[0]["loss"]
    with pytest.raises(TypeError, match="NoneType"):
        train(load_config(folder / "dpo.yaml", [*cached, "run.name=longer", "train.sequence_length=18"]))


def test_a_reward_model_is_trained_with_adapters_stopped_and_loaded(folder, tuned):
    more = ["run.name=reward", "preference.loss=reward_model", "adapters.rules=[{path: attention, rank: 2}]"]
    train(load_config(folder / "dpo.yaml", [*more, "train.steps=2"]))
    found = train(load_config(folder / "dpo.yaml", more)).metrics
    steps = [line for line in metrics_of(folder / "reward") if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3] and steps[0]["loss"] == LOG_2 and found["margin"] > 0
    score = load_reward_model(folder / "reward")
    asked = "<|im_start|>user\nwhat is b<|im_end|>\n<|im_start|>assistant\n"
    texts = [f"{asked}{answer}<|im_end|>" for answer in ("it is b yes", "no")]
    ids = [ids.tolist() for ids, _ in score.tokenizer.encode_marked(texts)]
    rewards = score(ids)
    assert rewards.shape == (2,) and rewards[0] > rewards[1]
    assert score.encode("what is b", "it is b yes") == ids[0]
    head = find_reward_head(folder / "reward")
    assert head is not None and head.encode("what is b", "no") == ids[1] and find_reward_head(folder / "dpo") is None
    run = load(folder / "reward")
    with Engine(run.decoder, EngineConfig(slots=2, context=64, chunk=64), warm_up=False) as engine:
        pooled = [engine.embed(prompt) for prompt in ids]
        assert all(len(request.result()) == 1 for request in pooled)
    served = [np.asarray(request.pooled)[1] @ head.weights for request in pooled]
    np.testing.assert_allclose(served, rewards, rtol=2e-2, atol=2e-3)
    with Rewards([Model(path=str(folder / "reward"), weight=2)], load_reward_model) as model:
        assert model([Sample([{"role": "user", "content": "what is b"}], "it is b yes")])[0].total == 2 * rewards[0]
    export_checkpoint(folder / "reward", folder / "classifier", warn=lambda _: None)
    assert load_file(folder / "classifier" / "model.safetensors")["score.weight"].any()
    assert "Qwen3ForSequenceClassification" in (folder / "classifier" / "config.json").read_text()
    with pytest.raises(ConfigError, match="dpo is no reward model"):
        load_reward_model(folder / "dpo")


def test_its_own_pairs_are_no_text_to_evaluate_on(folder, tuned, capsys):
    assert evaluate.main(["--run", str(folder / "dpo")]) == 2
    assert "has no held-out text of its own: give --data or --tasks" in capsys.readouterr().err
    assert evaluate.main(["--run", str(folder / "dpo"), "--data", str(folder / "texts.jsonl")]) == 0
    assert "perplexity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["preference.loss=null"], "data of format preference need a loss; set preference.loss to dpo, ipo"),
        (["preference.loss=ppo"], "preference.loss"),
        (["data.sources=[{path: texts.jsonl}]"], "preference.loss (dpo) compares pairs of answers; give sources"),
        (["run.init_from=null"], "set run.init_from to it, or preference.reference"),
        (["preference.reference=nowhere"], "nowhere is neither"),
        (["preference.loss=orpo", "preference.reference=qwen3"], "reference (qwen3) is for loss dpo, ipo, robust"),
        (["preference.label_smoothing=0.1", "preference.loss=ipo"], "label_smoothing (0.1) is for loss dpo, robust"),
        (["preference.simpo_gamma=2.0"], "simpo_gamma (2.0) is for loss simpo"),
        (["preference={loss: reward_model, beta: 0.2}"], "beta (0.2) is for loss dpo, ipo"),
        (["model.dropout=0.1"], "preference.loss does not support model.dropout"),
        (["adapters.rules=[{path: mlp, dropout: 0.1}]"], "set the dropout of all adapters.rules to 0"),
        (["train.z_loss=0.1"], "preference.loss does not support train.z_loss (0.1)"),
        (["parallel={pipeline: 2}"], "set preference.cache_reference=true, or parallel.pipeline=1"),
        (["data.augmentations=[{name: token_dropout, rate: 0.1}]"], "data.augmentations change rows of text"),
        (["train.sequence_length=6"], "set data.chat.too_long to drop, as answers are not cut"),
    ],
)
def test_errors_are_one_message_and_exit_code_2(folder, monkeypatch, capsys, overrides, message):
    monkeypatch.chdir(folder)
    assert command.main(["--config", "dpo.yaml", "run.name=refused", *overrides]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
