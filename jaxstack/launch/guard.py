"""Ends what is left of a run whose launcher was killed: `guard.py FOLDER`, with its standard input on the launcher.

The kernel ends the launcher's own children with it; what those have started, such as a trainer below a shell, it does
not. Run as a file, with nothing but the standard library, so that it is there at once and small.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

_ROUNDS, _ROUND_SECONDS = 50, 0.1


class Guard:
    """Until it is closed: once this process is gone, all that have `folder` in their environment are ended.

    To be made before the launcher adopts orphans: the guard is nobody's child.
    """

    def __init__(self, folder: Path):
        self._first = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._first.wait()

    def close(self) -> None:
        """The run has ended."""
        if self._first.stdin is not None:
            self._first.stdin.close()


def find_marked(folder: str) -> list[int]:
    """Processes of this user whose environment names `folder`."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                if folder.encode() in (path / "environ").read_bytes():
                    found.append(int(path.name))
    return found


def watch(folder: str) -> None:
    """Wait for the end of the launcher."""
    if os.fork():
        os._exit(0)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sys.stdin.buffer.read()
    for _ in range(_ROUNDS):
        left = find_marked(folder)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break
        time.sleep(_ROUND_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(sys.argv[1])
