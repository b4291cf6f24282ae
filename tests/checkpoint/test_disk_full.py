"""A real full disk: a small tmpfs, which needs the right to mount one."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading

import jax.numpy as jnp
import pytest

from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.checkpoint.manager import CheckpointManager
from tests.checkpoint.conftest import REPOSITORY


@contextlib.contextmanager
def mounted(path, options):
    """A tmpfs."""
    path.mkdir()
    done = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True
    )
    if not done or done.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    """8 MB of their own."""
    with mounted(tmp_path / "disk", "size=8m") as path:
        yield path


MANY_FAILURES = """
import sys
import jax.numpy as jnp
from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.checkpoint.manager import CheckpointManager

manager = CheckpointManager(sys.argv[1], CheckpointConfig(keep=1), report=print)
state = {f"w{i}": jnp.ones((64, 64)) for i in range(60)}
for step in range(1, 6):
    manager.save(step, state)
try:
    manager.close()
except Exception as error:
    print("closed:", error)
"""


@pytest.mark.longer
def test_a_disk_without_room_for_files_says_so_without_tracebacks(tmp_path):
    """Each leaf fails by itself, some of them after Orbax has given up waiting."""
    with mounted(tmp_path / "disk", "size=8m,nr_inodes=20") as disk:
        done = subprocess.run(
            [sys.executable, "-c", MANY_FAILURES, str(disk / "checkpoints")],
            capture_output=True, text=True, cwd=REPOSITORY, timeout=300,
        )  # fmt: skip
    assert done.returncode == 0 and "was not saved: no space left" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "never retrieved" not in done.stderr, done.stderr


def fill(disk):
    """Leaves a megabyte, by a file `filler`."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(bytes(free - 1_000_000))


def fill_up(disk):
    """Leaves nothing, by a file `filler`."""
    with open(disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


@pytest.mark.quick
def test_said_once_space_reclaimed_and_the_next_save_works(small_disk, capfd):
    told = []
    manager = CheckpointManager(small_disk / "checkpoints", CheckpointConfig(keep=1), report=told.append)
    state = {"x": jnp.arange(500_000, dtype=jnp.float32)}
    manager.save(1, state, wait=True)
    fill(small_disk)
    before = os.statvfs(small_disk).f_bavail

    manager.save(2, state)
    manager._join()
    assert len(told) == 1 and "step 2 was not saved: no space left" in told[0]
    assert os.statvfs(small_disk).f_bavail == before
    assert manager.latest_step() == 1
    assert all(thread.daemon or thread.name.startswith("asyncio") for thread in threading.enumerate()[1:])
    captured = capfd.readouterr()
    assert "Traceback" not in captured.out + captured.err

    (small_disk / "filler").unlink()
    manager.save(3, state)
    manager.close()
    assert manager.latest_step() == 3 and len(told) == 1
    assert manager.all_steps() == [3]
