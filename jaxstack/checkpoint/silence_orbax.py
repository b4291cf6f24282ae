"""Silences log messages of Orbax and TensorStore that repeat an error which the checkpoint code raises.

One failed write is logged with tracebacks by up to four of Orbax's threads, by asyncio for each leaf, and by
TensorStore for each leaf that fails after Orbax has closed its event loop. The caller gets the error as an exception.
Messages of asyncio about other code's tasks are not filtered.
"""

import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable

_ORBAX = os.sep.join(("", "orbax", "checkpoint", ""))
_STARTERS = ("asyncio", "concurrent")
_CLOSED = "Event loop is closed"
_NOT_AWAITED = r"coroutine 'async_(de)?serialize\w*\.<locals>\.\w+' was never awaited"


def silence_orbax(item: str) -> None:
    """Silence the log messages of Orbax, and those of TensorStore about files below a folder named `item`."""
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        if not any(isinstance(known, _WithoutOrbax) for known in logger.filters):
            logger.addFilter(_WithoutOrbax(item))
    if not isinstance(sys.unraisablehook, _WithoutClosedLoops):
        sys.unraisablehook = _WithoutClosedLoops(sys.unraisablehook)
    warnings.filterwarnings("ignore", _NOT_AWAITED, RuntimeWarning)


class _WithoutOrbax(logging.Filter):
    def __init__(self, item: str):
        super().__init__()
        self._tensorstore = re.compile(rf"[A-Z_]+: .*/{re.escape(item)}/", re.DOTALL)

    def filter(self, record: logging.LogRecord) -> bool:
        if _ORBAX in record.pathname:
            return False
        if record.name != "asyncio":
            return True
        # For a task without an exception, asyncio's message names the file of its function.
        return not (self._is_theirs(record.exc_info[1]) if record.exc_info else _ORBAX in record.getMessage())

    def _is_theirs(self, error: BaseException | None) -> bool:
        for frame, _ in traceback.walk_tb(error.__traceback__ if error else None):
            package = frame.f_globals.get("__name__", "").partition(".")[0]
            if package not in _STARTERS:
                # A user's task that failed inside Orbax has the user's code as its first frame.
                return package == "orbax"
        # Raised by no Python code: TensorStore sets the future's exception, with the text of a C++ status.
        return isinstance(error, ValueError) and bool(self._tensorstore.match(str(error)))


class _WithoutClosedLoops:
    """Replacement of `sys.unraisablehook` that drops TensorStore's errors about an event loop that Orbax has closed."""

    def __init__(self, before: "Callable[[sys.UnraisableHookArgs], object]"):
        self._before = before

    def __call__(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if not self._is_theirs(unraisable):
            self._before(unraisable)

    @staticmethod
    def _is_theirs(unraisable: "sys.UnraisableHookArgs") -> bool:
        if unraisable.exc_type is not RuntimeError or str(unraisable.exc_value) != _CLOSED or unraisable.object:
            return False
        frames = traceback.extract_tb(unraisable.exc_traceback, limit=1)
        # No Python function called it: it runs in a C++ thread.
        return bool(frames) and frames[0].name == "call_soon_threadsafe"
