"""Row 20: an hour of random faults, on two nodes whose number is fixed, and on nodes that come and go."""

import contextlib
import os
import random
import re
import resource
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxstack.checkpoint import memory_folder
from jaxstack.launch.supervisor import free_port
from tests.reliability.runs import FAULTY, Runs, end, environment_of, finish, ranks
from tests.reliability.test_memory import damage

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(7200)]
SETTINGS = (
    "train.eval_every_steps=null", "checkpoint.every_steps=20", "checkpoint.keep=3", "optimizer.learning_rate=1e-4",
    "resilience.heartbeat_seconds=6", "parallel.data=2", "parallel.fsdp=2",
)  # fmt: skip
COPIES = ("train.steps=1000000", "checkpoint.memory_every_steps=5")


class Nodes:
    """Two launchers with one process each, a run whose steps take a quarter of a second, and faults of theirs.

    Args:
      runs: starts them.
      name: name of the run.
      chance: chooses.
      changing: whether the run may go on with one node.
    """

    def __init__(self, runs: Runs, name: str, chance: random.Random, *, changing: bool):
        self.runs = runs
        self.name = name
        self.chance = chance
        self.changing = changing
        self.port = free_port()
        self.launchers: dict[int, subprocess.Popen] = {}
        self.sizes: dict[int, int] = {}
        """Bytes of each node's log when its launcher was started."""
        self.logs = {rank: runs.folder / f"{name}-{rank}.log" for rank in (0, 1)}
        for rank in (0, 1):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Starts a launcher, whose output goes to a file: nobody reads it meanwhile."""
        options = ["--nodes", "2", "--coordinator", f"127.0.0.1:{self.port}"]
        if self.changing:
            options = ["--nodes", "1:2", "--rendezvous", str(self.runs.folder / f"meet-{self.name}")]
            options += ["--coordinator", f"127.0.0.1:{free_port()}"]
        options += ["--node-rank", str(rank), "--step-seconds", "20", "--max-restarts", "20"]
        command = self.runs.train(self.name, *SETTINGS, *COPIES, command=FAULTY)
        with self.logs[rank].open("a") as log:
            self.sizes[rank] = log.tell()
            self.launchers[rank] = self.runs.launch(options, command, log, FAULT="slow", FAULT_RANK="-1")

    def step(self) -> int:
        """The newest step that is logged."""
        return max((line["step"] for line in self.runs.lines(self.name)), default=0)

    def wait_for_progress(self, steps: int, seconds: float = 240) -> None:
        """Until so many steps are logged after the newest one; launchers that ended are started again."""
        goal = self.step() + steps
        deadline = time.monotonic() + seconds
        while self.step() < goal:
            assert time.monotonic() < deadline, f"no progress after step {goal - steps}:\n{self.tail()}"
            for rank, launcher in self.launchers.items():
                code = launcher.poll()
                if code is not None:
                    silent = self.logs[rank].stat().st_size == self.sizes[rank]
                    # SIGTERM itself ends a launcher that has not begun yet, which has said nothing.
                    ended = (143, -signal.SIGKILL, *([-signal.SIGTERM] if silent else []))
                    assert code in ended, f"launcher {rank} ended with {code}:\n{self.tail()}"
                    self.start(rank)
            time.sleep(0.2)

    def tail(self) -> str:
        """The last lines that both launchers have said."""
        return "\n".join(f"node {rank}:\n{log.read_text()[-4000:]}" for rank, log in self.logs.items())

    def pid(self, rank: int) -> int | None:
        """The process of a node; None while there is none."""
        found = ranks(self.launchers[rank], required=False)
        return next(iter(found.values()), None)

    def send(self, rank: int, signum: int) -> None:
        """Sends a signal to the process of a node, if there is one."""
        pid = self.pid(rank)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def lose(self, rank: int) -> None:
        """Kills a launcher with all that it has started: its memory is gone. It comes back a little later."""
        end(self.launchers[rank])
        self.launchers[rank].wait()
        if self.changing:
            time.sleep(self.chance.choice([0, 5, 30]))

    def folder(self, rank: int) -> Path | None:
        """The folder of copies of a node's process."""
        pid = self.pid(rank)
        found = None if pid is None else environment_of(pid).get(memory_folder.VARIABLE)
        return None if found is None else Path(found)


def kill_rank(nodes: Nodes) -> None:
    nodes.send(nodes.chance.choice([0, 1]), signal.SIGKILL)


def suspend_rank(nodes: Nodes) -> None:
    nodes.send(nodes.chance.choice([0, 1]), signal.SIGSTOP)


def kill_all_ranks(nodes: Nodes) -> None:
    for rank in (0, 1):
        nodes.send(rank, signal.SIGKILL)


def lose_node(nodes: Nodes) -> None:
    nodes.lose(nodes.chance.choice([0, 1]))


def cut_power(nodes: Nodes) -> None:
    for rank in (0, 1):
        end(nodes.launchers[rank])
        nodes.launchers[rank].wait()


def stop_node(nodes: Nodes) -> None:
    nodes.launchers[nodes.chance.choice([0, 1])].send_signal(signal.SIGTERM)


def damage_memory(nodes: Nodes) -> None:
    folder = nodes.folder(nodes.chance.choice([0, 1]))
    with contextlib.suppress(OSError):  # a copy may be replaced meanwhile
        for copies in memory_folder.all_copies(folder).values() if folder else ():
            for step in copies.steps()[-1:]:
                damage(copies.path(step))
    kill_all_ranks(nodes)


def damage_disk(nodes: Nodes) -> None:
    cut_power(nodes)
    folder = nodes.runs.folder / nodes.name / "checkpoints"
    newest = max((int(path.name) for path in folder.glob("*") if path.name.isdigit()), default=None)
    files = [path for path in (folder / str(newest)).rglob("*") if path.is_file() and path.stat().st_size]
    if len(nodes.runs.saved(nodes.name)) > 1:  # there must be another one
        path = nodes.chance.choice(sorted(files))
        content = bytearray(path.read_bytes())
        content[nodes.chance.randrange(len(content))] ^= 1
        path.write_bytes(content)


def fill_disk(nodes: Nodes) -> None:
    """Files of one process, of which no log depends, end after 4 KiB for some seconds."""
    pid = nodes.pid(1)
    with contextlib.suppress(ProcessLookupError, TypeError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))  # type: ignore[arg-type]
        time.sleep(nodes.chance.uniform(1, 8))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # type: ignore[arg-type]


FAULTS: dict[bool, list[Callable[[Nodes], None]]] = {
    False: [
        kill_rank, suspend_rank, kill_all_ranks, lose_node, cut_power, stop_node, damage_memory, damage_disk, fill_disk,
    ],
    True: [kill_rank, suspend_rank, kill_all_ranks, lose_node, lose_node, cut_power, stop_node, damage_memory],
}  # fmt: skip
"""Whether the run may go on with one node -> faults."""
MOST_WITHOUT_PROGRESS = 2


@pytest.mark.parametrize("changing", [False, True], ids=["fixed", "changing"])
def test_random_faults_lose_nothing(runs: Runs, changing, fault_minutes, record):
    """Faults while it trains, saves, restores, compiles or ends; then the losses are those of an unbroken run.

    The first two faults are one after which it goes on from memory, and one after which only the disk is left. With
    nodes that come and go the order of sums changes, so that the losses agree up to rounding.
    """
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    chance = random.Random(seed)
    name = "random-changing" if changing else "random-fixed"
    nodes = Nodes(runs, name, chance, changing=changing)
    done = Counter[str]()
    pending = 0
    began = time.monotonic()
    try:
        nodes.wait_for_progress(30)  # there are copies in memory, and a checkpoint
        for fault in (kill_all_ranks, cut_power):
            fault(nodes)
            done[fault.__name__] += 1
            nodes.wait_for_progress(1)
        while time.monotonic() < began + 60 * fault_minutes / 2:
            fault = chance.choice(FAULTS[changing])
            print(f"{time.monotonic() - began:.0f} s, step {nodes.step()}: {fault.__name__}", flush=True)
            fault(nodes)
            done[fault.__name__] += 1
            pending += 1
            if pending >= MOST_WITHOUT_PROGRESS or chance.random() < 0.7:
                nodes.wait_for_progress(chance.choice([1, 10, 40]))
                pending = 0
            else:
                time.sleep(chance.uniform(0, 12))
                for rank, launcher in nodes.launchers.items():
                    if launcher.poll() is not None:
                        nodes.start(rank)
        nodes.wait_for_progress(5)
        for launcher in nodes.launchers.values():
            launcher.send_signal(signal.SIGTERM)
        codes = [launcher.wait(120) for launcher in nodes.launchers.values()]
        assert codes == [143, 143], nodes.tail()
    finally:
        for launcher in nodes.launchers.values():
            end(launcher)
    seconds = time.monotonic() - began
    found = runs.losses(name)
    last = max(found)
    assert sorted(found) == list(range(1, last + 1)), "each step is logged once"
    calm = f"calm-{name}"
    code, said = finish(
        runs.launch(["--processes", "2"], runs.train(calm, *SETTINGS, f"train.steps={last}")), 60 * fault_minutes + 240
    )
    assert code == 0, said
    wanted = runs.losses(calm)
    worst = max(abs(found[step] / wanted[step] - 1) for step in wanted)
    assert worst < 1e-5 if changing else found == wanted
    text = "\n".join(log.read_text() for log in nodes.logs.values())
    memory = len(re.findall(r"resuming from step \d+ \(from memory", text))
    disk = len(re.findall(r"resuming from step \d+ \((?!from memory)", text))
    assert memory and disk, f"resumed {memory} times from memory, {disk} from disk"
    faults = ", ".join(f"{count} x {fault.replace('_', ' ')}" for fault, count in done.most_common())
    equal = f"within {worst:.1e} (relative) of" if changing else "bit-equal to"
    record(
        20,
        f"random faults, {'nodes that come and go' if changing else 'two nodes'}",
        f"{done.total()} faults in {seconds / 60:.0f} minutes ({faults}): resumed {memory} times from memory, {disk} "
        f"from disk; {last} steps, each once, losses {equal} an unbroken run",
    )
