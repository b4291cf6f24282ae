"""Row 13, a NaN gradient once and ten times, and row 18, a flipped bit in the memory of one device."""

import re
import sys

import numpy as np
import pytest

from jaxstack.checkpoint.leaves import LeafSpec
from jaxstack.checkpoint.manifest import read_index
from tests.reliability.runs import FAULTY, Runs, finish
from tests.reliability.states import read_checkpoint

pytestmark = pytest.mark.exhaustive


def poisoned(runs: Runs, name: str, steps: int, kind: str, *when: int) -> tuple[int, str]:
    """Exit code and output."""
    command = [sys.executable, "-m", "tests.reliability.poisoned_train", str(runs.folder / name), str(steps), kind]
    return finish(runs.start([*command, ",".join(map(str, when))], JAX_NUM_CPU_DEVICES="4"))


def changed(runs: Runs, one: tuple[str, int], other: tuple[str, int]) -> set[str]:
    """The leaves of two checkpoints that differ."""
    found, wanted = (read_checkpoint(runs.folder / name, step) for name, step in (one, other))
    assert found.keys() == wanted.keys()
    return {name for name in found if found[name] != wanted[name]}


def test_one_nan_is_one_skip_without_a_trace(runs: Runs, record):
    code, said = poisoned(runs, "nan-once", 11, "nan", 11)
    assert code == 0 and said.count("was skipped") == 1, said
    code, said = poisoned(runs, "calm", 10, "nan")
    assert code == 0 and "was skipped" not in said, said
    assert changed(runs, ("nan-once", 11), ("calm", 10)) == {"step", "skipped"}
    leaves = len(read_checkpoint(runs.folder / "calm", 10))
    figure = f"one skip; of {leaves} leaves only the step and the count of skips differ from a run without it"
    record(13, "a NaN gradient once", figure)


def test_ten_nans_end_the_run_at_a_good_checkpoint(runs: Runs, record):
    name = "nan-ten"
    code, said = poisoned(runs, name, 40, "nan", *range(14, 40))
    assert code == 1 and said.count("was skipped") == 10 and "Traceback" not in said, said
    assert "10 steps in a row" in said and "rolled back to checkpoint 10" in said
    assert runs.saved(name) == [5, 10], "none is written while steps are skipped"
    for step in runs.saved(name):
        bits = read_checkpoint(runs.folder / name, step)
        specs = read_index(runs.folder / name / "checkpoints" / str(step))["leaves"]
        for leaf, fields in specs.items():
            if LeafSpec.from_json(fields).dtype == "float32":
                assert np.isfinite(np.frombuffer(bits[leaf], np.float32)).all(), leaf
    record(
        13, "NaN gradients without end", "ten skips, exit code 1; every number on disk finite, the newest from before"
    )


WORKERS = (
    "train.steps=24", "train.eval_every_steps=null", "train.global_batch_size=8", "parallel.workers=2",
    "parallel.data=2", "local_sgd.every=100", "resilience.max_skipped_steps=4",
)  # fmt: skip


@pytest.mark.parametrize(
    ("count", "starts", "saved"), [(1, 1, [5, 11, 15, 20, 24]), (5, 2, [5, 10, 15, 20, 24])], ids=["once", "too often"]
)
def test_processes_agree_on_a_step_that_only_the_worker_of_one_of_them_skipped(runs: Runs, count, starts, saved):
    """Each process reads the losses of its own workers, and a save is due at step 10, which rank 1 skips."""
    name = f"nan-worker-{count}"
    command = runs.train(name, *WORKERS, command=FAULTY)
    first = str(11 - count)
    launcher = runs.launch(
        ["--processes", "2"], command, FAULT="nan", FAULT_RANK="1", FAULT_STEP=first, FAULT_COUNT=str(count)
    )
    code, said = finish(launcher)
    assert code == 0 and said.count("starting again") == starts - 1 and "no sign of life" not in said, said
    assert runs.saved(name) == saved
    if starts == 2:
        assert re.search(r"steps in a row had .* rolled back to checkpoint 5,", said), said


def test_a_flipped_bit_of_one_copy_is_named_before_it_is_saved(runs: Runs, record):
    """Row 18. Flipped after step 9; looked at with the save of step 10, or at step 8 and 12."""
    code, said = poisoned(runs, "flip", 40, "flip", 9)
    found = re.search(
        r"silent corruption: after step (\d+) .*\n +(params/\S+) differs .*: device (\d) \(process 0\)\n", said
    )
    assert code == 1 and found and "Traceback" not in said, said
    assert (found[1], found[3]) == ("10", "3")
    assert runs.saved("flip") == [5]
    code, said = poisoned(runs, "flip", 12, "flip")
    assert code == 0 and "resuming from step 5" in said, said
    code, _ = poisoned(runs, "calm-12", 12, "flip")
    assert code == 0 and not changed(runs, ("flip", 12), ("calm-12", 12))
    figure = f"{found[2]} on device 3 named one step later, not saved; the same command went on bit-equal to a calm run"
    record(18, "one flipped bit in one device's copy of a weight", figure)
