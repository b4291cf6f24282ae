"""Checks before the first step that all processes run the same program, on the same kind of device."""

import hashlib
import platform
import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import jaxstack
from jaxstack.distributed import coordination
from jaxstack.errors import ConfigError
from jaxstack.observe.environment import PACKAGES, git_commit

SKEW_SECONDS = 2.0


def check_program(settings: str, timeout_seconds: float = 300) -> list[str]:
    """Check that package versions, commit and configuration match on all processes; return warnings if clocks differ.

    Args:
      settings: the run's configuration as text.
      timeout_seconds: limit on waiting for the other processes.

    Returns:
      Warnings, one per line.

    Raises:
      ConfigError: the processes differ; the message names the values, and the processes that have each.
      JaxstackError: a process does not answer.
    """
    coordination.barrier("clocks", timeout_seconds)
    facts: dict[str, Any] = {"host": socket.gethostname(), "clock": time.time(), "python": platform.python_version()}
    facts |= {name: _version(name) for name in PACKAGES}
    facts["jaxstack"] = jaxstack.__version__
    facts["commit"] = git_commit(Path(__file__).parent) or "unknown"
    facts["configuration"] = hashlib.sha256(settings.encode()).hexdigest()[:12]
    everyone = coordination.all_gather("program", facts, timeout_seconds)
    _refuse(disagreements(everyone, ignore=("host", "clock")))
    return _skew(everyone)


def check_same_devices(timeout_seconds: float = 300) -> None:
    """Check that all processes have the same number and kind of devices.

    Raises:
      ConfigError: they differ.
    """
    local = jax.local_devices()
    facts = {"host": socket.gethostname(), "devices a process": len(local), "device kind": local[0].device_kind}
    _refuse(disagreements(coordination.all_gather("devices", facts, timeout_seconds), ignore=("host",)))


def disagreements(facts: Sequence[Mapping[str, Any]], ignore: Sequence[str] = ()) -> list[str]:
    """Return one line for each fact (such as a version) that differs: each value, with the processes that have it."""
    lines = []
    for name in facts[0]:
        holders: dict[Any, list[int]] = defaultdict(list)
        for index, one in enumerate(facts):
            holders[one.get(name)].append(index)
        if name not in ignore and len(holders) > 1:
            rarest_last = sorted(holders.items(), key=lambda item: -len(item[1]))
            shown = (f"{value} on {_show(indices, facts)}" for value, indices in rarest_last)
            lines.append(f"{name}: {', '.join(shown)}")
    return lines


def _show(indices: Sequence[int], facts: Sequence[Mapping[str, Any]]) -> str:
    if len(indices) > 4:
        return f"{len(indices)} processes"
    return ", ".join(f"process {index} ({facts[index]['host']})" for index in indices)


def _refuse(lines: Sequence[str]) -> None:
    if lines:
        shown = "\n  ".join(lines)
        raise ConfigError(f"the processes of the run differ:\n  {shown}\nStart all of them alike.")


def _skew(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    clocks = [one["clock"] for one in facts]
    skew = max(clocks) - min(clocks)
    if skew < SKEW_SECONDS:
        return []
    ahead, behind = (facts[clocks.index(pick(clocks))]["host"] for pick in (max, min))
    return [f"the clock of {ahead} is {skew:.1f} s ahead of that of {behind}: certificates and logs need NTP or chrony"]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
