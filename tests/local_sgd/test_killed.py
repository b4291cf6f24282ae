"""Workers of several processes, one of which is killed and started again: the run is the one that was never killed."""

import sys

import pytest

from tests.local_sgd.killed_train import killing
from tests.reliability.runs import Runs, finish
from tests.reliability.states import read_checkpoint

KILLED = (sys.executable, "-m", "tests.local_sgd.killed_train")
STEPS = ("train.steps=12", "checkpoint.async=false", "train.eval_every_steps=null")


def test_the_function_that_kills_counts_its_calls():
    doubled = killing(lambda x: 2 * x, 3)
    assert (doubled(1), doubled(x=2)) == (2, 4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("killed"))
    # Programs of several processes that come from the cache hang on simulated CPU devices.
    runs.environment["JAX_COMPILATION_CACHE_DIR"] = ""
    return runs


def end_of(runs: Runs, name: str) -> tuple[dict[int, float], dict[str, bytes]]:
    """The losses of a run, and the bits of its last checkpoint."""
    return runs.losses(name), read_checkpoint(runs.folder / name, 12)


@pytest.mark.exhaustive
def test_two_processes_go_on_exactly_from_the_last_checkpoint(runs: Runs):
    """One process dies in the second exchange, after step 8; the checkpoint of step 5 lies between two exchanges."""
    for name, kill in (("whole", ""), ("killed", "exchange:2:1")):
        layout = ("parallel={workers: 2, simulate_devices: 2}", "local_sgd={name: diloco, every: 4}")
        command = runs.train(name, *STEPS, *layout, command=KILLED)
        code, said = finish(runs.launch(["--processes", "2"], command, KILL=kill))
        assert code == 0, said
        assert ("rank 1 was ended by SIGKILL" in said, "resuming from step 5" in said) == (bool(kill),) * 2, said
    losses, state = end_of(runs, "killed")
    assert sorted(losses) == list(range(1, 13))
    assert (losses, state) == end_of(runs, "whole")


@pytest.mark.exhaustive
def test_what_a_killed_run_has_contributed_counts_once(runs: Runs):
    """One run dies when its changes of the second exchange are written; the other one waits, and takes them once."""

    def start(name: str, worker: int, kill: str = ""):
        meeting = f"folder: {runs.folder}/meeting-{name}, count: 2, worker: {worker}, every: 4, wait_seconds: 600"
        layout = ("parallel={simulate_devices: 1, data: 1}", f"local_sgd={{name: folder, {meeting}}}")
        return runs.start(runs.train(f"{name}-{worker}", *STEPS, *layout, command=KILLED), KILL=kill)

    for name, kill in (("whole", ""), ("killed", "wait:2")):
        one = start(name, 0)
        other = start(name, 1, kill)
        if kill:
            code, said = finish(other)
            assert code == -9, said
            other = start(name, 1)
        for process, resumed in ((other, bool(kill)), (one, False)):
            code, said = finish(process)
            assert code == 0 and "went on without" not in said, said
            assert ("resuming from step 5" in said) == resumed, said
    for worker in (0, 1):
        assert end_of(runs, f"killed-{worker}") == end_of(runs, f"whole-{worker}")
