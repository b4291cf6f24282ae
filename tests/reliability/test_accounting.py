"""Energy and goodput of a run of two processes that is killed and goes on."""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from jaxstack.checkpoint import memory_folder
from jaxstack.checkpoint.manifest import read_index
from tests.reliability.metered_train import WATTS
from tests.reliability.runs import FAULTY, Runs, environment_of, finish, ranks, read_until, waiting

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


def test_the_time_of_all_starts_counts_where_rank_0_goes_on_from_the_copies_of_rank_1(runs: Runs, record):
    """Each batch comes 0.25 s late. The second fault takes the copies of rank 0, as one of the first node would."""
    name = "borrowed-time"
    overrides = ["train.steps=36", "train.eval_every_steps=null", "checkpoint.every_steps=1000"]
    overrides += ["checkpoint.memory_every_steps=3"]
    command = runs.train(name, *overrides, command=FAULTY)
    launcher = runs.launch(["--processes", "2"], command, FAULT="slow", FAULT_RANK="0", FAULT_STEP="0")

    def wait_until_copied(step: int) -> None:
        for _ in waiting(launcher):
            if any(line.get("memory_copy_step", -1) >= step for line in runs.lines(name)):
                return

    wait_until_copied(18)
    os.kill(ranks(launcher)[1], signal.SIGKILL)
    said = "".join(read_until(launcher, "resuming from step"))
    first = int(said.rpartition("resuming from step ")[2].split()[0])
    wait_until_copied(first + 3)
    pids = ranks(launcher)
    folder = Path(environment_of(pids[0])[memory_folder.VARIABLE])
    launcher.send_signal(signal.SIGSTOP)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    for kind in ("own", "neighbour"):
        shutil.rmtree(folder / kind / "0of2")
    launcher.send_signal(signal.SIGCONT)
    said = "".join(read_until(launcher, "resuming from step"))
    assert "from memory: own 1, neighbour 0, other layout 1," in said, said
    second = int(said.rpartition("resuming from step ")[2].split()[0])
    code, said = finish(launcher)
    assert code == 0, said
    line = next(line for line in runs.lines(name) if line["step"] == second + 1)
    before = line["train_seconds"] - line["step_time_seconds"]
    assert second >= first + 3 >= 21 and before > 0.25 * (second - 1), "each step of both starts counts"
    record(
        6,
        "time of steps after two restarts, of which the second from another rank's copies (0.25 s a batch)",
        f"{before:.1f} s of {second} steps counted",
    )
