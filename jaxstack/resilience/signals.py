"""SIGTERM and Ctrl-C as a request to save and stop, instead of an end in the middle of a step."""

import signal
from types import FrameType

from jaxstack.errors import JaxstackError


class Interrupted(JaxstackError):
    """The run was stopped by a signal after it had saved; `exit_code` is 128 + the signal's number."""

    def __init__(self, signum: int, message: str):
        super().__init__(message)
        self.exit_code = 128 + signum


class StopRequest:
    """Within it, the first SIGTERM or SIGINT only sets `signum`; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._before[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _receive(self, signum: int, _: FrameType | None) -> None:
        if self.signum is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = signum
