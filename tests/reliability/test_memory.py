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
from jaxstack.checkpoint.memory_folder import Part
from jaxstack.checkpoint.neighbour import CopyClient, CopyServer
from jaxstack.launch.supervisor import free_port
from tests.reliability.runs import Runs, end, environment_of, finish, listening, ranks, read_until, waiting

pytestmark = pytest.mark.exhaustive
EVERY = 3
STEPS = 24
COPIES = (
    f"train.steps={STEPS}", "train.eval_every_steps=null", "checkpoint.every_steps=10",
    "resilience.heartbeat_seconds=6", "parallel.data=2", "parallel.fsdp=2",
)  # fmt: skip
SOURCES = r"own \d, neighbour \d(?:, other layout \d)?"
"""Where copies are from: one process may have a newer copy than the other, which then reads its own shards there."""
MEMORY = (*COPIES, f"checkpoint.memory_every_steps={EVERY}")


@pytest.fixture(scope="module")
def unbroken(runs: Runs) -> dict[int, float]:
    """The losses of two processes without a failure, and without copies in memory."""
    code, said = finish(runs.launch(["--processes", "2"], runs.train("calm", *COPIES)))
    assert code == 0, said
    return runs.losses("calm")


def folder_of(launcher: subprocess.Popen) -> Path:
    """The folder of copies of a launcher's processes."""
    pid = next(iter(ranks(launcher).values()))
    return Path(environment_of(pid)[memory_folder.VARIABLE])


def copied(folder: Path, rank: int, kind: str = "own") -> list[int]:
    """The steps of the complete copies of one of two processes."""
    return memory_folder.Copies(folder / kind / f"{rank}of2").steps()


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
    match = re.search(rf"resuming from step (\d+) \(from memory: {SOURCES}, restored in ([\d.]+) s\)", said)
    assert match is not None, said
    step = int(match[1])
    assert step >= 12 and step % EVERY == 0 and set(runs.saved(name)) <= {10, step}
    assert "copies in memory every 3 steps, with second copies on the same node" in said
    check_end(runs, name, launcher, unbroken)
    assert runs.saved(name) == sorted({10, step, 20, STEPS}), "the interval on disk is its own"
    record(
        19,
        "SIGKILL of a rank of 2, copies in memory",
        f"went on from step {step} in memory (checkpoint 10 on disk) after {seconds:.0f} s, restored in {match[2]} s; "
        f"{STEPS} losses bit-equal to a calm run",
    )


def test_what_was_restored_from_memory_outlives_the_launcher(runs: Runs, unbroken):
    """SIGTERM before the first step after a restart: the copies end with the launcher, the steps do not."""
    name = "memory-kept"
    launcher = runs.launch(["--processes", "2"], runs.train(name, *MEMORY, "checkpoint.every_steps=1000"))
    wait_until_copied(runs, launcher, name, 12)
    os.kill(ranks(launcher)[1], signal.SIGKILL)
    said = "".join(read_until(launcher, "resuming from step"))
    step = int(re.findall(r"resuming from step (\d+) \(from memory", said)[0])
    for _ in waiting(launcher):
        if runs.saved(name):
            break
    launcher.send_signal(signal.SIGTERM)
    finish(launcher)
    launcher = runs.launch(["--processes", "2"], runs.train(name, *MEMORY))
    said = "".join(read_until(launcher, "resuming from step"))
    assert step in runs.saved(name)
    (resumed,) = re.findall(r"resuming from step (\d+) \(\S*checkpoints", said)
    assert int(resumed) >= step
    check_end(runs, name, launcher, unbroken)


def damage(copy: Path) -> None:
    """Flips a bit of each array of a copy."""
    for path in (copy / "arrays").iterdir():
        content = bytearray(path.read_bytes())
        content[-1] ^= 4
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("kinds", "damaged", "source"),
    [
        (("own",), (0,), "from memory: own 1, neighbour 1, "),
        (("own", "neighbour"), (0,), "from memory: own 1, neighbour 0, other layout 1, "),
        (("own", "neighbour"), (0, 1), "checkpoints, "),
    ],
    ids=["own", "both", "all"],
)
def test_a_damaged_copy_is_named_and_the_next_source_used(runs: Runs, unbroken, kinds, damaged, source, record):
    """Damage to copies while nothing runs: the launcher is stopped for that, as it restarts after a second.

    Each process has the whole state, half on each of its devices, so that the other one's copy has this one's shards.
    """
    name = f"memory-damaged-{len(kinds)}-{len(damaged)}"
    launcher = runs.launch(["--processes", "2"], runs.train(name, *MEMORY))
    wait_until_copied(runs, launcher, name, 12)
    folder = folder_of(launcher)
    pids = ranks(launcher)
    launcher.send_signal(signal.SIGSTOP)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    newest = max(copied(folder, 0))
    for kind in kinds:
        for rank in damaged:
            for step in copied(folder, rank, kind):
                damage(folder / kind / f"{rank}of2" / str(step))
    launcher.send_signal(signal.SIGCONT)
    said = "".join(read_until(launcher, "resuming from step"))
    for kind in kinds:
        for rank in damaged:
            whose = {"own": "its own", "neighbour": "its neighbour's"}[kind]
            assert f"copy of step {newest} of process {rank} in {whose} memory cannot be used" in said, said
    resumed = 10 if source == "checkpoints, " else newest
    assert re.search(rf"resuming from step {resumed} \(\S*{source}", said), said
    check_end(runs, name, launcher, unbroken)
    record(
        19,
        f"{len(kinds) * len(damaged)} of the 4 copies of 2 ranks in memory damaged",
        f"all named; went on from step {resumed}, {source.rstrip(', ')}; losses bit-equal",
    )


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
        match = re.search(rf"resuming from step (\d+) \(from memory: {SOURCES}, restored in ([\d.]+) s\)", said)
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


@pytest.mark.parametrize("lost", [1, 0])
@pytest.mark.parametrize("layout", [("parallel.data=4", "parallel.fsdp=1"), ("parallel.data=1", "parallel.fsdp=4")])
def test_with_a_node_fewer_a_run_goes_on_from_memory(runs: Runs, lost, layout, record, full):
    """Of two nodes one is killed for good with its launcher and its memory; with `fsdp` it had half of the state."""
    if (lost, layout[0]) != (0, "parallel.data=1") and not full:
        pytest.skip("--full")
    name = f"memory-fewer-{lost}-{layout[1][-1]}"
    settings = [*COPIES[:-2], *layout]
    command = runs.train(name, *settings, f"checkpoint.memory_every_steps={EVERY}")

    def start(rank: int) -> subprocess.Popen:
        options = ["--nodes", "1:2", "--node-rank", str(rank), "--coordinator", f"127.0.0.1:{free_port()}"]
        return runs.launch([*options, "--rendezvous", str(runs.folder / f"meet-{name}")], command)

    nodes = {rank: start(rank) for rank in (0, 1)}
    left = nodes[1 - lost]
    try:
        wait_until_copied(runs, left, name, 12)
        began = time.monotonic()
        end(nodes[lost])
        said = "".join(read_until(left, "starting with 1 of 2 nodes", "resuming from step"))
        seconds = time.monotonic() - began
        match = re.search(
            r"resuming from step (\d+) \(from memory: own 0, neighbour 0, other layout 1, restored in ([\d.]+) s\)",
            said,
        )
        assert match is not None, said
        step = int(match[1])
        assert step >= 12 and step % EVERY == 0 and set(runs.saved(name)) <= {10, step}
        code, said = finish(left)
        assert code == 0, said
    finally:
        for node in nodes.values():
            end(node)
            node.communicate()
    found = runs.losses(name)
    calm = f"calm-{name}"
    code, said = finish(runs.start(runs.train(calm, *settings)))
    assert code == 0, said
    wanted = runs.losses(calm)
    assert sorted(found) == sorted(wanted)
    worst = max(abs(found[step] / wanted[step] - 1) for step in wanted)
    assert worst < 1e-6
    record(
        19,
        f"node {lost} of 2 lost for good, {layout[1].removeprefix('parallel.')}, copies in memory",
        f"the other went on from step {step} in memory (checkpoint 10 on disk) after {seconds:.0f} s with half of the "
        f"devices, restored in {match[2]} s; {STEPS} losses within {worst:.1e} (relative) of an unbroken run",
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
            root = memory_folder.own_copies(folder, Part(0, 1)).path(1)
            with CopyClient(server.address, server.token).sending(Part(0, 1), root, 1) as written:
                for number in range(8):
                    written(f"arrays/{number}")
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
