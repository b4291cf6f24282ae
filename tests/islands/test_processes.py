"""Islands in processes of their own: the losses of one process, also if one of them is killed."""

import os
import signal

import numpy as np
import pytest

from tests.reliability.runs import FAULTY, Runs, finish, ranks
from tests.reliability.states import read_checkpoint

pytestmark = pytest.mark.exhaustive
METHODS = {
    "diloco": "islands={name: diloco, every: 3, momentum: 0.3}",
    "streaming": "islands={name: streaming, every: 4, fragments: 2, delay: 2}",
}
LAYOUT = "parallel={simulate_devices: 4, islands: 2, data: 2}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("islands"))


def evaluations(runs: Runs, name: str) -> list[float]:
    """The held-out losses of a run, and the distance of its islands."""
    values = [line[key] for line in runs.lines(name) for key in ("eval_loss", "eval_island_distance") if key in line]
    assert len(values) >= 4
    return values


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_as_one_also_after_a_kill(runs: Runs, method):
    """Rank 1 is killed in step 9; the launcher starts both again from checkpoint 5."""
    overrides = (LAYOUT, METHODS[method])
    code, said = finish(runs.start(runs.train(f"{method}-one", *overrides)))
    assert code == 0, said
    code, said = finish(runs.launch(["--processes", "2"], runs.train(f"{method}-two", *overrides)))
    assert code == 0 and "in 2 processes" in said, said
    # The first process logs the losses of its own island, so what both have trained is compared.
    one, two = (read_checkpoint(runs.folder / f"{method}-{name}", 16) for name in ("one", "two"))
    assert sorted(one) == sorted(two)
    params = [name for name in one if "params" in name]
    assert len(params) > 10
    for name in params:
        wanted, found = (np.frombuffer(stored[name], np.float32) for stored in (one, two))
        np.testing.assert_allclose(found, wanted, atol=2e-4, err_msg=name)
    assert evaluations(runs, f"{method}-two") == pytest.approx(evaluations(runs, f"{method}-one"), rel=1e-5)

    name = f"{method}-killed"
    launcher = runs.launch(
        ["--processes", "2"],
        runs.train(name, *overrides, command=FAULTY),
        FAULT="sleep",
        FAULT_RANK="1",
        FAULT_STEP="9",
    )
    runs.wait_for_step(launcher, name, 6)
    os.kill(ranks(launcher)[1], signal.SIGKILL)
    code, said = finish(launcher)
    assert code == 0 and "resuming from step 5" in said, said
    assert runs.losses(name) == runs.losses(f"{method}-two")
    assert evaluations(runs, name) == evaluations(runs, f"{method}-two")
    assert read_checkpoint(runs.folder / name, 16) == two
