"""Which nodes take part in a start, decided from the notices that their launchers write; and the launchers that do."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxstack.distributed.cluster import Nodes
from jaxstack.errors import ConfigError
from jaxstack.launch.__main__ import _check_together, main
from jaxstack.launch.rendezvous import Notice, Plan, Rendezvous, newest_plan, propose
from jaxstack.launch.supervisor import free_port


def notices(*ranks: int) -> dict[int, Notice]:
    return {rank: Notice(f"s{rank}", f"h{rank}:1") for rank in ranks}


def following(plan: Plan, nodes: dict[int, Notice]) -> dict[int, Notice]:
    """The notices after all members of a plan have started it."""
    members = dict(plan.members)
    return {
        rank: dataclasses.replace(notice, plan=plan, running=True) if rank in members else notice
        for rank, notice in nodes.items()
    }


def test_the_first_node_proposes_all_that_are_present():
    plan = propose(notices(0, 1, 2), 0, 1, 3, patient=True)
    assert plan == Plan(1, ((0, "s0"), (1, "s1"), (2, "s2")), "h0:1")
    assert propose(notices(0, 1, 2), 1, 1, 3, patient=True) is None


def test_a_first_start_waits_for_all_nodes():
    assert propose(notices(0, 1), 0, 1, 3, patient=True) is None
    plan = propose(notices(0, 1), 0, 1, 3, patient=False)
    assert plan is not None and len(plan.members) == 2
    assert propose(notices(0, 1), 0, 3, 3, patient=False) is None, "too few"


def test_after_a_loss_the_others_go_on_once_their_processes_have_ended():
    """The first node is lost for good, and with it the coordinator."""
    plan = Plan(4, ((0, "s0"), (1, "s1"), (2, "s2")), "h0:1")
    left = following(plan, notices(1, 2))
    assert propose(left, 1, 1, 3, patient=True) is None
    left = {rank: dataclasses.replace(notice, running=False, ended=4) for rank, notice in left.items()}
    assert propose(left, 1, 1, 3, patient=True) == Plan(5, ((1, "s1"), (2, "s2")), "h1:1")


def test_a_node_that_comes_back_is_taken_in():
    plan = Plan(5, ((1, "s1"),), "h1:1")
    nodes = following(plan, notices(1)) | notices(0)
    assert propose(nodes, 0, 1, 2, patient=True) == Plan(6, ((0, "s0"), (1, "s1")), "h0:1")
    assert propose(following(plan, notices(1)), 1, 1, 2, patient=False) is None, "nothing has changed"


def test_numbers_of_nodes_that_do_not_fit_leave_spares():
    nodes = notices(0, 1, 2)
    refused = ((0, "s0"), (1, "s1"), (2, "s2"))
    nodes[1] = dataclasses.replace(nodes[1], unfit=(refused,))
    plan = propose(nodes, 0, 1, 4, patient=False)
    assert plan is not None and [rank for rank, _ in plan.members] == [0, 1]
    assert propose(following(plan, nodes), 0, 1, 4, patient=False) is None


def test_a_refused_number_is_tried_again_when_one_of_its_nodes_has_another_launcher():
    """That one may have been started with another configuration."""
    alone = Plan(2, ((0, "s0"),), "h0:1")
    refused = ((0, "s0"), (1, "wrong"))
    nodes = following(alone, notices(0)) | {1: Notice("wrong", "h1:1")}
    nodes[0] = dataclasses.replace(nodes[0], unfit=(refused,))
    assert propose(nodes, 0, 1, 2, patient=False) is None
    nodes[1] = Notice("right", "h1:1")
    assert propose(nodes, 0, 1, 2, patient=False) == Plan(3, ((0, "s0"), (1, "right")), "h0:1")


def test_a_node_with_another_range_is_not_taken_in():
    """It ends with a message, and does not end a run that goes on."""
    alone = Plan(2, ((0, "s0"),), "h0:1")
    nodes = following(alone, notices(0)) | {1: Notice("s1", "h1:1", bounds=(1, 3))}
    assert propose(nodes, 0, 1, 2, patient=False) is None


@pytest.mark.longer
def test_launchers_with_other_numbers_of_nodes_are_told(tmp_path):
    first, second = (Rendezvous(tmp_path / "meet", rank, f"h{rank}:1", 1, 2 + rank) for rank in range(2))
    try:
        with pytest.raises(ConfigError, match=r"node 1 was started with --nodes 1:3, and node 0 with --nodes 1:2"):
            first.meet(lambda: False, print)
    finally:
        first.close()
        second.close()


@pytest.mark.longer
def test_a_start_that_another_node_ended_for_one_that_joins_is_no_stop_of_this_one(tmp_path):
    """Although this launcher has not seen it before its own processes were stopped with all others."""
    nodes = [Rendezvous(tmp_path / "meet", rank, f"h{rank}:1", 1, 3, gather_seconds=0) for rank in range(2)]
    try:
        wait_until(lambda: all(len(node.notices()) == 2 for node in nodes))
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(lambda node: node.meet(lambda: False, print), nodes))
        assert [place.count for place in found] == [2, 2]
        assert not nodes[1].others_stopped_it()
        nodes.append(Rendezvous(tmp_path / "meet", 2, "h2:1", 1, 3))
        wait_until(lambda: nodes[0].change() is not None)
        assert nodes[1].others_stopped_it()
    finally:
        for node in nodes:
            node.close()


def test_all_choose_the_same_of_two_plans():
    """Two nodes that did not see each other proposed at once. One that runs is the newest."""
    one, two = Plan(1, ((0, "s0"),), "h0:1"), Plan(1, ((1, "s1"),), "h1:1")
    nodes = {0: Notice("s0", "", proposed=one), 1: Notice("s1", "", proposed=two)}
    assert newest_plan(nodes) == two
    nodes[0] = dataclasses.replace(nodes[0], plan=one, running=True)
    assert newest_plan(nodes) == one


def wait_until(holds, seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.mark.longer
def test_files_of_launchers_that_are_gone_do_not_count(tmp_path):
    Rendezvous(tmp_path / "meet", 1, "h1:1", 1, 2).close()
    node = Rendezvous(tmp_path / "meet", 0, "h0:1", 1, 2, gather_seconds=2)
    try:
        assert node.meet(lambda: False, print) == Nodes(1, 0, "h0:1")
        assert (tmp_path / "meet").stat().st_mode & 0o777 == 0o700
    finally:
        node.close()


PROGRAM = """
import os, signal, sys, time
from jaxstack.resilience.progress_file import ProgressFile
count = os.environ.get('JAX_NUM_PROCESSES', '1')
print('of', count, 'for', os.environ['JAXSTACK_FULL_PROCESSES'], flush=True)
if count == sys.argv[1]:
    sys.exit(2)
ProgressFile.of_this_process().note('train', step=1)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
time.sleep(100)
"""


class Node:
    """A launcher whose output goes to a file."""

    def __init__(self, folder: Path, rank: int, nodes: str = "1:2", wrong: str = "none"):
        self.log = folder / f"log-{rank}-{time.monotonic()}"
        options = ["--nodes", nodes, "--node-rank", str(rank), "--coordinator", f"127.0.0.1:{free_port()}"]
        command = [sys.executable, "-m", "jaxstack.launch", *options, "--rendezvous", str(folder / "meet"), "--"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, sys.executable, "-c", PROGRAM, wrong], stdout=file, stderr=subprocess.STDOUT, env=environment
            )

    def wait_for(self, text: str, times: int = 1) -> None:
        wait_until(lambda: self.log.read_text().count(text) >= times or self.process.poll() is not None, 40)
        assert self.log.read_text().count(text) >= times, self.log.read_text()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.mark.longer
def test_a_node_is_lost_and_comes_back(tmp_path):
    """Node 0, killed with its launcher: the other goes on alone, then with it; a node that is preempted leaves."""
    nodes = [Node(tmp_path, rank) for rank in (0, 1)]
    for node in nodes:
        node.wait_for("of 2 for 2")
    nodes[0].process.kill()
    os.killpg(_child_of(nodes[1].process.pid), signal.SIGKILL)  # as jax ends it when the other is gone
    nodes[1].wait_for("of 1 for 2")
    again = Node(tmp_path, 0)
    again.wait_for("of 2 for 2")
    nodes[1].wait_for("of 2 for 2", times=2)
    assert "node 0 joined" in nodes[1].log.read_text()
    assert nodes[1].stop() == 143
    os.killpg(_child_of(again.process.pid), signal.SIGTERM)  # as all processes stop at one agreed step
    again.wait_for("of 1 for 2")
    assert again.stop() == 143


@pytest.mark.longer
def test_a_number_that_does_not_fit_is_left_out_and_a_wrong_configuration_ends(tmp_path):
    nodes = [Node(tmp_path, rank, "1:3", wrong="3") for rank in (0, 1, 2)]
    assert [node.process.wait(60) for node in nodes] == [2, 2, 2], "all nodes: the configuration is wrong"
    nodes = [Node(tmp_path, rank, "1:2", wrong="1") for rank in (0, 1)]
    for node in nodes:
        node.wait_for("of 2 for 2")
    nodes[1].process.kill()
    os.killpg(_child_of(nodes[0].process.pid), signal.SIGKILL)
    nodes[0].wait_for("the run cannot use 1 node")
    assert nodes[0].process.poll() is None and nodes[0].stop() == 143


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[-1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nodes", "1:2"], "must be given together"),
        (["--nodes", "2", "--rendezvous", "meet"], "must be given together"),
        (["--nodes", "1:2", "--rendezvous", "meet"], "--coordinator must be given"),
    ],
)
def test_wrong_use_ends_with_one_message(options, said, capsys):
    assert main([*options, "--", "true"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", [["python", "-m", "jaxstack.convert"], ["bin/jaxstack", "tune"]])
def test_nodes_of_a_command_that_does_not_compute_on_all_together_cannot_change(command, tmp_path, capsys):
    """A node that has nothing to do ends with 0: the first, if it failed then, would take the work for done."""
    options = [
        "--nodes",
        "1:2",
        "--node-rank",
        "0",
        "--coordinator",
        "127.0.0.1:1",
        "--rendezvous",
        str(tmp_path / "m"),
    ]
    assert main([*options, "--", *command, "x"]) == 2
    said = capsys.readouterr().err
    assert f"which {command[-1].removeprefix('jaxstack.')} does not; give --nodes N" in said and said.count("\n") == 1
    _check_together(["python", "-m", "jaxstack.train", "--config", "serve"])
