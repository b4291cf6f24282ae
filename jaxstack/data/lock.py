"""A lock between processes that the kernel releases when its holder dies."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxstack.errors import JaxstackError


@contextmanager
def exclusive(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds the lock file `path`.

    Args:
      waiting: called once where another process holds it; then waits for it. None: raises instead.

    Raises:
      JaxstackError: another process holds it, and `waiting` is None.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is None:
                raise JaxstackError(f"another process is writing to {path.parent}: wait until it is done") from None
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
