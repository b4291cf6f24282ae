"""Signals outside of the training loop: SIGTERM, SIGINT and SIGHUP end the process, SIGUSR1 prints stack traces.

Imports no jax, so that it is active from the first line of a command on.
"""

import contextlib
import faulthandler
import functools
import os
import signal
import threading

from jaxstack.resilience.progress_file import STACKS, ProgressFile

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a run to save and stop; a terminal that is closed sends SIGHUP."""
SAME_SECONDS = 5.0
"""Interval within which signals count as one: a scheduler that signals all processes of a job reaches some of them
twice, directly and through the launcher."""


def stop_signals() -> list[signal.Signals]:
    """Return the signals on which this process stops: SIGTERM, SIGINT and, unless `nohup` ignores it, SIGHUP."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signum for signum in STOP_SIGNALS if signum != signal.SIGHUP or not ignores_hangup]


def signal_name(signum: int) -> str:
    """Return a signal's name for messages, such as `Ctrl-C` for SIGINT."""
    known = {signal.SIGINT: "Ctrl-C", signal.SIGHUP: "SIGHUP (the terminal was closed)"}
    try:
        return known.get(signal.Signals(signum)) or signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


@functools.cache
def _stacks_file() -> int:
    """Return the file in which the supervisor reads the stacks of this process, or standard error."""
    stacks = os.environ.get(STACKS)
    return os.open(stacks, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600) if stacks else 2


def print_stacks_on_signal() -> None:
    """Let SIGUSR1 write the stacks of all threads, to standard error or to the file that the supervisor asked for."""
    faulthandler.register(signal.SIGUSR1, file=_stacks_file(), all_threads=True)


class ExitOnSignal:
    """Context manager in which SIGTERM, SIGINT or SIGHUP ends the process at once, without saving a checkpoint.

    The exit code is 128 + the signal's number. A `StopRequest` inside it takes the signals instead.

    Python runs signal handlers between two of its own instructions, and one instruction can be a compilation of
    several minutes; therefore a thread reads the signals. This also catches a Ctrl-C during a library's callback, where
    Python would print and drop the exception. SIGUSR1 writes the stacks of all threads, even while another thread has
    the GIL, to standard error or to the file that the supervisor asked for. From its begin on the supervisor counts how
    long the process is silent.

    Args:
      name: the command, for the message on standard error.
    """

    def __init__(self, name: str):
        self._name = name

    def __enter__(self) -> "ExitOnSignal":
        ProgressFile.of_this_process().note()  # from here on silence counts
        print_stacks_on_signal()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._handler = lambda signum, frame: None
        self._before = {signum: signal.signal(signum, self._handler) for signum in stop_signals()}
        self._fd_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._fd_before)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        os.close(self._write)
        faulthandler.unregister(signal.SIGUSR1)

    def _watch(self) -> None:
        while received := os.read(self._read, 1):
            if received[0] in STOP_SIGNALS and signal.getsignal(received[0]) is self._handler:
                text = f"stopped by {signal_name(received[0])} outside of the training steps; nothing is saved"
                with contextlib.suppress(OSError):  # the terminal may be gone
                    os.write(2, f"{self._name}: {text}\n".encode())
                os._exit(128 + received[0])
        os.close(self._read)
