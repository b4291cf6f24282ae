"""Row 15: what the processes of a run listen on, and whom they let in."""

import inspect
import socket
import subprocess
import sys

import jax
import pytest

from jaxstack.distributed.cluster import COORDINATOR, COUNT, INDEX, TLS_FILES, TLS_PEER_PREFIX
from jaxstack.launch.supervisor import free_port
from tests.reliability.runs import REPOSITORY, Runs, end, finish

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
