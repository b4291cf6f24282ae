"""Rows 8 and 11: one run on changing numbers of processes; SIGTERM."""

import os
import signal
import time

import pytest

from tests.reliability.runs import Runs, alive, finish, ranks, read_until

pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def mixture(runs: Runs) -> str:
    """Two sources, one of them three times as often as its size, in packed rows."""
    other = runs.folder / "mixed"
    other.mkdir()
    for index, path in enumerate(sorted((runs.texts).iterdir())):
        if index % 3 == 0:
            (other / path.name).write_text(path.read_text().upper())
    return f"data.sources=[{{path: {runs.texts}, weight: 1}}, {{path: {other}, weight: 1}}]"


@pytest.fixture(scope="module")
def unbroken(runs: Runs, mixture) -> str:
    """Eighteen steps of one process."""
    code, said = finish(runs.start(runs.train("unbroken", "train.steps=18", mixture)))
    assert code == 0, said
    return "unbroken"


def test_two_then_one_then_four_processes(runs: Runs, unbroken, mixture, record, full):
    """Row 8. Every step logs the loss of its global batch: another sample in it would be another loss."""
    for processes, steps in ((2, 6), (1, 12), (4, 18)) if full else ((2, 12), (4, 18)):
        launcher = runs.launch(["--processes", str(processes)], runs.train("moved", f"train.steps={steps}", mixture))
        code, said = finish(launcher)
        assert code == 0, said
        assert processes == 1 or f"in {processes} processes" in said
        assert processes == 2 or f"resuming from step {steps - 6}" in said
    found = runs.losses("moved")
    wanted = runs.losses(unbroken)
    assert sorted(found) == sorted(wanted) == list(range(1, 19))
    worst = max(abs(found[step] / wanted[step] - 1) for step in wanted)
    assert worst < 1e-5
    evaluations = [
        [line["eval_loss"] for line in runs.lines(name) if "eval_loss" in line] for name in ("moved", unbroken)
    ]
    assert evaluations[0][-1] == pytest.approx(evaluations[1][-1], rel=1e-5)
    goodput = [line["goodput"] for line in runs.lines("moved") if "goodput" in line]
    assert 0 < goodput[-1] < 1 and (runs.folder / "moved" / "sessions.json").exists()
    record(
        8,
        "2 -> 1 -> 4 processes" if full else "2 -> 4 processes",
        f"18 steps of a mixture, each once; losses within {worst:.1e} (relative) of an unbroken run",
    )


@pytest.mark.parametrize("processes", [1, 3])
def test_sigterm_saves_one_agreed_step(runs: Runs, processes, record, full):
    """Row 11. The launcher forwards it; each rank may hear of it in another step."""
    if processes == 1 and not full:
        pytest.skip("one process is tested in tests/run/test_train.py; --full runs it")
    name = f"stopped-{processes}"
    overrides = ["train.steps=100000", "checkpoint.every_steps=100000", "parallel.simulate_devices=3"]
    overrides += ["train.global_batch_size=6", "train.eval_every_steps=50"]
    launcher = runs.launch(["--processes", str(processes)], runs.train(name, *overrides))
    runs.wait_for_step(launcher, name, 7)
    pids = ranks(launcher)
    assert sorted(pids) == list(range(processes))
    began = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    code, said = finish(launcher)
    seconds = time.monotonic() - began
    saved = runs.saved(name)
    assert code == 143 and len(saved) == 1 and saved[0] >= 7, said
    assert saved[0] == max(runs.losses(name))
    assert said.count(f"\njaxstack train: stopped by SIGTERM after step {saved[0]}; checkpoint {saved[0]}") == 1, said
    assert said.count("stopped by") == 1, "all have the same to say"
    assert not any(map(alive, pids.values())) and "Traceback" not in said
    assert seconds < 10, said
    record(
        11, f"SIGTERM, {processes} process{'es' * (processes > 1)}", f"one save, exit code 143 after {seconds:.1f} s"
    )


def test_sigterm_to_one_rank_stops_all(runs: Runs, full):
    """A scheduler may signal a single process; the launcher takes their agreed end for the end."""
    if not full:
        pytest.skip("--full")
    launcher = runs.launch(
        ["--processes", "2"], runs.train("one-hears", "train.steps=100000", "train.eval_every_steps=null")
    )
    runs.wait_for_step(launcher, "one-hears", 3)
    os.kill(ranks(launcher)[1], signal.SIGTERM)
    code, said = finish(launcher)
    assert code == 143 and said.count(f"after step {max(runs.losses('one-hears'))}") == 1, said


def test_a_rank_killed_and_a_rank_stopped_while_they_compile(runs: Runs, record, full):
    """A killed one is a failure, after which all start again; one that is stopped by a signal stops the run."""
    if not full:
        pytest.skip("--full")
    command = runs.train("compiling", "model.num_layers=24", "model.scan_layers=false", "train.steps=3")
    launcher = runs.launch(["--processes", "2"], command)
    for signum, last in ((signal.SIGKILL, "starting again"), (signal.SIGTERM, "stopped by SIGTERM outside of")):
        read_until(launcher, "MFLOP")
        time.sleep(0.5)
        pids = ranks(launcher)
        os.kill(pids[1], signum)
        said = "".join(read_until(launcher, last))
        assert "compiled the step" not in said
    code, said = finish(launcher)
    assert code == 143 and "starting again" not in said and not any(map(alive, pids.values())), said
    record(11, "SIGKILL, then SIGTERM, of one of 2 while they compile", "started again; the run stopped, exit code 143")


def test_sigterm_before_the_first_step(runs: Runs, record):
    """Whatever it is doing: importing, compiling, restoring."""
    process = runs.start(runs.train("early", "model.num_layers=24", "model.scan_layers=false"))
    for line in process.stdout or ():
        if "MFLOP" in line:
            break
    time.sleep(1.0)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, said = finish(process)
    seconds = time.monotonic() - began
    assert code == 143 and "stopped by SIGTERM outside of the training steps" in said and "Traceback" not in said
    assert "compiled the step" not in said and seconds < 5
    record(11, "SIGTERM during compilation", f"one line, exit code 143 after {seconds:.1f} s")
