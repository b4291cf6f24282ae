"""Cleans up after killed processes: what is left of a run whose launcher was killed, and files in /dev/shm.

As a script, `cleanup.py FOLDER [MEMORY]`, it kills the processes of a run whose launcher was killed. Its standard input
is a pipe from the launcher, whose end it waits for. When the launcher dies, the operating system ends its children, but
not the processes that these have started, such as a trainer below a shell. The script runs as a file, with only the
standard library, so that it starts at once and stays small.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_ROUNDS = 50
_ROUND_SECONDS = 0.1
FOLDER = Path("/dev/shm")


class CleanupProcess:
    """Helper process that kills a run's remaining processes when the launcher dies or calls `close`.

    The processes of the run are those with `folder` in their environment.

    Must be created before the launcher adopts orphans: the cleanup process must not be its child.

    Args:
      folder: a path that is in the environment of all processes of the run.
      memory: folder of copies of the run's state, which is removed too; None: there is none.
    """

    def __init__(self, folder: Path, memory: Path | None = None):
        folders = [str(path) for path in (folder, memory) if path is not None]
        self._first = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *folders],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._first.wait()

    def close(self) -> None:
        """Tell the helper process that the run has ended: it kills any process of the run that is left, and exits."""
        if self._first.stdin is not None:
            self._first.stdin.close()


def find_marked_processes(folder: str) -> list[int]:
    """Return the ids of this user's processes whose environment contains the path `folder`."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                if folder.encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
    return found


def wait_and_kill(folder: str, *others: str) -> None:
    """Wait for the end of the launcher, then kill the processes of the run that are left, and remove the folders."""
    if os.fork():
        os._exit(0)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sys.stdin.buffer.read()
    for _ in range(_ROUNDS):
        left = find_marked_processes(folder)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break
        time.sleep(_ROUND_SECONDS)
    for path in (folder, *others):
        shutil.rmtree(path, ignore_errors=True)


def list_files(folder: Path = FOLDER) -> set[Path]:
    """Return the files in `folder` (/dev/shm by default) that belong to this user."""
    found = set()
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if path.is_file() and path.lstat().st_uid == os.getuid():
                    found.add(path)
    return found


def remove_left_behind(before: set[Path], folder: Path = FOLDER) -> list[Path]:
    """Remove files that are not in `before` and that no running process of this user uses; return their paths."""
    left = {}
    for path in list_files(folder) - before:
        with contextlib.suppress(OSError):
            left[path] = _identity(path.lstat())
    used = _used_files() if left else set()
    gone = sorted(path for path, identity in left.items() if identity not in used)
    for path in gone:
        path.unlink(missing_ok=True)
    return gone


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _used_files() -> set[tuple[int, int]]:
    """Return (device, inode) of all files that running processes have mapped or open.

    A mapped file may have lost its name.
    """
    used = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                device, inode = line.split(maxsplit=5)[3:5]
                major, minor = (int(number, 16) for number in device.split(":"))
                used.add((os.makedev(major, minor), int(inode)))
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    used.add(_identity(descriptor.stat()))
    return used


if __name__ == "__main__":
    wait_and_kill(*sys.argv[1:])
