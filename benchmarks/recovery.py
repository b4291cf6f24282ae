"""How long a run takes to come back: real faults to a run under the launcher, and the time to its first new step.

    python benchmarks/recovery.py --processes 4
    python benchmarks/recovery.py --processes 2 model.preset=tiny parallel.simulate_devices=4   # without GPUs

Faults, one after the other: SIGKILL of a random rank, SIGKILL of rank 0, SIGSTOP of a random rank; then SIGTERM, timed
to the end of the launcher. The compilation cache is warm from the first start on. Further arguments are the run's.
`--record` appends the figures to tests/reliability/results.jsonl, of which scripts/reliability_page.py makes a table.
"""

import argparse
import datetime
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rows import print_table
from jaxstack.launch.child import descendants

RESULTS = Path(__file__).resolve().parents[1] / "tests" / "reliability" / "results.jsonl"
COLUMNS = ("work", "devices", "processes", "fault", "ended_seconds", "first_new_step_seconds", "lost_steps")


class Watched:
    """A launcher whose output is read in the background."""

    def __init__(self, command: list[str]):
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[tuple[float, str]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append((time.monotonic(), line))

    def wait_for(self, pattern: str, since: int, seconds: float = 900) -> tuple[float, re.Match]:
        """Time and match of the first line after number `since` that has the pattern."""
        position, deadline = since, time.monotonic() + seconds
        while time.monotonic() < deadline:
            while position < len(self.lines):
                at, line = self.lines[position]
                position += 1
                if match := re.search(pattern, line):
                    return at, match
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise SystemExit(f"{pattern!r} did not come:\n" + "".join(line for _, line in self.lines[-60:]))

    def ranks(self) -> dict[int, int]:
        """Rank -> process id."""
        found = {}
        for pid in descendants(self.process.pid):
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            named = dict(one.partition(b"=")[::2] for one in variables)
            if b"JAXSTACK_PROGRESS_FILE" in named:
                found[int(named.get(b"JAX_PROCESS_ID", b"0"))] = pid
        return found


def inject(run: Watched, fault: str, every: int) -> dict:
    """One fault in the middle between two checkpoints, and what came of it."""
    seen = len(run.lines)
    step = int(run.wait_for(r"^step (\d+)/", seen)[1][1])
    target = (step // every + 2) * every + every // 2
    run.wait_for(rf"^step {target}/", seen)
    pids = run.ranks()
    rank = 0 if fault == "SIGKILL of rank 0" else random.choice(sorted(pids))
    seen, began = len(run.lines), time.monotonic()
    os.kill(pids[rank], signal.SIGSTOP if "SIGSTOP" in fault else signal.SIGKILL)
    ended, _ = run.wait_for("starting again", seen)
    _, match = run.wait_for(r"resuming from step (\d+)", seen)
    first, _ = run.wait_for(rf"^step {int(match[1]) + 1}/", seen)
    lost = target - int(match[1])
    return {"fault": fault, "ended_seconds": ended - began, "first_new_step_seconds": first - began, "lost_steps": lost}


def stop(run: Watched) -> dict:
    """SIGTERM to the launcher, which has to end with 143 after one save."""
    began = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    code = run.process.wait(300)
    time.sleep(1)
    if code != 143 or not any("; checkpoint " in line for _, line in run.lines):
        raise SystemExit(f"SIGTERM: exit code {code}\n" + "".join(line for _, line in run.lines[-30:]))
    return {"fault": "SIGTERM", "ended_seconds": time.monotonic() - began - 1}


def measure(args: argparse.Namespace, folder: str) -> Iterator[dict]:
    """One row a fault."""
    train = [
        sys.executable, "-m", "jaxstack.train", "--config", args.config, f"run.dir={folder}", "run.name=recovery",
        "train.steps=1000000", "train.eval_every_steps=null", f"checkpoint.every_steps={args.every}",
        "observe.log_every=1", "observe.trackers=[jsonl]", "parallel.data=1", "parallel.fsdp=-1", *args.overrides,
    ]  # fmt: skip
    launch = [sys.executable, "-m", "jaxstack.launch", "--processes", str(args.processes), "--step-seconds", "60"]
    run = Watched([*launch, "--", *train])
    try:
        _, match = run.wait_for(r" compute on (\d+) x (.+) \(", 0)
        common = {
            "work": " ".join([Path(args.config).stem, *args.overrides]),
            "processes": args.processes, "devices": int(match[1]), "device": match[2],
        }  # fmt: skip
        for fault in ("SIGKILL of a random rank", "SIGKILL of rank 0", "SIGSTOP of a random rank"):
            yield {**common, **inject(run, fault, args.every)}
        run.wait_for(r"^step \d+/", len(run.lines))
        yield {**common, **stop(run)}
    finally:
        for pid in [*descendants(run.process.pid), run.process.pid]:
            if run.process.poll() is None:
                os.kill(pid, signal.SIGKILL)


def record(rows: list[dict]) -> None:
    """Appends the rows as the tests of the scorecard do."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with RESULTS.open("a", encoding="utf-8") as file:
        for row in rows:
            parts = [f"all ended after {row['ended_seconds']:.1f} s"]
            if "lost_steps" in row:
                again = row["first_new_step_seconds"]
                parts.append(f"first new step after {again:.0f} s, {row['lost_steps']} steps repeated")
            test = f"{row['fault']}, {row['processes']} processes on {row['devices']} devices ({row['work']})"
            known = {"device": row["device"], "versions": {"jax": metadata.version("jax")}, "date": date}
            file.write(json.dumps({"row": "GPU", "test": test, "figure": "; ".join(parts), **known}) + "\n")


def main() -> None:
    """Measures, prints a table and appends the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--config", default="configs/gpt2-124m.yaml")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--record", action="store_true", help=f"append the figures to {RESULTS.name}")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = list(measure(args, folder))
    print_table(rows, COLUMNS)
    if args.record:
        record(rows)


if __name__ == "__main__":
    main()
