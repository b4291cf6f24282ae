"""The comparison of a layout with one device before a run of several processes, and at its later starts."""

import os
import signal

import pytest

from tests.reliability.runs import Runs, finish, ranks, read_until

pytestmark = pytest.mark.exhaustive
LAYOUT = ("parallel={simulate_devices: 4, data: 1, fsdp: 2, tensor: 2}", "train.steps=12")
AGREES = "layout fsdp 2 x tensor 2: a small copy of the model has the loss and gradients of one device"


def test_two_processes_check_their_layout_once(runs: Runs):
    """All processes agree on the check; neither a restart by the launcher nor the next run makes it again."""
    launcher = runs.launch(["--processes", "2"], runs.train("split", *LAYOUT, "train.steps=100000"))
    before = "".join(read_until(launcher, "checked in|left out"))
    runs.wait_for_checkpoint(launcher, "split")
    os.kill(ranks(launcher)[1], signal.SIGKILL)
    after = "".join(read_until(launcher, "resuming from step"))
    runs.wait_for_step(launcher, "split", 12)
    launcher.send_signal(signal.SIGTERM)
    finish(launcher)
    assert before.count(AGREES) == 1 and AGREES not in after and "left out" not in before + after
    code, said = finish(runs.launch(["--processes", "2"], runs.train("again", *LAYOUT)))
    assert code == 0, said
    assert AGREES not in said and "left out" not in said
