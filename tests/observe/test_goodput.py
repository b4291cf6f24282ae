"""Goodput over several starts of a run."""

import contextlib
import errno
import json
from types import MappingProxyType

import pytest

from jaxstack.errors import JaxstackError
from jaxstack.observe import run_log
from jaxstack.observe.config import ObserveConfig
from jaxstack.observe.run_log import FILE, Goodput, RunLog, wall_seconds
from jaxstack.observe.throughput import Meter


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_one_start(tmp_path):
    clock = Clock()
    goodput = Goodput(tmp_path, 0, 0.0, clock)
    clock.now += 20  # compiling
    goodput.add(60.0)
    clock.now += 60
    assert goodput.read() == {"train_seconds": 60.0, "goodput": 0.75}


def test_a_crash_costs_what_is_repeated_and_the_time_until_the_next_start(tmp_path):
    clock = Clock()
    first = Goodput(tmp_path, 0, 0.0, clock)
    first.record()
    first.add(90.0)
    clock.now += 100  # then killed; only 40 of the 90 seconds were before the last checkpoint
    clock.now += 50
    second = Goodput(tmp_path, 8, 40.0, clock)
    second.add(50.0)
    clock.now += 50
    assert second.read() == {"train_seconds": 90.0, "goodput": 90 / 200}


def test_a_process_that_records_nothing_goes_on_from_the_time_before():
    """Its copies in memory may be those that the first process goes on from."""
    goodput = Goodput(None, 8, 40.0, Clock())
    goodput.add(50.0)
    assert goodput.read()["train_seconds"] == 90.0


def test_the_time_after_a_finished_run_does_not_count(tmp_path):
    clock = Clock()
    first = Goodput(tmp_path, 0, 0.0, clock)
    first.add(50.0)
    clock.now += 100
    first.close(finished=True)
    clock.now += 86400
    later = Goodput(tmp_path, 10, 50.0, clock)
    later.record()
    clock.now += 100
    later.add(50.0)
    assert later.read()["goodput"] == 0.5
    assert [session["step"] for session in json.loads((tmp_path / FILE).read_text())] == [0, 10]


def test_a_clock_that_was_set_back_takes_no_time_away():
    sessions = [{"began": 5000.0}, {"began": 1000.0}, {"began": 1100.0, "ended": 1200.0, "finished": True}]
    assert wall_seconds(sessions, 9000.0) == 200.0


@pytest.mark.parametrize(
    "text", ["{", "[{", "[5]", '{"began": 1}', '[{"began": "x"}]', '[{"began": 1, "finished": true}]', "[" * 100_000]
)
def test_a_damaged_file_begins_anew(tmp_path, text):
    """Steps of before are not taken into a share of a time that is not known."""
    (tmp_path / FILE).write_text(text)
    clock = Clock()
    goodput = Goodput(tmp_path, 8, 40.0, clock)
    clock.now += 100
    goodput.add(50.0)
    assert goodput.read() == {"train_seconds": 50.0, "goodput": 0.5}


@pytest.mark.parametrize(
    ("start", "number", "failure"),
    [
        (5, errno.ENOSPC, None),
        (5, errno.EDQUOT, None),
        (5, errno.EACCES, OSError),
        (0, errno.ENOSPC, JaxstackError),
    ],
)
def test_a_run_that_goes_on_does_so_on_a_full_disk(tmp_path, start, number, failure):
    said = []
    log = RunLog(tmp_path, 20, ObserveConfig(progress=False), said.append)
    try:
        with log.writing(start):
            raise OSError(number, "the reason")
    except (JaxstackError, OSError) as error:
        assert failure is not None and isinstance(error, failure) and "the reason" in str(error) and not said
    else:
        assert failure is None and len(said) == 1 and "the reason; going on" in said[0]


def log_steps(folder, steps, waiting=MappingProxyType({})):
    """Log steps whose loss is the square of their number, after those that are done; return what waits, and the log."""
    start = steps[0] - 1
    log = RunLog(folder, 20, ObserveConfig(progress=False, log_every=5), lambda text: None)
    with contextlib.ExitStack() as stack:
        log.show_progress(stack, start)
        log.open_trackers(stack, start, {}, waiting)
        meter = Meter(1.0, 1, "cpu")
        log.begin(start, meter, {}, [])
        for step in steps:
            meter.add(8)
            log.log_step(step, {"loss": float(step**2)}, 8 * step, 0)
        return log.waiting(), log


def test_a_mean_of_losses_goes_on_after_a_restart(tmp_path):
    """That of steps 6 to 10, although the run was killed after step 7 and resumed from there."""
    log_steps(tmp_path / "whole", range(1, 11))
    waiting, _ = log_steps(tmp_path / "broken", range(1, 8))
    log_steps(tmp_path / "broken", range(8, 11), waiting)
    whole, broken = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "broken")
    )
    assert [line["mean_loss"] for line in whole] == [1.0, (4 + 9 + 16 + 25) / 4, (36 + 49 + 64 + 81 + 100) / 5]
    assert [(line["step"], line["mean_loss"]) for line in broken] == [(x["step"], x["mean_loss"]) for x in whole]
    assert not log_steps(tmp_path / "even", range(1, 6))[0], "after a logged step nothing waits"


def test_what_comes_before_the_first_step_is_wall_time(tmp_path, monkeypatch):
    """Such as compiling, between opening the log and `begin`."""
    clock = Clock()
    monkeypatch.setattr(run_log, "steady_clock", lambda: clock)
    log = RunLog(tmp_path, 20, ObserveConfig(progress=False), lambda text: None)
    clock.now += 30
    with contextlib.ExitStack() as stack:
        log.show_progress(stack, 0)
        log.open_trackers(stack, 0, {})
        meter = Meter(1.0, 1, "cpu", clock)
        log.begin(0, meter, {}, [])
        clock.now += 10
        meter.add(8)
        log.log_step(1, {"loss": 1.0}, 8, 0)
    assert log.last_values["goodput"] == 10 / 40
