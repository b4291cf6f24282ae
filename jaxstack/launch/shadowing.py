"""Detects files in the current directory that `python -m jaxstack...` would import instead of jaxstack."""

import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from jaxstack.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
_PYTHON = re.compile(r"python[\d.]*")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def check_shadowing(command: Sequence[str], directory: Path | None = None) -> None:
    """Check that a command `python -m jaxstack...` imports this jaxstack, not a file in the current directory.

    A folder `jaxstack` with an `__init__.py`, or a file `jaxstack.py`, in the current directory would be imported
    instead; every start would fail alike.

    Args:
      command: program and arguments.
      directory: where it will run; default: the current directory.

    Raises:
      ConfigError: something else is imported; the message names it and the command that works.
    """
    module = _module_of(command)
    if module is None or module.split(".")[0] != "jaxstack" or os.environ.get("PYTHONSAFEPATH"):
        return
    place = (directory or Path.cwd()).resolve()
    spec = PathFinder.find_spec("jaxstack", [str(place), *sys.path])
    if spec is None:
        return
    if spec.origin is not None:
        found = Path(spec.origin).resolve()
        hidden = found.parent != _PACKAGE and found.is_relative_to(place)
        found = found.parent if found.name == "__init__.py" else found
    else:  # a folder without __init__.py, and no jaxstack on the path: an import hook would come too late
        found = place / "jaxstack"
        hidden = found.is_dir() and found != _PACKAGE
    if hidden:
        name = module.removeprefix("jaxstack").removeprefix(".")
        instead = f"use `jaxstack {name} ...` or " if name in ("train", "generate", "evaluate", "prepare") else ""
        raise ConfigError(
            f"{found} hides jaxstack from `python -m {module}`, which imports from the current directory first; "
            f"{instead}start from another directory."
        )


def _module_of(command: Sequence[str]) -> str | None:
    """Return MODULE of a command `python [options] -m MODULE`; None for other commands, and with -I or -P."""
    start = next((i for i, word in enumerate(command) if _PYTHON.fullmatch(os.path.basename(word))), None)
    if start is None:
        return None
    words = iter(command[start + 1 :])
    for word in words:
        if word == "-m":
            return next(words, None)
        if word in _WITH_VALUE:
            next(words, None)
        elif not word.startswith("-") or re.fullmatch(r"-\w*[cPI]\w*", word):
            return None
    return None
