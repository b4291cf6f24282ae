"""Rows 2 and 8 over two nodes: two launchers on one machine that share nothing but a file system."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from jaxstack.launch.supervisor import free_port
from tests.reliability.runs import Runs, alive, end, finish, ranks, read_until, waiting

pytestmark = pytest.mark.exhaustive
HEARTBEAT = 6


def test_a_node_whose_peer_died_ends_and_comes_back(runs: Runs, record, full):
    if not full:
        pytest.skip("--full")
    name = "nodes"
    port = free_port()
    command = runs.train(
        name, "train.steps=100000", "train.eval_every_steps=null", "checkpoint.every_steps=5", "checkpoint.keep=3",
        f"resilience.heartbeat_seconds={HEARTBEAT}",
    )  # fmt: skip
    nodes = [
        runs.launch(["--nodes", "2", "--node-rank", str(rank), "--coordinator", f"127.0.0.1:{port}"], command)
        for rank in (0, 1)
    ]
    runs.wait_for_checkpoint(nodes[0], name)
    survivor = ranks(nodes[0])[0]
    victim = ranks(nodes[1])[1]
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    while alive(survivor):
        assert time.monotonic() - began < 60
        time.sleep(0.05)
    ended = time.monotonic() - began
    resumed = 0
    for line in nodes[0].stdout or ():
        if match := re.search(r"resuming from step (\d+)", line):
            resumed = int(match[1])
            break
    assert resumed >= 5
    runs.wait_for_step(nodes[0], name, resumed + 4)
    back = time.monotonic() - began
    for node in nodes:
        node.send_signal(signal.SIGTERM)
    codes = [finish(node) for node in nodes]
    assert [code for code, _ in codes] == [143, 143], codes
    assert ended < HEARTBEAT + 5
    record(
        2,
        "SIGKILL on one of two nodes",
        f"the other node's process ended after {ended:.1f} s (heartbeat {HEARTBEAT} s), "
        f"both in training again after {back:.0f} s",
    )


def test_the_program_for_a_lost_node_is_compiled_ahead(runs: Runs, record):
    """The start after a loss finds the step in the compilation cache, and compiles none; losses do not change."""
    name = "ahead"
    settings = [
        "train.steps=100000", "train.eval_every_steps=null", "checkpoint.every_steps=10", "checkpoint.keep=3",
        "model.hidden_size=24", "model.intermediate_size=40", "optimizer.learning_rate=1e-4",
    ]  # fmt: skip
    command = runs.train(name, *settings, f"resilience.heartbeat_seconds={HEARTBEAT}", "resilience.compile_ahead=true")

    def steps() -> set[str]:
        folder = Path(runs.environment["JAX_COMPILATION_CACHE_DIR"])
        return {path.name for path in folder.glob("jit_train_step-*-cache")}

    def start(rank: int):
        options = ["--nodes", "1:2", "--node-rank", str(rank), "--coordinator", f"127.0.0.1:{free_port()}"]
        return runs.launch([*options, "--rendezvous", str(runs.folder / "meet-ahead")], command)

    before = steps()
    nodes = [start(rank) for rank in (0, 1)]
    try:
        said = "".join(read_until(nodes[0], "compiled the step for a lost node"))
        ahead = re.search(r"for a lost node \((.*)\) in ([\d.]+) s", said)
        assert ahead is not None and ahead[1] == "data 4 -> 2, train.gradient_accumulation 1 -> 2", said
        compiled = steps()
        assert len(compiled - before) == 2, "the step of both layouts"
        for _ in waiting(nodes[0]):
            if runs.saved(name):
                break
        nodes[1].kill()
        said = "".join(read_until(nodes[0], "resuming from step", "compiled the step in"))
        again = re.search(r"compiled the step in ([\d.]+) s", said)
        assert again is not None and "data 4 -> 2, train.gradient_accumulation 1 -> 2" in said
        assert steps() == compiled
        nodes[0].send_signal(signal.SIGTERM)
        assert finish(nodes[0])[0] == 143
    finally:
        for node in nodes:
            end(node)
    record(
        8,
        "the step for a lost node compiled ahead",
        f"compiled in {ahead[2]} s beside training; after the loss traced and read from the cache in {again[1]} s",
    )


@pytest.mark.parametrize("lost", [1, 0])
def test_a_run_goes_on_with_one_node_and_grows_again(runs: Runs, lost, record, full):
    """A node is killed for good with its launcher; node 0 is the coordinator. Later it comes back."""
    if lost == 0 and not full:
        pytest.skip("--full")
    name = f"elastic-{lost}"
    settings = ["train.steps=100000", "train.eval_every_steps=null", "checkpoint.every_steps=10", "checkpoint.keep=3"]
    command = runs.train(name, *settings, f"resilience.heartbeat_seconds={HEARTBEAT}")

    def start(rank: int):
        options = ["--nodes", "1:2", "--node-rank", str(rank), "--coordinator", f"127.0.0.1:{free_port()}"]
        return runs.launch([*options, "--rendezvous", str(runs.folder / f"meet-{lost}")], command)

    nodes = {rank: start(rank) for rank in (0, 1)}
    left = nodes[1 - lost]
    runs.wait_for_checkpoint(left, name)
    began = time.monotonic()
    nodes[lost].kill()
    said = "".join(read_until(left, "starting with 1 of 2 nodes", r"resuming from step (\d+)"))
    assert "data 4 -> 2, train.gradient_accumulation 1 -> 2" in said
    resumed = int(re.findall(r"resuming from step (\d+)", said)[-1])
    runs.wait_for_step(left, name, resumed + 1)
    shrunk = time.monotonic() - began
    runs.wait_for_step(left, name, resumed + 15)
    began = time.monotonic()
    nodes[lost] = start(lost)
    said = "".join(read_until(left, f"node {lost} joined", "stopped by SIGTERM after step"))
    stopped = int(re.findall(r"after step (\d+)", said)[-1])
    runs.wait_for_step(left, name, stopped + 1)
    grown = time.monotonic() - began
    runs.wait_for_step(left, name, stopped + 5)
    for node in nodes.values():
        node.send_signal(signal.SIGTERM)
    codes = {rank: finish(node) for rank, node in nodes.items()}
    assert [code for code, _ in codes.values()] == [143, 143], codes
    found = runs.losses(name)
    assert sorted(found) == list(range(1, len(found) + 1))
    assert (runs.folder / name / "config.yaml").read_text().count("gradient_accumulation: 1") == 1
    whole = f"whole-{lost}"
    code, said = finish(runs.start(runs.train(whole, f"train.steps={resumed + 15}", *settings[1:])))
    assert code == 0, said
    wanted = runs.losses(whole)
    worst = max(abs(found[step] / wanted[step] - 1) for step in wanted)
    assert worst < 1e-6 and shrunk < 60
    record(
        8,
        f"node {lost} of 2 lost for good, later back",
        f"the other trained on after {shrunk:.0f} s, with half of the devices, 15 losses within {worst:.1e} (relative) "
        f"of an unbroken run; {grown:.0f} s after the node came back both trained",
    )
