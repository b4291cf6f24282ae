"""A real full disk: a small tmpfs, which needs the right to mount one."""

import os
import shutil
import subprocess
import threading

import jax.numpy as jnp
import pytest

from jaxstack.checkpoint import CheckpointConfig, CheckpointManager


@pytest.fixture
def small_disk(tmp_path):
    """8 MB of their own."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(path)], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk):
    """Leaves a megabyte, by a file `filler`."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filler").write_bytes(bytes(free - 1_000_000))


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
