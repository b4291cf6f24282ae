"""Lets a child process die with its parent."""

import ctypes
import signal

_SET_PARENT_DEATH_SIGNAL = 1
_LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, even by SIGKILL; for `preexec_fn` of `subprocess`."""
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
