"""Islands in processes of their own: the losses of one process, also if one of them is killed."""

import os
import signal

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


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_as_one_also_after_a_kill(runs: Runs, method):
    """Rank 1 is killed in step 9; the launcher starts both again from checkpoint 5."""
    overrides = (LAYOUT, METHODS[method])
    code, said = finish(runs.start(runs.train(f"{method}-one", *overrides)))
    assert code == 0, said
    code, said = finish(runs.launch(["--processes", "2"], runs.train(f"{method}-two", *overrides)))
    assert code == 0 and "in 2 processes" in said, said
    wanted, found = runs.losses(f"{method}-one"), runs.losses(f"{method}-two")
    assert sorted(found) == list(range(1, 17))
    assert found == pytest.approx(wanted, rel=1e-5)

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
    assert runs.losses(name) == found
    assert read_checkpoint(runs.folder / name, 16) == read_checkpoint(runs.folder / f"{method}-two", 16)
