"""A model that is too large for the machine is refused with numbers, before its data is prepared."""

import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxstack.distributed import device_setup
from jaxstack.errors import ConfigError
from jaxstack.models import preset_config
from jaxstack.run import memory_check
from jaxstack.run.build import make_trainer, resolve_model
from jaxstack.run.train import train
from jaxstack.run_config import config_from_tree, load_config

CONFIGS = Path(__file__).parents[2] / "configs"


def tiny_trainer(**parallel):
    tree = {"model": {"preset": "tiny", "vocab_size": 4096}, "parallel": parallel}
    return make_trainer(config_from_tree(tree), lambda step: {})


def test_a_model_too_large_is_refused_before_its_data_is_prepared(tmp_path, monkeypatch):
    monkeypatch.setattr(device_setup, "host_memory", lambda: 8 * 24 * 2**30)
    layout = ["parallel.fsdp=1", "parallel.data=8", "train.global_batch_size=8"]
    overrides = [*layout, f"run.dir={tmp_path}", "data.sources=[{path: /nowhere}]"]
    with pytest.raises(ConfigError) as raised:
        train(load_config(CONFIGS / "llama3-8b-fsdp4.yaml", overrides))
    text = str(raised.value)
    assert "89.7 GiB on each device (29.9 GiB of weights, 59.8 GiB of optimizer state), and gradients" in text
    assert "24.0 GiB of this host's memory" in text
    assert "gpt2-350m" in text and "parallel.fsdp=-1" in text
    assert not (tmp_path / "llama3-8b-fsdp4").exists()


@pytest.mark.parametrize(("data", "fsdp"), [(8, 1), (2, 4)])
def test_bytes_are_those_of_the_shards(monkeypatch, data, fsdp):
    monkeypatch.setattr(device_setup, "host_memory", lambda: 8)
    trainer = tiny_trainer(data=data, fsdp=fsdp)
    with pytest.raises(ConfigError, match="does not fit"):
        memory_check.check_memory(trainer)
    weights = memory_check._bytes_per_device(trainer.abstract_state.params, trainer.shardings.params)
    count = trainer.count_parameters()
    assert weights >= 4 * count / fsdp and weights < 4 * count / fsdp * 1.02


def test_a_model_that_fits_tightly_is_warned_about(monkeypatch):
    trainer = tiny_trainer(data=8)
    needed = 16 * trainer.count_parameters()
    monkeypatch.setattr(device_setup, "host_memory", lambda: 8 * int(1.1 * needed))
    assert "of gradients" in (memory_check.check_memory(trainer) or "")
    monkeypatch.setattr(device_setup, "host_memory", lambda: 8 * 10 * needed)
    assert memory_check.check_memory(trainer) is None


def test_an_unknown_memory_refuses_nothing(monkeypatch):
    monkeypatch.setattr(device_setup, "host_memory", lambda: None)
    assert memory_check.check_memory(tiny_trainer(data=8)) is None
    memory_check.check_state_size(load_config(CONFIGS / "llama3-8b-fsdp4.yaml", ["model.preset=llama3-70b"]))


def test_the_device_with_the_least_memory_counts(monkeypatch):
    gpus = [SimpleNamespace(memory_stats=lambda limit=limit: {"bytes_limit": limit}) for limit in (80, 40, 80)]
    monkeypatch.setattr(jax, "local_devices", lambda: gpus)
    assert device_setup.memory_per_device() == 40


@pytest.mark.quick
@pytest.mark.parametrize("layers", [2048, 4096])
def test_many_layers_that_do_not_fit_are_refused_before_they_are_traced(tmp_path, monkeypatch, layers):
    monkeypatch.setattr(device_setup, "host_memory", lambda: 2**30)
    overrides = ["model.preset=tiny", f"model.num_layers={layers}", "model.scan_layers=false", f"run.dir={tmp_path}"]
    lines: list[str] = []
    began = time.process_time()
    with pytest.raises(ConfigError, match="the model does not fit: its state takes"):
        train(load_config(None, [*overrides, "parallel.data=-1"]), report=lines.append)
    assert time.process_time() - began < 5 and not lines


@pytest.mark.parametrize(("optimizer", "state"), [("adamw", 8), ("lion", 4), ("sgd", 4), ("muon", 4), ("adafactor", 0)])
def test_the_estimate_counts_what_the_optimizer_keeps(optimizer, state):
    config = load_config(None, [f"optimizer.name={optimizer}"])
    assert memory_check._state_bytes_per_weight(config.optimizer) == state


def test_gradients_alone_refuse_nothing_but_are_warned_about(monkeypatch):
    trainer = tiny_trainer(data=8)
    monkeypatch.setattr(device_setup, "host_memory", lambda: 8 * int(1.1 * 12 * trainer.count_parameters()))
    assert (memory_check.check_memory(trainer) or "").endswith("it probably does not fit")


def test_many_unrolled_layers_are_announced_before_they_take_long(tmp_path):
    lines: list[str] = []
    overrides = ["model.num_layers=300", "model.scan_layers=false", f"run.dir={tmp_path}", "parallel.data=-1"]
    with pytest.raises(ConfigError, match="nowhere"):
        train(load_config(None, [*overrides, "data.sources=[{path: /nowhere}]"]), report=lines.append)
    assert any("each of the 300 layers is traced and compiled by itself" in line for line in lines)


@pytest.mark.parametrize(("ids", "said"), [(4096, "nearest: 4096."), (4000, "nearest: 4000, or 4032, a multiple")])
def test_a_vocabulary_smaller_than_the_tokenizers(ids, said):
    with pytest.raises(ConfigError, match=said):
        resolve_model(preset_config("tiny", vocab_size=512), ids)
