"""A whole step is measured, and XLA's options are told apart from the configuration."""

import math
import time

import jax
import pytest

from benchmarks import steps
from benchmarks.clocks import GpuClocks, read_samples


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
