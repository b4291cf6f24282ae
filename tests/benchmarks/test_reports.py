"""Events of a process outlive its crash, and a process that hangs says where."""

import sys

import pytest

from benchmarks.reports import events

EVENTS = "import json, time; print(json.dumps({'loss': 1.5}), flush=True); "


def test_events_before_a_crash_are_kept(capsys):
    found = list(events([sys.executable, "-c", EVENTS + "raise SystemExit('no memory')"], 30))
    assert found[0] == {"loss": 1.5} and found[1]["failed"] == "exit 1: no memory" and len(found) == 2


@pytest.mark.longer
def test_a_process_without_a_word_is_killed_and_its_stack_is_printed(capsys):
    code = EVENTS + "\ndef stuck():\n    time.sleep(60)\nstuck()"
    found = list(events([sys.executable, "-c", code], 2))
    assert found == [{"loss": 1.5}, {"failed": "hangs: not a word for 2 s"}]
    assert "in stuck" in capsys.readouterr().err
