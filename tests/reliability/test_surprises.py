"""Rows 4 and 11: a signal in the last save, and strange things in a run directory, through the user's command."""

import os
import shutil
import signal

import pytest

from jaxstack.resilience.exit_on_signal import signal_name
from tests.reliability.runs import Runs, finish, waiting

pytestmark = pytest.mark.exhaustive
STEPS = ("train.steps=6", "train.eval_every_steps=null")


@pytest.fixture(scope="module")
def done(runs: Runs) -> str:
    """Six steps."""
    code, said = finish(runs.start(runs.train("done", *STEPS)))
    assert code == 0, said
    return "done"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_last_save_stops_the_run(runs: Runs, signum, record, full):
    """Once the save is on disk; the last evaluation waits for the next start."""
    if signum == signal.SIGINT and not full:
        pytest.skip("--full")
    name = f"last-save-{signum:d}"
    folder = runs.folder / name / "checkpoints"
    process = runs.start(runs.train(name, *STEPS))
    for _ in waiting(process):
        if folder.exists() and any(entry.startswith(".saving-6-") for entry in os.listdir(folder)):
            break
    process.send_signal(signum)
    code, said = finish(process)
    assert code == 128 + signum and f"stopped by {signal_name(signum)} after step 6; checkpoint 6" in said, said
    assert "held-out loss" not in said and runs.saved(name)[-1] == 6
    code, said = finish(runs.start(runs.train(name, *STEPS)))
    assert code == 0 and "held-out loss" in said and "has all its 6 steps" in said, said
    record(11, f"{signum.name} in the last save", f"saved, exit code {128 + signum}; the next start evaluates")


def test_strange_things_in_a_run_directory(runs: Runs, done, record, full):
    """What is only told of a run may be damaged; what cannot be written is one message."""
    garbage = b'\xff\n5\n[]\n{"step": "x", "loss": 1}\n' + b"[" * 100_000 + b'\n{"step": 6, "lo'
    cases = {"metrics.jsonl": garbage, "sessions.json": b'[{"began": 1, "finished": true}]', "environment.json": None}
    for number, (victim, content) in enumerate(list(cases.items())[:: 1 if full else 2]):
        name = f"strange-{number}"
        shutil.copytree(runs.folder / done, runs.folder / name)
        path = runs.folder / name / victim
        if content is None:
            path.unlink()
            path.mkdir()
        else:
            path.write_bytes(content)
        code, said = finish(runs.start(runs.train(name, *STEPS, "train.steps=8")))
        assert "Traceback" not in said and "resuming from step 6" in said, said
        assert code == (1 if content is None else 0), said
        assert content is not None or f"jaxstack train: Is a directory ({path}): correct this" in said, said
    figure = "goes on past damaged logs; one message where a folder stands in a file's place"
    record(4, "damaged logs in a run directory", figure)
