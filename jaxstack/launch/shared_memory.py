"""Files in /dev/shm that processes which were killed have left behind, as NCCL's and Python's do."""

import contextlib
import os
from pathlib import Path

FOLDER = Path("/dev/shm")


def list_files(folder: Path = FOLDER) -> set[Path]:
    """Files there that belong to this user."""
    found = set()
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if path.is_file() and path.lstat().st_uid == os.getuid():
                    found.add(path)
    return found


def remove_left_behind(before: set[Path], folder: Path = FOLDER) -> list[Path]:
    """Removes the files that are new since `before` and that no living process of this user holds; returns them."""
    left = list_files(folder) - before
    if left:
        left -= _held()
    for path in left:
        path.unlink(missing_ok=True)
    return sorted(left)


def _held() -> set[Path]:
    held = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                held.add(Path(line.partition("/")[1] + line.partition("/")[2]))
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    held.add(Path(os.readlink(descriptor)))
    return held
