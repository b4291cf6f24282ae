"""Rows 2 and 12 over two nodes: two launchers on one machine that share nothing but the run directory."""

import os
import re
import signal
import time

import pytest

from jaxstack.launch.supervisor import free_port
from tests.reliability.runs import Runs, alive, finish, ranks

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
    runs.wait_for_step(nodes[0], name, 8)
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
