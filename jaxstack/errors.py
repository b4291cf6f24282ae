"""The errors that a user sees: one message with the rule, the values and the way out; never a traceback."""

import difflib
import errno
from collections.abc import Iterable


class JaxstackError(Exception):
    """A failure while running that the user can act on. Commands print its message and exit with `exit_code`."""

    exit_code = 1


class ConfigError(JaxstackError):
    """A wrong configuration or a wrong use of a command, found before any device work."""

    exit_code = 2


def cannot_write(place: object, error: OSError) -> JaxstackError:
    """The error of a place that is wrong; of a full one, which may have room at the next try, with exit code 1."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (JaxstackError if full else ConfigError)(f"cannot write {place}: {error.strerror or error}")


_MOST = 60
"""Choices that a message lists; only lists from elsewhere have more, such as thousands of tasks of the harness."""


def nearest(word: str, choices: Iterable[str], count: int = 3) -> str:
    """A sentence part that names the choices most like `word`, or all of them where none is alike.

    Returns e.g. `did you mean 'learning_rate'?` or `choose one of: 'adamw', 'lion'`.
    """
    known = sorted(set(choices))
    alike = difflib.get_close_matches(word, known, n=count, cutoff=0.6)
    if alike:
        return "did you mean " + " or ".join(repr(a) for a in alike) + "?"
    if len(known) > _MOST:
        return f"none of {len(known):,} names is like it"
    return "choose one of: " + ", ".join(repr(k) for k in known)
