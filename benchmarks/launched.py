"""Runs of `jaxstack.train` under the launcher, whose steps a benchmark times from their metrics."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxstack.launch.child import descendants


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
) -> dict[str, Any]:
    """Train on random tokens for `steps` steps under the launcher; return what a row says of their times, in seconds.

    The run ends with its last step: its save and evaluation are not waited for.

    Args:
      config: a configuration file.
      folder: of run directories.
      name: of the run.
      overrides: further words of the configuration.
      processes: on this machine, which divide its devices.
      steps: number of steps.
      warm_up: first steps, which are not counted.
      environment: further variables of the processes.

    Raises:
      SystemExit: the run ended before its last step; the message has its last lines.
    """
    command = [
        sys.executable, "-m", "jaxstack.launch", "--processes", str(processes), "--",
        sys.executable, "-m", "jaxstack.train", "--config", config, f"run.dir={folder}", f"run.name={name}",
        "data.sources=[{path: synthetic}]", f"train.steps={steps}", "train.eval_every_steps=null",
        "checkpoint.every_steps=1000000", "resilience.verify_layout=false",
        "observe.log_every=1", "observe.trackers=[jsonl]", *overrides,
    ]  # fmt: skip
    print(f"{name}: {processes} x {' '.join(command[6:])}", file=sys.stderr, flush=True)
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
            for pid in [*descendants(process.pid), process.pid]:
                os.kill(pid, signal.SIGKILL)
    process.wait()
    metrics = folder / name / "metrics.jsonl"
    found = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    counted = [one for one in found if "step_time_seconds" in one and one["step"] > warm_up]
    if len(counted) < steps - warm_up:
        raise SystemExit("the run ended too early:\n" + "".join(lines[-30:]))
    times = [one["step_time_seconds"] for one in counted]
    return {
        "work": " ".join([Path(config).stem, *overrides]), "device": device, "devices": devices, "processes": processes,
        "steps": len(times), "step_seconds": statistics.fmean(times), "median_step_seconds": statistics.median(times),
        "slowest_step_seconds": max(times), "last": counted[-1],
    }  # fmt: skip
