"""A whole step is measured, and XLA's options are told apart from the configuration."""

import math

import jax
import pytest

from benchmarks import steps


def test_options_of_xla_are_no_configuration():
    options, settings = steps.split_options(["xla_gpu_x=false", "model.preset=tiny", "xla_y=3"])
    assert options == {"xla_gpu_x": False, "xla_y": "3"} and settings == ["model.preset=tiny"]


@pytest.mark.slow
def test_a_row_of_our_step():
    devices = jax.device_count()
    sizes = [f"train.global_batch_size={devices}", "train.sequence_length=32", f"parallel.data={devices}"]
    row = steps.measure_jaxstack([*steps.TINY, *sizes])
    assert row["devices"] == devices
    # The tokens are random and new at every step: there is nothing to learn but that all are equally likely.
    assert row["first_loss"] != row["last_loss"] == pytest.approx(math.log(512), abs=0.1)
    rate = devices * 32 / (row["milliseconds"] / 1e3) / devices
    assert row["tokens_per_second_per_device"] == pytest.approx(rate)
