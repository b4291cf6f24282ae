"""`parallel: auto`: the planner chooses the layout when a run starts."""

import jax
import pytest

from jaxstack.errors import ConfigError
from jaxstack.run import setting
from jaxstack.run.setting import forecast_here, with_training_layout
from jaxstack.run.train import train
from jaxstack.run_config import config_schema, load_config
from tests.small_runs import SMALL

AUTO = ["train.global_batch_size=16", "parallel=auto"]


def test_file_and_override(tmp_path):
    file = tmp_path / "auto.yaml"
    file.write_text("parallel: auto\ntrain: {global_batch_size: 16}\n")
    assert load_config(file).parallel.auto and load_config(None, ["parallel=auto"]).parallel.auto
    simulated = load_config(file, ["parallel.simulate_devices=4"]).parallel
    assert simulated.auto and simulated.simulate_devices == 4
    assert {"const": "auto"} in config_schema()["properties"]["parallel"]["anyOf"]
    with pytest.raises(ConfigError, match="auto: true chooses the degrees, but data=2 is given"):
        load_config(file, ["parallel.data=2"])


def test_layout_has_all_devices_and_the_configurations_batch():
    config = load_config(None, [*SMALL, *AUTO])
    for devices in (1, 2, 8):
        chosen = with_training_layout(config, devices)
        assert chosen.parallel.resolve(devices) == chosen.parallel and not chosen.parallel.auto
        assert chosen.train.global_batch_size == 16 and chosen.model.vocab_size == config.model.vocab_size
    assert forecast_here(chosen) is None or jax.default_backend() == "gpu"


def test_processes_whose_devices_have_different_memory_choose_one_layout(monkeypatch):
    """The planner takes the least memory of all of them."""
    monkeypatch.setattr(setting, "memory_per_device", lambda: 92 * 2**30)
    monkeypatch.setattr(setting, "all_gather", lambda name, own: [own, None, 46 * 2**30])
    assert setting._present_cluster(2).memory_bytes == 50 * 2**30
    monkeypatch.setattr(setting, "all_gather", lambda name, own: [own])
    assert setting._present_cluster(2).memory_bytes == 100 * 2**30


@pytest.mark.exhaustive
def test_a_run_trains_with_it(tmp_path):
    lines = []
    run = [f"run.dir={tmp_path}", "train.steps=2", "parallel.simulate_devices=8", "checkpoint.every_steps=100"]
    text = ["model.vocab_size=null", "data.tokenizer.name=byte", "train.eval_tokens=256"]
    config = load_config(None, [*SMALL, *AUTO, *run, *text])
    done = train(config, report=lines.append)
    assert any(line.startswith("parallel: auto chose ") for line in lines)
    parallel = done.config.parallel
    assert parallel.resolve(8) == parallel and not parallel.auto
    assert load_config(done.directory / "config.yaml").parallel == parallel
