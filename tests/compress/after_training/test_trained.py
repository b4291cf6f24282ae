"""Compression of a small model that was trained on real text."""

import json
from pathlib import Path

import jax
import pytest

from benchmarks.compression.compression_methods import SETTINGS, model_rows, train
from jaxstack.data.loader import open_data
from jaxstack.run.build import make_trainer
from jaxstack.run_config import load_config


@pytest.mark.exhaustive
def test_sparsegpt_costs_at_most_half_of_what_magnitude_pruning_does(tmp_path):
    text = Path(json.__file__).parents[1] / "asyncio" / "*.py"  # Python's standard library, as in the quickstart
    overrides = [
        "model.preset=tiny",
        "model.hidden_size=64",
        "model.num_layers=2",
        "model.intermediate_size=192",
        "train.global_batch_size=8",
        "train.sequence_length=128",
        "optimizer.learning_rate=3.0e-3",
        "schedule={name: linear, warmup_steps: 20}",
        "data.tokenizer.name=byte",
        f"data.sources=[{{path: '{text}'}}]",
        f"data.cache_dir={tmp_path}",
        "train.steps=400",
        "model.vocab_size=320",
    ]
    config = load_config(None, overrides)
    data = open_data(config.data, sequence_length=128, seed=0)
    trainer = make_trainer(config, data, jax.devices()[:1])
    train(trainer)
    pruning = {"50 % zeros": (SETTINGS["50 % zeros"][0], SETTINGS["50 % zeros"][2])}
    rows = {row["implementation"]: row for row in model_rows(trainer, data, 400, 64, 64, pruning)}
    rises = {name: rows[name]["perplexity_rise"] for name in ("magnitude", "sparsegpt")}
    assert rows["float32"]["perplexity"] < 12  # of 256 bytes: it learned
    assert 0 < rises["sparsegpt"] <= 0.5 * rises["magnitude"]
