"""Goodput over several starts of a run."""

import errno
import json

import pytest

from jaxstack.errors import JaxstackError
from jaxstack.observe.config import ObserveConfig
from jaxstack.observe.run_log import FILE, Goodput, RunLog, wall_seconds


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
