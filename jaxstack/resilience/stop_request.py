"""Stops training on SIGTERM, Ctrl-C or SIGHUP after a save, at one step that all processes agree on."""

import itertools
import signal
import threading
import time
from types import FrameType

from jaxstack.distributed import coordination
from jaxstack.errors import JaxstackError
from jaxstack.resilience.exit_on_signal import SAME_SECONDS, stop_signals

_POLL_SECONDS = 0.25
_AGREE_SECONDS = 120
_NEVER = 2**62
_numbers = itertools.count()


class Interrupted(JaxstackError):
    """Raised after a signal has stopped the run and its state was saved; `exit_code` is 128 + the signal's number."""

    def __init__(self, signum: int, message: str):
        super().__init__(message)
        self.exit_code = 128 + signum


class StopRequest:
    """Context manager that turns a stop signal into a request to save and stop, at a step agreed on by all processes.

    The signals are SIGTERM, SIGINT and SIGHUP; a SIGINT some seconds after the first one interrupts at once.

    A single process stops at its next tick. With several, each tells the others the next tick at which it can stop and
    goes no further until all have answered; all stop at the latest of these ticks. They talk in a thread, so that the
    agreement does not depend on the progress of the devices.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._heard = 0.0
        self._before: dict[int, object] = {}
        self._index, self._count = coordination.process_position()
        self._name = f"stop-{next(_numbers)}"
        self._lock = threading.Lock()
        self._ticks = 0
        self._announced: int | None = None
        self._agreed: int | None = None
        self._known = threading.Event()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "StopRequest":
        main = threading.current_thread() is threading.main_thread()  # Python lets no other thread handle signals
        for signum in stop_signals() if main else ():
            self._before[signum] = signal.signal(signum, self._receive)
        if self._count > 1:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        self._over.set()
        if self._thread is not None and kind is None:
            self._thread.join()
            if self._announced is None:
                # Another process may have been asked at its last tick, and waits for the answer of this one.
                coordination.publish(f"{self._name}/at/{self._index}", _NEVER)

    def reached(self) -> bool:
        """Return True if the run must stop now; every process calls it at the same points, such as after each step.

        Each call counts one tick.

        Raises:
          JaxstackError: another process does not answer for two minutes.
        """
        if self._thread is None:
            return self.signum is not None
        with self._lock:
            self._ticks += 1
            here = self._ticks
            if self._announced is None or here < self._announced:
                return False
        if not self._known.wait(_AGREE_SECONDS):
            raise JaxstackError("the processes did not agree on a step to stop at; look at the logs of the others")
        return here == self._agreed

    def heard(self) -> bool:
        """Return True if any process got a stop signal; every process must call it once, at the end of the run.

        Raises:
          JaxstackError: another process does not answer for two minutes.
        """
        self.signum = max(coordination.all_gather(f"{self._name}/last", self.signum or 0, _AGREE_SECONDS)) or None
        return self.signum is not None

    def _receive(self, signum: int, _: FrameType | None) -> None:
        if self.signum is None:
            self.signum = signum
            self._heard = time.monotonic()
        elif signum == signal.SIGINT and time.monotonic() - self._heard > SAME_SECONDS:
            raise KeyboardInterrupt

    def _watch(self) -> None:
        try:
            while not self._over.wait(_POLL_SECONDS):
                asked = coordination.try_read(self._name)
                if asked is None and self.signum is not None:
                    coordination.publish(self._name, asked := self.signum)
                if asked is not None:
                    self._agree(asked)
                    return
        except (RuntimeError, TimeoutError):
            return  # a process is gone; the failure that ends the others then ends this one too

    def _agree(self, signum: int) -> None:
        with self._lock:
            self._announced = self._ticks + 1
        coordination.publish(f"{self._name}/at/{self._index}", self._announced)
        wanted = (f"{self._name}/at/{other}" for other in range(self._count))
        latest = max(coordination.wait_for_value(key, _AGREE_SECONDS) for key in wanted)
        # All processes exit with the code of the first signal, even those that received none.
        self.signum = signum
        self._agreed = latest
        self._known.set()
