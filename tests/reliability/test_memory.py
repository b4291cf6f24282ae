"""Row 19: copies of the state in host memory, from which a run goes on after lost processes and nodes."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxstack.checkpoint import memory_folder
from jaxstack.checkpoint.leaves import abstract_state
from jaxstack.checkpoint.memory import MemoryCheckpoints
from jaxstack.checkpoint.neighbour import CopyClient, CopyServer
from jaxstack.launch.supervisor import free_port
from tests.reliability.runs import Runs, end, finish, listening, ranks, read_until, waiting

pytestmark = pytest.mark.exhaustive
EVERY = 3
STEPS = 24
COPIES = (
    f"train.steps={STEPS}", "train.eval_every_steps=null", "checkpoint.every_steps=10",
    "resilience.heartbeat_seconds=6", "parallel.data=2", "parallel.fsdp=2",
)  # fmt: skip
MEMORY = (*COPIES, f"checkpoint.memory_every_steps={EVERY}")


@pytest.fixture(scope="module")
def unbroken(runs: Runs) -> dict[int, float]:
    """The losses of two processes without a failure, and without copies in memory."""
    code, said = finish(runs.launch(["--processes", "2"], runs.train("calm", *COPIES)))
    assert code == 0, said
    return runs.losses("calm")


def folder_of(launcher: subprocess.Popen) -> Path:
    """The folder of copies of a launcher's processes."""
    variables = Path(f"/proc/{next(iter(ranks(launcher).values()))}/environ").read_bytes().split(b"\0")
    (found,) = (one.partition(b"=")[2] for one in variables if one.startswith(b"JAXSTACK_MEMORY_FOLDER="))
    return Path(found.decode())


def copied(folder: Path, rank: int, kind: str = "own") -> list[int]:
    """The steps of the complete copies of a process."""
    try:
        return sorted(int(path.name) for path in (folder / kind / str(rank)).iterdir() if path.name.isdigit())
    except OSError:
        return []


def wait_until_copied(runs: Runs, launcher: subprocess.Popen, name: str, step: int) -> None:
    """Until the metrics say that all processes have the copy of a step, or of a later one."""
    for _ in waiting(launcher):
        if any(line.get("memory_copy_step", -1) >= step for line in runs.lines(name)):
            return


def check_end(runs: Runs, name: str, launcher: subprocess.Popen, unbroken: dict[int, float]) -> None:
    """The run ends well, with the losses of the unbroken run, bit for bit; its launcher removes the folder."""
    folder = folder_of(launcher)
    assert folder.stat().st_mode & 0o077 == 0
    code, said = finish(launcher)
    assert code == 0, said
    assert runs.losses(name) == unbroken
    assert not folder.exists()


def test_a_killed_rank_resumes_from_memory(runs: Runs, unbroken, record):
    """SIGKILL after checkpoint 10 and the copy of step 12 or a later one."""
    name = "memory"
    launcher = runs.launch(["--processes", "2"], runs.train(name, *MEMORY))
    wait_until_copied(runs, launcher, name, 12)
    pids = ranks(launcher)
    addresses = [address for pid in pids.values() for address in listening(pid)]
    assert all(address.startswith("127.0.0.1:") for address in addresses), addresses
    began = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    said = "".join(read_until(launcher, "resuming from step"))
    seconds = time.monotonic() - began
    match = re.search(r"resuming from step (\d+) \(from memory: own 2, neighbour 0, restored in ([\d.]+) s\)", said)
    assert match is not None, said
    step = int(match[1])
    assert step >= 12 and step % EVERY == 0 and max(runs.saved(name)) == 10
    assert "copies in memory every 3 steps, with second copies on the same node" in said
    check_end(runs, name, launcher, unbroken)
    assert runs.saved(name) == [10, 20, STEPS], "the interval on disk is its own"
    record(
        19,
        "SIGKILL of a rank of 2, copies in memory",
        f"went on from step {step} in memory (checkpoint 10 on disk) after {seconds:.0f} s, restored in {match[2]} s; "
        f"{STEPS} losses bit-equal to a calm run",
    )


def damage(copy: Path) -> None:
    """Flips a bit of each array of a copy."""
    for path in (copy / "arrays").iterdir():
        content = bytearray(path.read_bytes())
        content[-1] ^= 4
        path.write_bytes(content)


@pytest.mark.parametrize("kinds", [("own",), ("own", "neighbour")], ids=len)
def test_a_damaged_copy_is_named_and_the_next_source_used(runs: Runs, unbroken, kinds, record):
    """Damage to rank 0's copies while nothing runs: the launcher is stopped for that, as it restarts after a second."""
    name = f"memory-damaged-{len(kinds)}"
    launcher = runs.launch(["--processes", "2"], runs.train(name, *MEMORY))
    wait_until_copied(runs, launcher, name, 12)
    folder = folder_of(launcher)
    pids = ranks(launcher)
    launcher.send_signal(signal.SIGSTOP)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    steps = copied(folder, 0)
    for kind in kinds:
        for step in copied(folder, 0, kind):
            damage(folder / kind / "0" / str(step))
    launcher.send_signal(signal.SIGCONT)
    said = "".join(read_until(launcher, "resuming from step"))
    for step in steps:
        assert re.search(
            rf"copy of step {step} of process 0 in its own memory cannot be used.*arrays/\d+: it, or", said
        )
    if kinds == ("own",):
        assert f"resuming from step {max(steps)} (from memory: own 1, neighbour 1" in said, said
        what = f"named; step {max(steps)} restored from own memory and the neighbour's"
    else:
        assert f"copy of step {max(steps)} of process 0 in its neighbour's memory cannot be used" in said
        assert re.search(r"resuming from step 10 \(\S+/checkpoints", said), said
        what = "both named; went on from checkpoint 10 on disk"
    check_end(runs, name, launcher, unbroken)
    record(19, f"{len(kinds)} of 2 copies of a rank in memory damaged", f"{what}; losses bit-equal")


def test_a_lost_node_is_restored_from_its_neighbour(runs: Runs, unbroken, record):
    """Two launchers that share nothing but the run directory. One is killed with its process; its memory is gone."""
    name = "memory-nodes"
    port = free_port()

    def start(rank: int) -> subprocess.Popen:
        options = ["--nodes", "2", "--node-rank", str(rank), "--coordinator", f"127.0.0.1:{port}"]
        return runs.launch(options, runs.train(name, *MEMORY))

    nodes = [start(0), start(1)]
    try:
        wait_until_copied(runs, nodes[0], name, 12)
        folders = [folder_of(node) for node in nodes]
        assert folders[0] != folders[1] and not copied(folders[0], 1) and copied(folders[0], 1, "neighbour")
        began = time.monotonic()
        end(nodes[1])
        nodes[1].communicate()
        for _ in waiting(nodes[0]):
            if not folders[1].exists():
                break
        nodes[1] = start(1)
        said = "".join(read_until(nodes[0], "resuming from step"))
        seconds = time.monotonic() - began
        match = re.search(r"resuming from step (\d+) \(from memory: own 1, neighbour 1, restored in ([\d.]+) s\)", said)
        assert match is not None and int(match[1]) >= 12, said
        assert "with second copies on another node" in said
        check_end(runs, name, nodes[0], unbroken)
        code, said = finish(nodes[1])
        assert code == 0, said
    finally:
        for node in nodes:
            end(node)
    record(
        19,
        "a node lost with its memory, another one in its place",
        f"went on from step {match[1]} in the neighbour's memory (checkpoint 10 on disk) after {seconds:.0f} s, "
        f"restored in {match[2]} s; losses bit-equal",
    )


def test_other_processes_and_no_launcher(runs: Runs):
    """The key without the launcher is one message and exit code 2."""
    code, said = finish(runs.start(runs.train("memory-alone", *MEMORY)))
    assert code == 2 and "checkpoint.memory_every_steps needs the launcher" in said and "Traceback" not in said, said
    shutil.rmtree(runs.folder / "memory-alone", ignore_errors=True)


def test_time_of_a_copy(full, monkeypatch, record):
    """A state of 1 GiB: what the caller waits for, what its thread takes, and a neighbour on the loopback interface."""
    folder = memory_folder.make_folder()
    assert folder is not None
    monkeypatch.setenv(memory_folder.VARIABLE, str(folder))
    size = 2**28 if full else 2**20
    state = {f"layer-{number}": jnp.full(size // 8, number, jnp.float32) for number in range(8)}
    server = CopyServer(folder, "127.0.0.1")
    try:
        with MemoryCheckpoints(1, folder, abstract_state(state), report=print) as copies:
            began = time.monotonic()
            copies.copy(1, state, None)
            blocked = copies.blocked_seconds
            copies.wait()
            complete = time.monotonic() - began
            assert copies.newest == 1 and blocked < complete
            began = time.monotonic()
            CopyClient(0, server.address, server.token).send(memory_folder.own_copies(folder, 0).path(1), 1)
            sent = time.monotonic() - began
        with MemoryCheckpoints(1, folder, abstract_state(state), report=print) as copies:
            began = time.monotonic()
            assert copies.latest_step(0) == 1
            found = jax.block_until_ready(copies.restore(1))
            restored = time.monotonic() - began
            assert all((array == number).all() for number, array in enumerate(found.values()))
    finally:
        server.close()
        shutil.rmtree(folder)
    record(
        19,
        f"a copy of {4 * size / 2**20:.0f} MiB in memory",
        f"held up training for {blocked:.3f} s, written and hashed after {complete:.1f} s, sent to a neighbour on the "
        f"loopback interface and checked there in {sent:.1f} s; checked and restored in {restored:.1f} s",
    )
