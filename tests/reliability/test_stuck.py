"""Row 12 and row 2: ranks that hang, and ranks that die."""

import json
import os
import random
import re
import signal
import sys
import time

import pytest

from jaxstack.launch.cleanup import list_files
from tests.reliability.runs import FAULTY, TRAIN, Runs, alive, finish, ranks, read_until

pytestmark = pytest.mark.exhaustive
LIMIT = 20
QUICK = ("checkpoint.every_steps=4", "train.eval_every_steps=null")


def started(said: str) -> int:
    """How often the run was taken up or begun."""
    return said.count("compiled the step")


STUCK = {
    "gil": "the interpreter held",
    "sleep": "a rank asleep",
    "stop": "SIGSTOP",
    "device": "a device that never finishes a step, as in a collective that a peer never joins",
    "reader": "a data reader that hangs",
    "evaluation": "a rank asleep in an evaluation",
}


@pytest.mark.parametrize("fault", STUCK)
def test_a_stuck_rank_is_named_ended_and_restarted(runs: Runs, fault, record, full):
    """Each is noticed from outside, by the process's silence."""
    if fault not in ("gil", "device") and not full:
        pytest.skip("--full")
    before = list_files()
    name = f"stuck-{fault}"
    overrides = ["train.steps=3000" if fault == "stop" else "train.steps=24", *QUICK]
    overrides += ["train.eval_every_steps=10"] if fault == "evaluation" else []
    command = runs.train(name, *overrides, command=TRAIN if fault == "stop" else FAULTY)
    options = ["--processes", "2", "--step-seconds", str(LIMIT)]
    if fault == "device":  # the run sets the limit
        options = options[:2]
        command += [f"resilience.step_seconds={LIMIT}"]
    launcher = runs.launch(options, command, FAULT=fault, FAULT_RANK="1", FAULT_STEP="10")
    said = read_until(launcher, r"^step 6/")
    assert "starting again" not in "".join(said)
    pids = ranks(launcher)
    if fault == "stop":
        os.kill(pids[1], signal.SIGSTOP)
    began = time.monotonic()
    named = read_until(launcher, "stacks of rank 1")
    noticed = time.monotonic() - began
    read_until(launcher, "starting again")
    restarted = time.monotonic() - began
    assert not any(map(alive, pids.values())), "all ranks of the failed start are gone"
    if fault == "stop":
        runs.wait_for_step(launcher, name, max(runs.losses(name)) + 5)
        launcher.send_signal(signal.SIGTERM)
    code, said = finish(launcher)
    assert code == (143 if fault == "stop" else 0), said
    assert "resuming from step" in said and started(said) == 1
    assert fault == "stop" or sorted(runs.losses(name)) == list(range(1, 25))
    phase = "evaluate" if fault == "evaluation" else "train"
    assert re.search(rf"rank 1 gave no sign of life for \d+ s in phase '{phase}' at step \d+", "".join(named))
    assert noticed < LIMIT + 30 and restarted < LIMIT + 30
    assert list_files() <= before
    ended = f"all ended and started again after {restarted:.0f} s"
    record(12, STUCK[fault], f"stacks after {noticed:.0f} s (limit {LIMIT} s), {ended}")


def test_a_rank_that_alone_lacks_memory_ends_all_and_is_named(runs: Runs, record):
    """The others wait for it in a collective. They go on from a checkpoint that no later save has followed yet."""
    name = "memory"
    command = runs.train(name, "train.steps=12", *QUICK, "checkpoint.async=false", command=FAULTY)
    launcher = runs.launch(["--processes", "2"], command, FAULT="memory", FAULT_RANK="1", FAULT_STEP="7")
    read_until(launcher, r"^step 4/")
    began = time.monotonic()
    said = "".join(read_until(launcher, "starting again"))
    seconds = time.monotonic() - began
    assert re.search(r"\[1\] .*out of device memory: 8.00 GiB could not be allocated", said)
    assert re.search(r"rank 1 exited with 1.*; step 4 is saved\n", said), said
    code, said = finish(launcher)
    assert code == 0 and "resuming from step 4" in said and sorted(runs.losses(name)) == list(range(1, 13)), said
    record(12, "a rank that alone lacks memory", f"named, all ended and started again within {seconds:.0f} s")


@pytest.mark.parametrize("fault", ["evaluation", "evaluation-memory"])
def test_a_rank_of_the_command_evaluate_that_hangs_or_lacks_memory_ends_all(runs: Runs, fault, record):
    """As one of a run: the others wait for it in a collective, and at the exit of a process that has failed."""
    name = f"evaluated-{fault}"
    code, said = finish(runs.start(runs.train(name, "train.steps=2", *QUICK)))
    assert code == 0, said
    command = ["--run", str(runs.folder / name), "--json"]
    code, alone = finish(runs.start([sys.executable, "-m", "jaxstack.evaluate", *command]))
    began = time.monotonic()
    launcher = runs.launch(
        ["--processes", "2", "--start-seconds", str(LIMIT)], [*FAULTY, *command],
        FAULT=fault, FAULT_RANK="1", FAULT_COMMAND="jaxstack.evaluate",
    )  # fmt: skip
    said = "".join(read_until(launcher, "starting again"))
    seconds = time.monotonic() - began
    if fault == "evaluation":
        assert re.search(r"rank 1 gave no sign of life for \d+ s in phase 'start'", said), said
        assert re.search(r'faulty_train.py", line \d+ in _sleep', said), said
    else:
        assert re.search(r"\[1\] jaxstack evaluate: out of device memory: 8.00 GiB could not be allocated", said)
        assert "rank 1 exited with 1" in said and seconds < 2 * LIMIT
    code, said = finish(launcher)
    assert code == 0 and said.count("eval_loss") == 1, said
    losses = [json.loads(text[text.index("{") : text.index("}") + 1])["eval_loss"] for text in (alone, said)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    what = "asleep" if fault == "evaluation" else "that alone lacks memory"
    record(12, f"a rank {what} in the command evaluate", f"all ended and started again after {seconds:.0f} s")


def test_stacks_say_where(runs: Runs, full):
    """The dump names the line that hangs."""
    if not full:
        pytest.skip("--full")
    name = "where"
    launcher = runs.launch(
        ["--processes", "1", "--step-seconds", "15", "--max-restarts", "0"],
        runs.train(name, "train.steps=24", *QUICK, command=FAULTY), FAULT="sleep", FAULT_RANK="0", FAULT_STEP="10",
    )  # fmt: skip
    code, said = finish(launcher)
    assert code == 1 and "giving up" in said
    assert re.search(r"rank 0 gave no sign of life for \d+ s in phase 'train' at step 10 \(limit 15 s\)", said)
    assert re.search(r'faulty_train.py", line \d+ in _faulty_step', said)


def test_a_random_rank_killed_during_saves(runs: Runs, record, kills):
    """Row 2. A save at every step; SIGKILL at a random moment, to a random rank."""
    name = "killed"
    steps = 1000 * kills
    overrides = [f"train.steps={steps}", *QUICK, "checkpoint.every_steps=1", "checkpoint.keep=3"]
    launcher = runs.launch(["--processes", "2", "--max-restarts", "3"], runs.train(name, *overrides))
    slowest = 0.0
    resumed_at = 0
    for _ in range(kills):
        runs.wait_for_step(launcher, name, resumed_at + 4)
        pids = ranks(launcher)
        time.sleep(random.uniform(0, 1.5))
        kept = runs.saved(name)
        began = time.monotonic()
        os.kill(pids[random.choice(list(pids))], signal.SIGKILL)
        for line in launcher.stdout or ():
            if "starting again" in line:
                slowest = max(slowest, time.monotonic() - began)
            if match := re.search(r"resuming from step (\d+)", line):
                resumed_at = int(match[1])
                break
        assert not any(map(alive, pids.values()))
        assert resumed_at >= max(kept, default=0), "a committed step was lost"
    runs.wait_for_step(launcher, name, resumed_at + 2)
    launcher.send_signal(signal.SIGTERM)
    code, said = finish(launcher)
    assert code == 143 and "damaged" not in said, said
    losses = runs.losses(name)
    assert sorted(losses) == list(range(1, len(losses) + 1)) and 0 < slowest < 10 + 5
    record(2, f"{kills} x SIGKILL of a random rank of 2", f"no committed step lost; peer ended within {slowest:.1f} s")


def test_a_straggler_is_named(runs: Runs, record, full):
    """The rank whose data comes 0.1 s late at each step, not those that wait for it."""
    if not full:
        pytest.skip("--full")
    program = (
        "import sys; from jaxstack.launch import supervisor as s; from jaxstack.launch.__main__ import main; "
        "s._STRAGGLER_SECONDS = 4; sys.exit(main())"
    )
    command = runs.train("lagging", "train.steps=120", *QUICK, "checkpoint.every_steps=1000", command=FAULTY)
    launch = [sys.executable, "-c", program, "--processes", "2", "--", *command]
    code, said = finish(runs.start(launch, FAULT="lag", FAULT_RANK="1", FAULT_STEP="0"))
    assert code == 0, said
    assert "rank 1 holds the others up" in said and "rank 0 holds" not in said
    record(12, "a rank that is slow on its host", re.search(r"it spends .*", said)[0])
