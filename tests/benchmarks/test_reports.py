"""Events of a process outlive its crash, and a process that hangs says where."""

import signal
import subprocess
import sys
import time
from pathlib import Path

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


def test_a_process_ends_with_a_benchmark_that_is_stopped():
    child = [sys.executable, "-c", "import os, time; print('{\"pid\": %d}' % os.getpid(), flush=True); time.sleep(60)"]
    code = f"from benchmarks.reports import events\nfor event in events({child!r}, 60): print(event['pid'], flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        process = Path("/proc", benchmark.stdout.readline().strip())
        assert _runs(process)
        benchmark.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 20
    while _runs(process):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it is gone
        return False
