"""Errors that users see: one message with the violated rule, the values and the remedy, without a traceback."""

import difflib
import errno
import os
import re
import sys
from collections.abc import Iterable

ATTEMPT = "JAXSTACK_ATTEMPT"
"""Environment variable with the number of the run's start, from 1, which the launcher sets."""


class JaxstackError(Exception):
    """A failure at run time that the user can act on. Commands print its message and exit with `exit_code`."""

    exit_code = 1


class ConfigError(JaxstackError):
    """A wrong configuration or a wrong use of a command, found before any device work."""

    exit_code = 2


def cannot_write(place: object, error: OSError) -> JaxstackError:
    """Return the exception to raise if a file cannot be written.

    Its exit code is 2, or 1 if it may be written later: on a disk that is full, and where a launcher starts a command
    again, which could write it before.
    """
    limit = "; raise the limit on file sizes (ulimit -f)" if error.errno == errno.EFBIG else ""
    later = is_full(error) or os.environ.get(ATTEMPT, "1") != "1"
    return (JaxstackError if later else ConfigError)(f"cannot write {place}: {error.strerror or error}{limit}")


def is_full(error: OSError) -> bool:
    """Return True if a disk, or a quota on it, is full: what could not be written may find room later."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


_WANTED = re.compile(r"allocat\w*\s+(?:of\s+)?([\d.]+)\s?(bytes|B|[KMGT]i?B)\b", re.IGNORECASE)
"""The size in XLA's message about an allocation that failed."""


def memory_shortage(error: BaseException) -> str | None:
    """Return a text that says how much device memory was missing, or None if this was not the reason of an error.

    XLA tells it in the text of its exceptions only. What a kernel needs of a multiprocessor's shared memory does not
    depend on sizes that a user sets; that is a fault of the kernel.
    """
    text = str(error)
    if "shared memory" in text.lower() or not ("RESOURCE_EXHAUSTED" in text or "CUDA_ERROR_OUT_OF_MEMORY" in text):
        return None
    wanted = _WANTED.search(text)
    parts = ["out of device memory"]
    if wanted is not None:
        size, unit = wanted.groups()
        count = _size(float(size)) if unit.lower() in ("b", "bytes") else f"{size} {unit}"
        parts.append(f"{count} could not be allocated")
    jax = sys.modules.get("jax")
    free = []
    for device in () if jax is None else jax.local_devices():
        statistics = device.memory_stats() or {}
        if limit := statistics.get("bytes_limit"):
            free.append((limit - statistics.get("bytes_in_use", 0), limit, device.id))
    if free:
        least, limit, number = min(free)  # XLA does not say which device it was
        place = f" on device {number}" if len(free) > 1 else ""
        parts.append(f"{_size(least)} of {_size(limit)} are free{place}")
    elif wanted is None:
        parts.append(text.splitlines()[0])
    return ": ".join([parts[0], ", ".join(parts[1:])])


def _size(count: float) -> str:
    return f"{count / 2**30:,.2f} GiB" if count >= 2**27 else f"{count / 2**20:,.1f} MiB"


_MOST_CHOICES = 60
"""Largest number of choices that a message lists. Only lists from other packages, such as harness tasks, are longer."""

CHOICES = "choose one of: "
"""First words of a hint that lists all valid names."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return a hint for a misspelt name: text that lists the closest choices, or all choices if none is close.

    For example `did you mean 'learning_rate'?` or `choose one of: 'adamw', 'lion'`.

    Args:
      word: what the user wrote.
      choices: the valid names.
    """
    known = sorted(set(choices))
    alike = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    if alike:
        return "did you mean " + " or ".join(repr(a) for a in alike) + "?"
    if len(known) > _MOST_CHOICES:
        return f"none of {len(known):,} names is like it"
    return f"{CHOICES}{', '.join(repr(k) for k in known)}"
