"""Row 15: what the processes of a run listen on, whom they let in, and a network between nodes that is cut or slow."""

import contextlib
import inspect
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import jax
import pytest

from jaxstack.distributed.cluster import COORDINATOR, COUNT, INDEX, TLS_FILES, TLS_PEER_PREFIX
from jaxstack.launch.supervisor import free_port
from tests.reliability.runs import FAULTY, REPOSITORY, Runs, end, finish, read_until

HAS_TLS = "mtls_cert_file" in inspect.signature(jax.distributed.initialize).parameters


def meet(runs: Runs, port: int, index: int, *, count: int = 2, seconds: int = 60, **variables: str) -> subprocess.Popen:
    """Starts one process of a meeting."""
    place = {COORDINATOR: f"127.0.0.1:{port}", COUNT: str(count), INDEX: str(index)}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.reliability.meeting", str(seconds)],
        cwd=REPOSITORY, env={**runs.environment, **place, **variables}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def until_together(process: subprocess.Popen) -> str:
    said = []
    for line in process.stdout or ():
        said.append(line)
        if line.startswith("together"):
            return line
    raise AssertionError("".join(said))


def certificates(folder, name: str) -> dict[str, str]:
    """The variables of a run's own certificates, made by the script."""
    subprocess.run([REPOSITORY / "scripts" / "make_tls.sh", folder, name], check=True)
    files = (folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    assert folder.stat().st_mode & 0o077 == 0 and files[1].stat().st_mode & 0o077 == 0
    return dict(zip(TLS_FILES, map(str, files), strict=True)) | {TLS_PEER_PREFIX: f"spiffe://jaxstack/{name}/"}


def test_only_the_loopback_interface_listens(runs: Runs, record):
    port = free_port()
    both = [meet(runs, port, index) for index in (0, 1)]
    try:
        lines = [until_together(process) for process in both]
        addresses = [
            address for line in lines for address in line.split("[")[-1].strip("]\n").replace("'", "").split(", ")
        ]
        assert all(line.startswith("together 2 [0, 1]") for line in lines)
        assert f"127.0.0.1:{port}" in addresses
        assert all(address.startswith("127.0.0.1:") for address in addresses), addresses
    finally:
        for process in both:
            end(process)
    record(15, "listening sockets of 2 processes", f"{len(addresses)} sockets, all on 127.0.0.1")


def test_a_port_that_is_in_use_is_one_message(runs: Runs, record):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        place = ("--coordinator", address, "--processes", "2", "--process-id", "0")
        code, said = finish(runs.start(runs.train("nowhere", *place)))
    assert code == 1 and said.count("\n") == 1, said
    assert f"jaxstack train: process 0 cannot listen at {address}: Address already in use" in said
    record(15, "a coordinator's port that is in use", "exit code 1 and one message")


@pytest.mark.skipif(not HAS_TLS, reason="mutual TLS needs jax 0.11.2")
@pytest.mark.exhaustive
def test_strangers_are_refused(runs: Runs, tmp_path, record):
    """While process 0 waits for its second: a client without TLS, one of another authority, and noise."""
    ours = certificates(tmp_path / "ours", "a")
    theirs = certificates(tmp_path / "theirs", "a")
    port = free_port()
    first = meet(runs, port, 0, **ours)
    strangers = []
    try:
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port), 1) as noise:
                    noise.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                    noise.settimeout(5)
                    # A plain gRPC server answers with its settings frame; one that wants TLS hangs up or alerts.
                    assert not noise.recv(64).startswith(b"\0\0")
                break
            except ConnectionRefusedError:
                assert first.poll() is None
        strangers = [meet(runs, port, 1, seconds=5), meet(runs, port, 1, seconds=5, **theirs)]
        said = [stranger.communicate(timeout=60)[0] for stranger in strangers]
        assert all(stranger.returncode != 0 for stranger in strangers)
        assert not any("together" in text for text in said) and first.poll() is None
        second = meet(runs, port, 1, **ours)
        strangers.append(second)
        assert until_together(second).startswith("together 2 [0, 1]") and until_together(first)
    finally:
        for process in (first, *strangers):
            end(process)
    record(
        15, "a plaintext client, and one of another authority", "both refused; the run's own process let in after them"
    )


NODES = ("10.99.73.1", "10.99.73.2")
"""Addresses of two nodes in network namespaces of their own."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def network() -> Iterator[list[str]]:
    """Names of two network namespaces with a link between them, whose end is called `link` in both."""
    names = [f"jaxstack-{os.getpid()}-{rank}" for rank in (0, 1)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            first, second = names
            ip("link", "add", "name", "link", "netns", first, "type", "veth", "peer", "name", "link", "netns", second)
            for name, address in zip(names, NODES, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", "link")
                for device in ("lo", "link"):
                    ip("-n", name, "link", "set", "dev", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces can be made here: {error}")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "delete", name)


LOSSES = (
    "train.eval_every_steps=null",
    "train.steps=40",
    "checkpoint.every_steps=100",
    "resilience.heartbeat_seconds=6",
)


def on_both(runs: Runs, name: str, network: list[str]) -> list[subprocess.Popen]:
    """Starts a run on both nodes, with copies in memory, whose steps take a quarter of a second."""
    command = runs.train(name, *LOSSES, "checkpoint.memory_every_steps=5", command=FAULTY)
    return [
        runs.start(
            [
                "ip",
                "netns",
                "exec",
                node,
                sys.executable,
                "-m",
                "jaxstack.launch",
                "--nodes",
                "2",
                "--node-rank",
                str(rank),
            ]
            + ["--coordinator", f"{NODES[0]}:8476", "--insecure", "--step-seconds", "20", "--", *command],
            FAULT="slow",
            FAULT_RANK="-1",
        )  # fmt: skip
        for rank, node in enumerate(network)
    ]


@pytest.fixture(scope="module")
def calm(runs: Runs) -> dict[int, float]:
    """The losses of a run that nothing disturbs."""
    code, said = finish(runs.launch(["--processes", "2"], runs.train("calm", *LOSSES)))
    assert code == 0, said
    return runs.losses("calm")


@pytest.mark.exhaustive
@pytest.mark.parametrize("silently", [False, True])
def test_a_cut_network_is_noticed_on_both_nodes(runs: Runs, network, calm, silently, record):
    """The link between two nodes goes down, or nothing that is sent arrives; later it is as before."""
    name = f"cut-{silently}"
    both = on_both(runs, name, network)
    nobody = ("lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", "link")
    try:
        runs.wait_for_step(both[0], name, 13)
        cut = time.monotonic()
        if silently:
            for node, peer in zip(network, reversed(NODES), strict=True):
                ip("-n", node, "neighbour", "replace", peer, *nobody)
        else:
            ip("-n", network[0], "link", "set", "dev", "link", "down")
        said = [read_until(launcher, "start 1 failed after")[-1] for launcher in both]
        seconds = time.monotonic() - cut
        if silently:
            for node, peer in zip(network, reversed(NODES), strict=True):
                ip("-n", node, "neighbour", "delete", peer, "dev", "link")
        else:
            ip("-n", network[0], "link", "set", "dev", "link", "up")
        ends = [finish(launcher) for launcher in both]
    finally:
        for launcher in both:
            end(launcher)
    assert seconds < 20, said
    assert all(re.search(r"rank \d .*in phase 'train' at step 1\d", line) for line in said), said
    assert [code for code, _ in ends] == [0, 0], ends
    assert re.search(r"resuming from step 1\d? \(from memory", ends[0][1]), ends[0][1]
    assert runs.losses(name) == calm
    what = "nothing that is sent between two nodes arrives" if silently else "the link between two nodes down"
    record(15, what, f"both noticed it within {seconds:.0f} s (heartbeat 6 s); 40 losses bit-equal to a calm run")


@pytest.mark.exhaustive
def test_a_slow_network_is_no_failure(runs: Runs, network, calm, record):
    both = on_both(runs, "slow", network)
    try:
        runs.wait_for_step(both[0], "slow", 8)
        shape = [
            "tc",
            "-n",
            network[0],
            "qdisc",
            "add",
            "dev",
            "link",
            "root",
            "tbf",
            "rate",
            "2mbit",
            "burst",
            "16kbit",
        ]
        if subprocess.run([*shape, "latency", "400ms"], check=False, capture_output=True).returncode:
            pytest.skip("the kernel cannot slow a link down (tc tbf)")
        began = time.monotonic()
        runs.wait_for_step(both[0], "slow", 28)
        seconds = time.monotonic() - began
        ends = [finish(launcher) for launcher in both]
    finally:
        for launcher in both:
            end(launcher)
    assert [code for code, _ in ends] == [0, 0] and "failed" not in ends[0][1], ends
    assert runs.losses("slow") == calm
    record(15, "a link of 2 Mbit/s between two nodes", f"{seconds / 20:.1f} s a step, no restart; losses bit-equal")
