"""Removes files in /dev/shm that killed processes have left, such as NCCL's and Python's."""

import contextlib
import os
from pathlib import Path

FOLDER = Path("/dev/shm")


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
