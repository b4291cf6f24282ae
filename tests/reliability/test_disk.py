"""Rows 1, 3, 4, 5 and 17: kills during saves, damage on disk, a full disk, and the memory of many saves."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.checkpoint.leaves import abstract_state
from jaxstack.checkpoint.manager import CheckpointManager
from tests.checkpoint.states import assert_same, make_state
from tests.checkpoint.test_disk_full import fill, fill_up, mounted, small_disk  # noqa: F401
from tests.checkpoint.test_kill import check_all_whole, run_and_kill
from tests.observe.test_trackers import scalars
from tests.reliability.runs import FAULTY, REPOSITORY, Runs, finish, ranks, read_until, waiting
from tests.reliability.states import files_of
from tests.reliability.test_memory import MEMORY, STEPS, copied, folder_of

pytestmark = pytest.mark.exhaustive

MANY_SAVES = """
import os, sys
import jax, jax.numpy as jnp
from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.checkpoint.manager import CheckpointManager

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

manager = CheckpointManager(sys.argv[1], CheckpointConfig(keep=2))
state = {f"w{i}": jnp.zeros((256, 512)) for i in range(16)}  # 8 MiB: one copy left behind would show
change = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
for step in range(1, int(sys.argv[2]) + 1):
    state = change(state)
    manager.save(step, state)
    if step == 20:
        manager.wait()
        before = resident()
manager.wait()
print((resident() - before) / 2**20 / (step - 20))
manager.close()
"""


def test_killed_during_saves(tmp_path, pytestconfig, full, record):
    """Row 1. Each start goes on from the newest checkpoint that the killed one had committed, or a newer one."""
    count = pytestconfig.getoption("--kills", default=None) or (100 if full else 2)
    chance = random.Random()
    warnings = []
    steps = [0]

    def open_manager():
        return CheckpointManager(tmp_path / "checkpoints", CheckpointConfig(keep=2), report=warnings.append)

    for kill in range(count):
        seen = run_and_kill(tmp_path / "checkpoints", chance, after_a_commit=kill % 2 == 0)
        steps.append(check_all_whole(open_manager, max(seen, steps[-1])))
    assert steps == sorted(steps) and steps[-1] > 0
    assert not any("damaged" in line for line in warnings)
    cut = sum("cut off" in line for line in warnings)
    record(
        1, f"{count} x SIGKILL during saves", f"nothing torn or lost, resumed {count} of {count}; {cut} cut off a save"
    )


@pytest.fixture
def two(tmp_path):
    """Checkpoints 1 and 2; called, it repairs the second."""
    folder = tmp_path / "checkpoints"
    with CheckpointManager(folder) as manager:
        for step in (1, 2):
            manager.save(step, make_state(step), {"seed": step}, wait=True)
    shutil.copytree(folder / "2", tmp_path / "copy")

    def repair():
        shutil.rmtree(folder / "2")
        shutil.copytree(tmp_path / "copy", folder / "2")

    return folder, repair


def newest(folder) -> tuple[int | None, list[str]]:
    """What a start takes up, and what it says."""
    said = []
    with CheckpointManager(folder, report=said.append) as manager:
        return manager.latest_step(), said


def test_flipped_bits(two, full, record):
    """Row 3."""
    folder, repair = two
    chance = random.Random(3)
    count = 200 if full else 20
    for _ in range(count):
        files = [path for path in files_of(folder / "2") if path.stat().st_size]
        victim = chance.choices(files, [path.stat().st_size for path in files])[0]
        content = bytearray(victim.read_bytes())
        bit = chance.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        victim.write_bytes(content)
        step, said = newest(folder)
        assert step == 1 and len(said) == 1, f"bit {bit} of {victim}"
        # A hash in the manifest that has changed is named together with the file that it belongs to.
        mark = "SHA256SUMS" if victim.name == "SHA256SUMS" else f": {victim.relative_to(folder / '2').as_posix()}:"
        assert mark in said[0], said
        repair()
    assert newest(folder) == (2, [])
    with CheckpointManager(folder) as manager:
        assert_same(manager.restore(1, abstract_state(make_state(1)))[0], make_state(1))
    record(3, f"{count} single-bit flips in a checkpoint", f"{count} noticed and named, fell back one checkpoint")


def test_cut_and_deleted_files_and_strangers(two, full, record):
    """Row 4."""
    folder, repair = two
    names = [path.relative_to(folder / "2") for path in files_of(folder / "2")]
    cases = 0
    for name in names:
        size = (folder / "2" / name).stat().st_size
        for left in sorted({None, 0, size // 2, size - 1} - {size, -1}, key=str)[: None if full else 1]:
            victim = folder / "2" / name
            content = victim.read_bytes()
            victim.unlink()
            if left is not None:
                victim.write_bytes(content[:left])
            step, said = newest(folder)
            assert step == 1 and len(said) == 1 and name.as_posix() in said[0], (name, left, said)
            cases += 1
            repair()
    (folder / "3").mkdir()
    (folder / "4").symlink_to(folder / "1")
    (folder / "5").write_text("a file")
    step, said = newest(folder)
    assert step == 2 and all(any(str(folder / name) in line for line in said) for name in "345")
    (folder / "2" / "SHA256SUMS").unlink()
    assert newest(folder)[0] == 1
    figure = (
        f"{cases} cuts and deletions of {len(names)} files, a stray directory, a link, a file, no marker: all named"
    )
    record(4, "damaged and foreign files", f"{figure}; started from the newest intact one")


def test_full_disk(small_disk, record):  # noqa: F811
    """Row 5. A tmpfs of 8 MiB that other data fills, and leaves."""
    import jax.numpy as jnp

    told = []
    state = {"x": jnp.arange(500_000, dtype=jnp.float32)}
    manager = CheckpointManager(small_disk / "checkpoints", CheckpointConfig(keep=1), report=told.append)
    manager.save(1, state, wait=True)
    fill(small_disk)
    before = os.statvfs(small_disk).f_bavail
    manager.save(2, state)
    assert manager.latest_step() == 1
    assert len(told) == 1 and "step 2 was not saved: no space left" in told[0]
    assert os.statvfs(small_disk).f_bavail == before
    (small_disk / "filler").unlink()
    manager.save(3, state)
    manager.close()
    assert manager.latest_step() == 3 and len(told) == 1
    record(
        5, "disk full, then freed", "said once, all space reclaimed, the older checkpoint intact, the next save works"
    )


def test_full_disk_of_one_host(runs: Runs, record):
    """The other process does not wait for the part that is missing; both go on, and the next save is whole."""
    command = runs.train("one-full", "train.steps=14", "checkpoint.every_steps=4", command=FAULTY)
    launcher = runs.launch(["--processes", "2"], command, FAULT="disk", FAULT_RANK="1", FAULT_STEP="8")
    began = time.monotonic()
    code, said = finish(launcher)
    seconds = time.monotonic() - began
    told = re.findall(r"the checkpoint of step 4 was not saved: process 1 on \S+: a file in .* raise it", said)
    assert code == 0 and len(told) == 1 and "starting again" not in said and seconds < 120, said
    assert runs.saved("one-full") == [8, 12, 14] and sorted(runs.losses("one-full")) == list(range(1, 15))
    record(5, "the disk of one of two hosts full, then freed", "said once with the process; the next save works")


def test_ranks_die_while_the_disk_is_full(runs: Runs, record):
    """Rank 1, and after the restart rank 0: the run goes on, and the copies in memory have the lines that wait."""
    with mounted(runs.folder / "full", "size=4m") as disk:
        small = runs.below("full")
        command = small.train(
            "run", *MEMORY, "checkpoint.every_steps=1000", "observe.trackers=[jsonl,tensorboard]", command=FAULTY
        )
        launcher = small.launch(["--processes", "2"], command, FAULT="slow", FAULT_RANK="0", FAULT_STEP="0")
        small.wait_for_step(launcher, "run", 4)
        fill_up(disk)
        said = read_until(launcher, r"metrics of step \d+ could not be written \(jsonl\)")
        folder = folder_of(launcher)
        resumed = []
        for rank in (1, 0):
            before = max(copied(folder, 0))
            for _ in waiting(launcher):
                if min(max(copied(folder, one), default=0) for one in (0, 1)) >= before + 6:
                    break
            os.kill(ranks(launcher)[rank], signal.SIGKILL)
            full = r"warning: cannot write the run directory \S+: No space left on device; going on"
            said += read_until(launcher, "resuming from step .* memory", full, r"could not be written \(jsonl\)")
            resumed += re.findall(r"resuming from step (\d+) \(from memory", "".join(said))[-1:]
        logged = max(small.losses("run"))
        assert logged < int(resumed[0]) < int(resumed[1]), "".join(said)
        (disk / "filler").unlink()
        code, rest = finish(launcher)
        assert code == 0, "".join(said) + rest
        assert list(small.losses("run")) == list(range(1, STEPS + 1))
        assert [step for step, _ in scalars(disk / "run" / "tensorboard", "loss")] == list(range(1, STEPS + 1))
    record(
        5, "SIGKILL of rank 1, then of rank 0 of 2, on a full disk",
        f"went on from steps {' and '.join(resumed)} in memory; when there was room all {STEPS} lines of metrics, once",
    )  # fmt: skip


def test_memory_of_many_saves(tmp_path, full, record):
    """Row 17. Asynchronous saves of 8 MiB, in a process of its own."""
    saves = 100 if full else 40
    done = subprocess.run(
        [sys.executable, "-c", MANY_SAVES, str(tmp_path / "checkpoints"), str(saves)],
        capture_output=True, text=True, cwd=REPOSITORY, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0 and re.fullmatch(r"-?[\d.e-]+\n", done.stdout), done.stderr
    grown = float(done.stdout)
    assert grown <= 2
    record(17, f"{saves} saves of 8 MiB in one run", f"{grown:.2f} MiB of host memory a save after the 20th")
