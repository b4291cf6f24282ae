"""DiLoCo through files: the mean of those who came in time, and workers that go on without one that vanished."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.local_sgd import folder
from jaxstack.local_sgd.folder import FolderDiLoCo
from tests.reliability.runs import FAULTY, Runs, finish, waiting
from tests.reliability.states import read_checkpoint


class Worker:
    """A worker whose parameters each exchange moves by what it is told."""

    def __init__(self, folder, worker, count=2, **settings):
        settings = {"every": 2, "wait_seconds": 0.05, "outer_learning_rate": 0.5, "momentum": 0.5, **settings}
        self.exchange = FolderDiLoCo(folder=str(folder), worker=worker, count=count, **settings).build(count, {})
        self.said = []
        self.exchange.mean.say = self.said.append
        self.params = {"w": jnp.array([1.0, 2.0])}
        self.state = self.exchange.init(self.params)

    def move(self, by):
        params = {"w": self.params["w"] + jnp.array(by)}
        self.params, self.state = self.exchange(0, params, self.state)

    @property
    def weights(self):
        return np.asarray(self.params["w"]).tolist()


def together(*moves):
    with ThreadPoolExecutor(len(moves)) as threads:
        for done in [threads.submit(worker.move, by) for worker, by in moves]:
            done.result()


def test_workers_step_along_their_mean_progress(tmp_path):
    one = Worker(tmp_path, 0, wait_seconds=5)
    other = Worker(tmp_path, 1, wait_seconds=5)
    together((one, [1.0, 0.0]), (other, [3.0, 0.0]))
    # Progress -2, velocity -2: 1 - 0.5 (-2 + 0.5 * -2).
    assert one.weights == other.weights == [2.5, 2.0]
    together((one, [0.0, 0.0]), (other, [0.0, 4.0]))
    # Velocity [-1, -2]; 2.5 - 0.5 * 0.5 * -1, 2 - 0.5 (-2 + 0.5 * -2).
    assert one.weights == other.weights == [2.75, 3.5]
    assert int(one.state.shared["round"]) == 2 and not one.said


def test_others_go_on_without_a_worker_and_it_catches_up(tmp_path):
    one = Worker(tmp_path, 0)
    other = Worker(tmp_path, 1)
    together((one, [1.0, 0.0]), (other, [3.0, 0.0]))
    one.move([1.0, 0.0])
    assert any("went on without worker 1" in line for line in one.said)
    one.move([1.0, 0.0])  # waits for nobody: the other was not in the last exchange
    assert len(one.said) == 1
    other.move([100.0, 100.0])
    assert other.weights == one.weights and int(other.state.shared["round"]) == 3
    assert "whose changes since the last are lost" in other.said[0] and "1 further" in other.said[1]
    together((one, [1.0, 0.0]), (other, [1.0, 0.0]))
    assert other.weights == one.weights


def test_processes_of_a_worker_catch_up_together(tmp_path, monkeypatch):
    one = Worker(tmp_path, 0)
    other = Worker(tmp_path, 1)
    together((one, [1.0, 0.0]), (other, [3.0, 0.0]))
    one.move([1.0, 0.0])
    one.move([1.0, 0.0])
    found = []
    monkeypatch.setattr(folder, "all_true", lambda seen: found.append(seen))
    other.move([0.0, 0.0])
    assert found == [True] and int(other.state.shared["round"]) == 2, "another process has not seen the third exchange"


def test_a_folder_of_other_workers_is_refused(tmp_path):
    Worker(tmp_path, 0, count=1).move([1.0, 0.0])
    with pytest.raises(ConfigError, match=r"another value of momentum: 0\.5, here 0\.9"):
        Worker(tmp_path, 0, count=1, momentum=0.9).move([1.0, 0.0])
    with pytest.raises(ValueError, match="must be below count"):
        FolderDiLoCo(folder="x", worker=2, count=2)


def test_a_worker_far_behind_is_told_that_exchanges_are_deleted(tmp_path):
    one = Worker(tmp_path, 0, count=1, keep=2)
    late = Worker(tmp_path, 0, count=1, keep=2)
    for _ in range(3):
        one.move([1.0, 0.0])
    with pytest.raises(JaxstackError, match="exchange 0 of workers cannot be read"):
        late.move([1.0, 0.0])


@pytest.mark.parametrize("left", [0, 100])
def test_a_damaged_file_is_named(tmp_path, left):
    one = Worker(tmp_path, 0, count=1)
    one.move([1.0, 0.0])
    again = Worker(tmp_path, 0, count=1)
    file = tmp_path / "exchange-0" / "0-0.npz"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(JaxstackError, match="exchange 0 of workers cannot be read"):
        again.move([1.0, 0.0])


def test_an_exchange_that_is_being_deleted_is_not_held_anew(tmp_path):
    one = Worker(tmp_path, 0, keep=2)
    late = Worker(tmp_path, 1, keep=2)
    one.exchange.mean._waited_for_all = True
    for _ in range(3):
        one.move([1.0, 0.0])
    folder = tmp_path / "exchange-0"
    folder.mkdir()  # `members.json` is gone already, the changes are not
    (folder / "0-0.npz").write_bytes((tmp_path / "exchange-1" / "0-0.npz").read_bytes())
    with pytest.raises(JaxstackError, match="exchange 0 of workers cannot be read"):
        late.move([1.0, 0.0])
    assert not (folder / "members.json").exists()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("folder"))


@pytest.mark.exhaustive
def test_a_killed_run_does_not_stop_the_other_workers(runs: Runs):
    def command(worker, **more):
        settings = f"local_sgd={{name: folder, folder: {runs.folder}/meet, worker: {worker}, count: 3, every: 4}}"
        layout = "parallel={simulate_devices: 1, data: 1}"
        return runs.train(f"worker-{worker}", settings, layout, "local_sgd.wait_seconds=6", **more)

    last = runs.start(command(2, command=FAULTY), FAULT="sleep", FAULT_RANK="0", FAULT_STEP="8", JAXSTACK_ATTEMPT="1")
    others = [runs.start(command(worker)) for worker in (0, 1)]
    for _ in waiting(last):
        if 5 in runs.saved("worker-2"):
            break
    os.kill(last.pid, signal.SIGKILL)
    last.communicate()
    for process in others:
        code, said = finish(process)
        assert code == 0, said
        assert "without worker 2" in said
    assert all(sorted(runs.losses(f"worker-{worker}")) == list(range(1, 17)) for worker in (0, 1))
    first, second = (read_checkpoint(runs.folder / f"worker-{worker}", 16) for worker in (0, 1))
    anchors = [name for name in first if "anchor" in name]
    assert anchors and all(first[name] == second[name] for name in anchors)
    code, said = finish(runs.start(command(2)))
    assert code == 0 and "resuming from step 5" in said and "caught up with the other workers" in said, said
