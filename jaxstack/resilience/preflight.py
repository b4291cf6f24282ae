"""Checks before the first step that all processes run the same program, on the same kind of device.

As a program it is `python -m jaxstack.launch --preflight`: it compares the nodes of a run, and tests and times an
all-reduce.
"""

import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxstack
from jaxstack.cli import run_command
from jaxstack.data.fingerprint import fingerprint_difference
from jaxstack.distributed import coordination
from jaxstack.distributed.cluster import find_place
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.observe.environment import PACKAGES, git_commit
from jaxstack.observe.number_format import byte_size
from jaxstack.observe.nvml import available_bytes
from jaxstack.resilience.exit_on_signal import ExitOnSignal
from jaxstack.resilience.progress_file import ProgressFile

SKEW_SECONDS = 2.0
_TELL_SECONDS = 1.0
"""Time in which the other processes say why a run cannot start, before the first one ends."""
_SAME_MEMORY = 0.95
"""Least memory of a device as a share of what XLA takes. Where that is not free, XLA takes at most 90 % of it."""


def check_program(settings: Mapping[str, Any], timeout_seconds: float = 300) -> list[str]:
    """Check that package versions, commit and configuration match on all processes; return warnings if clocks differ.

    Args:
      settings: what the processes are asked to do, such as the run's configuration.
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
    text = json.dumps(settings, default=str)
    facts["configuration"] = hashlib.sha256(text.encode()).hexdigest()[:12]
    everyone = coordination.all_gather("program", facts, timeout_seconds)
    lines = disagreements(everyone, ignore=("host", "clock"))
    numbers = [one["configuration"] for one in everyone]
    if other := next((index for index, number in enumerate(numbers) if number != numbers[0]), None):
        first, second = (coordination.all_gather("settings", json.loads(text), timeout_seconds)[n] for n in (0, other))
        form = f"{{name}} is {{saved}} on process 0 and {{found}} on process {other}"
        lines.append(f"  {fingerprint_difference(first, second, form=form)}")
    _refuse(lines)
    return _skew(everyone)


def check_same_devices(timeout_seconds: float = 300) -> None:
    """Check that all processes have the same number and kind of devices, and these about the same memory.

    Raises:
      ConfigError: number or kind differ.
      JaxstackError: other programs hold memory of some devices; see `check_same_memory`.
    """
    local = jax.local_devices()
    facts = {"host": socket.gethostname(), "devices a process": len(local), "device kind": local[0].device_kind}
    _refuse(disagreements(coordination.all_gather("devices", facts, timeout_seconds), ignore=("host",)))
    check_same_memory(local, timeout_seconds)


def check_same_memory(devices: Sequence[Any], timeout_seconds: float = 300) -> None:
    """Check that no device of a run has less memory for XLA than another one, as other programs hold some of it.

    XLA takes a share of each GPU's memory at its first use, or less where that is not free. Where one GPU then lacks
    memory for a step or for NCCL, the others wait in a collective that it never joins. All processes must call this.

    Args:
      devices: those of this process that the run uses. CPUs, and GPUs whose free memory NVML does not tell, count as
        equal.
      timeout_seconds: limit on waiting for the other processes.

    Raises:
      JaxstackError: a device has less than 95 % of what XLA takes of each, or of what the one with the most has.
    """
    host = socket.gethostname()
    known = [
        (f"device {device.local_hardware_id} of {host}", available, device.memory_stats()["bytes_limit"])
        for device, available in zip(devices, available_bytes(devices), strict=True)
        if available is not None
    ]
    everyone = coordination.all_gather("device-memory", known, timeout_seconds)
    memory = [(name, available, limit) for one in everyone for name, available, limit in one]
    most = max((available for _, available, _ in memory), default=0)
    lacking = [
        f"{name} has {byte_size(available)} of the {byte_size(wanted)} that XLA takes"
        for name, available, limit in memory
        if available < _SAME_MEMORY * (wanted := min(limit, most))
    ]
    if lacking:
        raise JaxstackError(
            f"not all devices have the same memory for this run: {', '.join(lacking)}. Other programs hold the rest "
            "(nvidia-smi lists them), and where one device lacks memory the others would wait for it without end. End "
            "those programs, or leave the device out with CUDA_VISIBLE_DEVICES."
        )


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
        if coordination.is_first():  # with whom the others end, before they could say it
            time.sleep(_TELL_SECONDS)
        shown = "\n  ".join(lines)
        raise ConfigError(f"the processes of the run differ:\n  {shown}\nStart all of them in the same way.")


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


_MEGABYTES = 64
_SECONDS = 120


def check() -> None:
    """Check that package versions, commit and devices match on all processes, time an all-reduce, print the results.

    Raises:
      JaxstackError: the processes differ, or one of them does not answer in two minutes.
    """
    signs = ProgressFile.of_this_process()
    place = find_place()
    warnings = []
    if place is not None:
        coordination.connect(place, connect_seconds=_SECONDS)
        warnings = check_program({}, _SECONDS)
    signs.note()
    check_same_devices(_SECONDS)
    devices = jax.local_devices()
    seen = f"{socket.gethostname()}: {len(devices)} x {devices[0].device_kind}"
    lines = [f"process {index} on {text}" for index, text in enumerate(coordination.all_gather("seen", seen, _SECONDS))]
    lines += [f"warning: {line}" for line in warnings]
    local = int(os.environ.get("JAX_LOCAL_DEVICE_IDS", "0").split(",")[0])
    reports = coordination.all_gather("gpus", describe_gpus() if local == 0 else "", _SECONDS)
    lines += [text for text in dict.fromkeys(reports) if text]
    signs.note()
    lines.append(measure_sum())
    if coordination.process_position()[0] == 0:
        print("\n".join(lines), flush=True)
    signs.note("end")


def measure_sum() -> str:
    """Time an all-reduce over all devices; return a line with its bandwidth, or one that reports a wrong result."""
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("all",))
    split = jax.NamedSharding(mesh, jax.P("all"))
    whole = jax.NamedSharding(mesh, jax.P())
    size = _MEGABYTES * 2**20 // 4 if jax.default_backend() == "gpu" else 2**16
    values = jax.jit(lambda: jnp.ones((count, size)), out_shardings=split)()
    add = jax.jit(lambda x: x.sum(0), out_shardings=whole)
    if float(jax.device_get(add(values))[0]) != count:
        return f"the sum over {count} devices is WRONG: a link or a device is broken"
    times = []
    for _ in range(5):
        began = time.perf_counter()
        add(values).block_until_ready()
        times.append(time.perf_counter() - began)
    best = min(times)
    sent = 2 * (count - 1) / count * size * 4
    pace = f"{1e3 * best:.2f} ms, {sent / best / 1e9:.3g} GB/s"
    return f"a sum over {count} devices, {size * 4 / 2**20:.3g} MiB each: {pace}"


def describe_gpus() -> str:
    """Return clocks, temperatures and links of this node's GPUs, from nvidia-smi; empty if that fails."""
    fields = "index,name,clocks.sm,clocks.max.sm,temperature.gpu,ecc.errors.uncorrected.volatile.total"
    parts = []
    for words in (("--format=csv", f"--query-gpu={fields}"), ("topo", "-m")):
        try:
            done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        parts.append(done.stdout.strip())
    return "\n".join([f"{socket.gethostname()}:", *parts]) if parts else ""


def main() -> int:
    """Check before a run that all processes agree and that their devices can communicate; return the exit code."""

    def body() -> None:
        with ExitOnSignal("jaxstack launch --preflight"):
            check()

    return run_command("jaxstack launch --preflight", body)


if __name__ == "__main__":
    sys.exit(main())
