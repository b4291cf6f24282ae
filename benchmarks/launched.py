"""Runs of `jaxstack.train` under the launcher, whose steps a benchmark times from their metrics."""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxstack.launch.child import descendants

START_SECONDS = 240
"""Limit on the time until the first step."""
STEP_SECONDS = 60
_END_SECONDS = 60
"""Limit on the time that the kernel needs to end killed processes, with their GPU memory."""


def run_steps(
    config: str,
    folder: Path,
    name: str,
    overrides: Sequence[str] = (),
    *,
    processes: int,
    steps: int,
    warm_up: int,
    environment: Mapping[str, str] | None = None,
    start_seconds: float = START_SECONDS,
) -> dict[str, Any]:
    """Train on random tokens for `steps` steps under the launcher; return what a row says of their times, in seconds.

    The run ends with its last step: its save and evaluation are not waited for. The launcher ends one that hangs, names
    the rank that the others wait for, and prints the stacks of all. `metrics` of the result are the lines of metrics of
    the counted steps, which belong in no row.

    Args:
      config: a configuration file.
      folder: of run directories.
      name: of the run.
      overrides: further words of the configuration.
      processes: on this machine, which divide its devices.
      steps: number of steps.
      warm_up: first steps, which are not counted.
      environment: further variables of the processes.
      start_seconds: limit on the time until the first step.

    Raises:
      SystemExit: the run ended before its last step; the message has its last lines, with the stacks of one that hung.
        Or its processes do not end, so that the next run would lack their memory.
    """
    command = [
        sys.executable, "-m", "jaxstack.launch", "--processes", str(processes), "--max-restarts", "0",
        "--start-seconds", str(start_seconds), "--step-seconds", str(STEP_SECONDS), "--",
        sys.executable, "-m", "jaxstack.train", "--config", config, f"run.dir={folder}", f"run.name={name}",
        "data.sources=[{path: synthetic}]", f"train.steps={steps}", "train.eval_every_steps=null",
        "checkpoint.every_steps=1000000", "resilience.verify_layout=false",
        "observe.log_every=1", "observe.trackers=[jsonl]", *overrides,
    ]  # fmt: skip
    print(f"{name}: {processes} x {' '.join(command[command.index('--') + 2 :])}", file=sys.stderr, flush=True)
    variables = {**os.environ, **(environment or {})}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)
    lines = []
    device = ""
    devices = 1
    for line in process.stdout or ():
        lines.append(line)
        if match := re.search(r" compute on (\d+) x (.+?) \(", line):
            devices = int(match[1])
            device = match[2]
        if line.startswith(f"step {steps}/"):
            break
    _end(process)
    metrics = folder / name / "metrics.jsonl"
    found = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    counted = [one for one in found if "step_time_seconds" in one and one["step"] > warm_up]
    if len(counted) < steps - warm_up:
        raise SystemExit("the run ended too early:\n" + "".join(_last_words(lines)))
    times = [one["step_time_seconds"] for one in counted]
    return {
        "work": " ".join([Path(config).stem, *overrides]), "device": device, "devices": devices, "processes": processes,
        "steps": len(times), "step_seconds": statistics.fmean(times), "median_step_seconds": statistics.median(times),
        "slowest_step_seconds": max(times), "metrics": counted,
    }  # fmt: skip


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a launcher and all processes below it, and wait until they are gone."""
    pids = [*descendants(process.pid), process.pid]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _END_SECONDS
    process.wait()
    while left := {pid: state for pid in pids if (state := _state(pid)) not in ("", "Z")}:
        if time.monotonic() > deadline:
            raise SystemExit(
                f"{_END_SECONDS} s after SIGKILL there still are the processes {left} (id: state; D waits in the "
                "kernel, for example for a driver that frees shared GPU memory); the next run would lack their memory."
            )
        time.sleep(0.1)


def _state(pid: int) -> str:
    """Return the kernel's letter for the state of a process; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _last_words(lines: Sequence[str]) -> Sequence[str]:
    """Return the last lines of an output, all of them from the first on that tells of stacks."""
    told = next((number for number, line in enumerate(lines) if "stacks of" in line), len(lines))
    return lines[max(0, min(told - 10, len(lines) - 30)) :]
