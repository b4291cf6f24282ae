"""Runs of the launcher that a benchmark times."""

import json
import os

import pytest

from benchmarks.launched import run_steps
from jaxstack.launch.child import descendants

SMALL = (
    "model.preset=tiny", "model.num_layers=1", "parallel={simulate_devices: 2, data: 1, fsdp: 2}",
    "train.sequence_length=32", "train.global_batch_size=4", "observe.fail_on_fallback=false",
)  # fmt: skip


@pytest.mark.longer
def test_a_run_is_timed_and_leaves_no_process(tmp_path):
    row = run_steps("configs/quickstart.yaml", tmp_path, "short", SMALL, processes=2, steps=4, warm_up=2)
    assert row["processes"] == 2 and row["devices"] == 2 and row["steps"] >= 2
    assert 0 < row["median_step_seconds"] <= row["slowest_step_seconds"]
    ran = json.loads((tmp_path / "short" / "environment.json").read_text())["ran"]
    assert "compiler_options" in ran, "benchmarks/distributed/processes.py reads how permutes were compiled"
    assert not [pid for pid in descendants(os.getpid()) if b"jaxstack" in command(pid)]


@pytest.mark.longer
def test_a_run_that_hangs_ends_with_the_stacks_of_its_processes(tmp_path):
    with pytest.raises(SystemExit) as caught:
        run_steps("configs/quickstart.yaml", tmp_path, "late", SMALL, processes=2, steps=4, warm_up=2, start_seconds=1)
    message = str(caught.value)
    assert message.startswith("the run ended too early:") and "stacks of rank 1" in message and "File " in message


def command(pid: int) -> bytes:
    """The command line of a process; empty if it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""
