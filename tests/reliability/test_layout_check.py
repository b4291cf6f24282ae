"""The comparison of a layout with one device before a run of several processes, and at its later starts."""

import os
import re
import signal
import time

import pytest

from tests.reliability.runs import FAULTY, Runs, finish, ranks, read_until

pytestmark = pytest.mark.exhaustive
LIMIT = 20
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


def test_a_step_of_the_check_that_never_ends_is_named_ended_and_tried_again(runs: Runs, record):
    """As in a collective that a peer never joins. The second step of each process is that in the run's layout."""
    command = runs.train("hangs", *LAYOUT, f"resilience.step_seconds={LIMIT}", command=FAULTY)
    launcher = runs.launch(
        ["--processes", "2"], command, FAULT="device", FAULT_RANK="1", FAULT_STEP="2",
        JAX_COMPILATION_CACHE_DIR=str(runs.folder / "compiled"),  # without the record of the other test
    )  # fmt: skip
    began = time.monotonic()
    said = "".join(read_until(launcher, "starting again"))
    seconds = time.monotonic() - began
    assert re.search(rf"rank 1 gave no sign of life for \d+ s in phase 'check' at step 0 \(limit {LIMIT} s\)", said)
    assert re.search(r'verify_layout.py", line \d+ in _loss_and_gradients', said)
    code, said = finish(launcher)
    assert code == 0 and said.count(AGREES) == 1 and sorted(runs.losses("hangs")) == list(range(1, 13)), said
    ended = f"all ended and started again after {seconds:.0f} s (with the start)"
    record(12, "a step of the layout check that never ends", f"stacks (limit {LIMIT} s), {ended}")
