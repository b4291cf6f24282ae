"""A whole step is measured, and XLA's options are told apart from the configuration."""

import math
import time

import jax
import numpy as np
import pytest

from benchmarks import steps
from benchmarks.clocks import GpuClocks, read_samples
from jaxstack.module_arrays.packed_base import NAME
from jaxstack.run_config import PACKED_STATE, load_config


def test_clock_of_the_slowest_gpu_and_power_of_all():
    text = "0, 1500, 690.5\n1, 1980, 600\n0, 1600, 689.5\n1, 1980, [N/A]\n1, 19"
    assert read_samples(text) == {"sm_mhz": 1550, "watts": 645}
    assert read_samples("NVIDIA-SMI has failed") == {}


def test_clocks_are_left_out_where_nothing_tells_them(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with GpuClocks() as clocks:
        pass
    assert clocks.row == {}


def test_clocks_are_asked_of_the_visible_gpus(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ncase "$*" in *--id=3*) echo "3, 1400, 700";; esac\nexec sleep 60\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with GpuClocks() as clocks:
        time.sleep(0.5)
    assert clocks.row == {"sm_mhz": 1400, "watts": 700}


def test_options_of_xla_are_no_configuration():
    options, settings = steps.split_options(["xla_gpu_x=false", "model.preset=tiny", "xla_y=3"])
    assert options == {"xla_gpu_x": False, "xla_y": "3"} and settings == ["model.preset=tiny"]


@pytest.mark.longer
@pytest.mark.skipif(jax.__version_info__ < PACKED_STATE, reason="this jax passes no 4-bit integers to a step")
def test_a_packed_base_has_random_weights_that_a_step_keeps():
    rules = "adapters.rules=[{path: attention|mlp, rank: 2}]"
    devices = jax.device_count()
    sizes = [f"train.global_batch_size={devices}", "train.sequence_length=32", f"parallel.data={devices}"]
    _, trainer = steps.open_trainer([*steps.TINY, *sizes, "model.scan_layers=false", rules, "packed_base=nf4"])
    base = trainer.state.params[NAME]
    leaves = jax.tree.leaves(base)
    before = [np.asarray(leaf).copy() for leaf in leaves]
    assert leaves and all(leaf.astype(np.float32).std() > 0 for leaf in before)
    assert not [path for path in trainer.frozen_parameters() if path.startswith(NAME)]
    batches = trainer.batches(0)
    assert math.isfinite(float(trainer.train_step(next(batches)[0])["loss"]))
    batches.close()
    after = jax.tree.leaves(trainer.state.params[NAME])
    assert all((np.asarray(leaf) == old).all() for leaf, old in zip(after, before, strict=True))


def test_frozen_parameters_save_flops():
    config = load_config(None, [*steps.TINY, "train.sequence_length=32"])
    found, fewer = (steps.rates(config, 1.0, 1, "NVIDIA H200", saved) for saved in (0.0, 1e6))
    tokens = config.train.global_batch_size * 32
    assert found["tflops_per_device"] - fewer["tflops_per_device"] == pytest.approx(tokens * 1e6 / 1e-3 / 1e12)
    assert found["tokens_per_second_per_device"] == fewer["tokens_per_second_per_device"]


@pytest.mark.exhaustive
def test_a_row_of_our_step():
    devices = jax.device_count()
    sizes = [f"train.global_batch_size={devices}", "train.sequence_length=32", f"parallel.data={devices}"]
    row = steps.measure_jaxstack([*steps.TINY, *sizes])
    assert row["devices"] == devices
    # The tokens are random and new at every step: there is nothing to learn but that all are equally likely.
    assert row["first_loss"] != row["last_loss"] == pytest.approx(math.log(512), abs=0.1)
    rate = devices * 32 / (row["milliseconds"] / 1e3) / devices
    assert row["tokens_per_second_per_device"] == pytest.approx(rate)
