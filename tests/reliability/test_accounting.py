"""Energy and goodput of a run of two processes that is killed and goes on."""

import json
import os
import signal
import sys
import time

import pytest

from jaxstack.checkpoint.manifest import read_index
from tests.reliability.metered_train import WATTS
from tests.reliability.runs import Runs, finish, ranks

pytestmark = pytest.mark.exhaustive
METERED = (sys.executable, "-m", "tests.reliability.metered_train")
STEPS = 60


@pytest.mark.parametrize("victim", [0, 1])
def test_energy_and_goodput_after_a_restart_of_two_processes(runs: Runs, victim, record):
    """Four devices of 100 W in two processes; rank 0 writes, rank 1 reports to it. Both are measured in both starts."""
    name = f"metered-{victim}"
    overrides = [f"train.steps={STEPS}", "train.eval_every_steps=null", "checkpoint.every_steps=20"]
    overrides += ["observe.log_every=7"]
    launcher = runs.launch(["--processes", "2"], runs.train(name, *overrides, command=METERED))
    runs.wait_for_step(launcher, name, 35)
    killed_at = time.time()
    os.kill(ranks(launcher)[victim], signal.SIGKILL)
    code, said = finish(launcher)
    assert code == 0 and "resuming from step 20" in said, said
    sessions = json.loads((runs.folder / name / "sessions.json").read_text())
    used = json.loads((runs.folder / name / "energy.json").read_text())
    assert len(sessions) == 2 and sessions[1]["finished"]
    seconds = killed_at - sessions[0]["began"] + sessions[1]["ended"] - sessions[1]["began"]
    assert used["measured_gpu_seconds"] == pytest.approx(used["gpu_seconds"])
    assert used["joules"] == pytest.approx(WATTS * used["gpu_seconds"], rel=0.02)
    # The energy of compiling is counted too, before a session begins; a second before the kill may be lost.
    assert 4 * (seconds - 1.5) < used["gpu_seconds"] < 4 * (seconds + 30)
    values = [line for line in runs.lines(name) if "loss" in line]
    assert [line["step"] for line in values] == [1, *range(7, STEPS, 7), STEPS]
    last = values[-1]
    per_token = used["joules"] / last["tokens"]
    report = json.loads((runs.folder / name / "environment.json").read_text())["energy"]
    assert report["total_joules_per_token"] == pytest.approx(per_token, rel=0.05)
    for line in values[-4:]:  # power of all devices, in the second start as well
        if "power_watts" in line:
            assert line["power_watts"] == pytest.approx(4 * WATTS, rel=0.2), line
    # Steps 15 to 20 stand in no line before the restart: the checkpoint has their time.
    saved = read_index(runs.folder / name / "checkpoints" / "20")["extra"]["train_seconds"]
    seconds_at = {line["step"]: line["train_seconds"] for line in values}
    assert seconds_at[14] + 0.3 < saved < seconds_at[21]
    wall = sessions[1]["ended"] - sessions[0]["began"]
    assert 0.1 * (STEPS - 2) < last["train_seconds"] < seconds - 0.1 * 14, "each step counts once"
    assert last["goodput"] == pytest.approx(last["train_seconds"] / wall, rel=0.1)
    record(
        6,
        f"energy after SIGKILL of rank {victim} of 2 (simulated counters)",
        f"{used['joules']:.0f} J of 4 devices of {WATTS:.0f} W in {used['gpu_seconds'] / 4:.1f} s of both starts; "
        f"goodput {100 * last['goodput']:.0f} % of {wall:.0f} s",
    )
