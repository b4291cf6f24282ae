"""Recovery time and exactness of a run under the launcher, after real faults.

    python benchmarks/reliability/recovery.py --processes 4 model.attention_implementation=mosaic_deterministic
    JAX_PLATFORMS=cpu python benchmarks/reliability/recovery.py --processes 4 --every 10 --step-seconds 60 \
        --seconds 900 model.preset=tiny parallel.simulate_devices=4 train.global_batch_size=8 train.sequence_length=64

Faults, one after another, midway between two checkpoints: SIGKILL of a random rank other than 0, SIGKILL of rank 0,
SIGSTOP of a random rank. After each, the steps between the checkpoint and the fault are computed a second time: their
losses are compared with those of the first time. Then SIGTERM, timed to the end of the launcher; and the run resumes
with half of its processes and devices from the oldest remaining checkpoint, and with all of them again; its losses are
compared in the same way.

The data is random, so no files are needed. XLA is asked for deterministic operations; on GPUs the losses are
bit-equal only with an attention that is deterministic, too. The compilation cache is empty at the first start and
warm afterwards. Each row is appended when it is measured, to benchmarks/results/recovery.jsonl and, with `--record`,
to tests/reliability/results.jsonl, of which `python -m scripts.pages reliability` makes a table. No fault begins after
`--seconds`. Further arguments are the run's.
"""

import argparse
import datetime
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.rows import append_rows, print_table
from benchmarks.steps import first_gpus
from jaxstack.launch.child import descendants
from tests.reliability.runs import ranks

RESULTS = Path(__file__).resolve().parents[2] / "tests" / "reliability" / "results.jsonl"
FAULTS = ("SIGKILL of a rank other than 0", "SIGKILL of rank 0", "SIGSTOP of a random rank")
COLUMNS = (
    "fault", "devices", "processes", "ended_seconds", "first_new_step_seconds", "restore_seconds", "lost_steps",
    "compared_steps", "equal_losses", "largest_relative_difference",
)  # fmt: skip
Losses = dict[int, float]


class Watched:
    """A launcher whose output is read in the background."""

    def __init__(self, command: list[str], environment: dict[str, str]):
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.lines: list[tuple[float, str]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append((time.monotonic(), line))

    def wait_for(self, pattern: str, since: int, seconds: float = 900) -> tuple[float, re.Match]:
        """Time and match of the first line after number `since` that has the pattern."""
        position = since
        deadline = time.monotonic() + seconds
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

    def stop(self) -> float:
        """SIGTERM to the launcher, which has to end with 143 after one save; seconds until it did."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(300)
        ended = time.monotonic()
        time.sleep(0.5)  # the last lines
        if code != 143 or not any("; checkpoint " in line for _, line in self.lines):
            raise SystemExit(f"SIGTERM: exit code {code}\n" + "".join(line for _, line in self.lines[-30:]))
        return ended - began

    def kill(self) -> None:
        """Ends whatever is left."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            if self.process.poll() is None:
                os.kill(pid, signal.SIGKILL)


class Bench:
    """One run in a folder of its own, restarted until it ends."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args = args
        self.folder = folder
        self.run = folder / "recovery"
        self.began = time.monotonic()
        self.environment = {
            **os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip(),
        }  # fmt: skip
        self.common: dict = {"work": " ".join([Path(args.config).stem, *args.overrides])}

    def start(self, part: int = 1) -> Watched:
        """Return the launcher with 1 / `part` of the processes and devices."""
        processes = max(1, self.args.processes // part)
        overrides = list(self.args.overrides)
        environment = self.environment
        if part > 1:
            overrides = [
                f"{name}={int(value) // part}" if name == "parallel.simulate_devices" else f"{name}={value}"
                for name, _, value in (one.partition("=") for one in overrides)
            ]
            environment = {**environment, **first_gpus(processes)}
        train = [
            sys.executable, "-m", "jaxstack.train", "--config", self.args.config, f"run.dir={self.folder}",
            "run.name=recovery", "data.sources=[{path: synthetic}]", "train.steps=1000000",
            "train.eval_every_steps=null", f"checkpoint.every_steps={self.args.every}",
            "observe.log_every=1", "observe.trackers=[jsonl]", "parallel.data=1", "parallel.fsdp=-1", *overrides,
        ]  # fmt: skip
        launch = [sys.executable, "-m", "jaxstack.launch", "--processes", str(processes)]
        launch += ["--step-seconds", str(self.args.step_seconds)]
        watched = Watched([*launch, "--", *train], environment)
        _, match = watched.wait_for(r" compute on (\d+) x (.+?) \(", 0)
        self.common |= {"processes": processes, "devices": int(match[1]), "device": match[2]}
        return watched

    def losses(self) -> Losses:
        """Step -> loss, of the complete lines of the metrics."""
        lines = (self.run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        values = [json.loads(line) for line in lines if line.endswith("\n")]
        return {one["step"]: float(one["loss"]) for one in values if "loss" in one}

    def in_time(self) -> bool:
        """Return True if there is time for another measurement."""
        return time.monotonic() - self.began < self.args.seconds


def compare(first: Losses, again: Losses, after: int) -> dict:
    """The losses of the steps after `after` that were computed twice."""
    both = [step for step in first if step > after and step in again]
    worst = max((abs(first[step] - again[step]) / abs(first[step]) for step in both), default=None)
    equal = sum(first[step] == again[step] for step in both)
    return {"compared_steps": len(both), "equal_losses": equal, "largest_relative_difference": worst}


def inject(bench: Bench, run: Watched, fault: str) -> dict:
    """Inject one fault midway between two checkpoints; return a row of its consequences."""
    every = bench.args.every
    seen = len(run.lines)
    step = int(run.wait_for(r"^step (\d+)/", seen)[1][1])
    middle = step - step % every + every // 2
    run.wait_for(rf"^step {middle if middle > step else middle + every}/", seen)
    pids = ranks(run.process)
    others = [rank for rank in pids if "other than 0" not in fault or rank] or [0]
    rank = 0 if fault == "SIGKILL of rank 0" else random.choice(others)
    seen = len(run.lines)
    began = time.monotonic()
    os.kill(pids[rank], signal.SIGSTOP if "SIGSTOP" in fault else signal.SIGKILL)
    ended, _ = run.wait_for("starting again", seen)
    before = bench.losses()
    _, match = run.wait_for(r"resuming from step (\d+) .*restored in ([\d.]+) s", seen)
    resumed = int(match[1])
    last = max(before)
    first, _ = run.wait_for(rf"^step {resumed + 1}/", seen)
    run.wait_for(rf"^step {last + 1}/", seen)
    return {
        "fault": fault, "ended_seconds": ended - began, "first_new_step_seconds": first - began,
        "restore_seconds": float(match[2]), "lost_steps": last - resumed, **compare(before, bench.losses(), resumed),
    }  # fmt: skip


def measure_save(run: Watched) -> dict:
    """Return the cost of the first save as the run reports it."""
    pattern = r"a save held up training for (\S+) s and was on disk after (\S+) s"
    _, match = run.wait_for(pattern, 0)
    return {"fault": "none: a save", "save_blocking_seconds": float(match[1]), "save_seconds": float(match[2])}


def move(bench: Bench, part: int, known: Losses, steps: int) -> dict:
    """Resume on other devices from the newest checkpoint; compare the first losses with the known ones."""
    run = bench.start(part)
    try:
        _, match = run.wait_for(r"resuming from step (\d+) .*restored in ([\d.]+) s", 0)
        resumed = int(match[1])
        run.wait_for(rf"^step {resumed + steps}/", 0)
        fault = f"none: resumed on {bench.common['devices']} devices in {bench.common['processes']} processes"
        seconds = run.stop()
        compared = compare(known, bench.losses(), resumed)
        return {"fault": fault, "ended_seconds": seconds, "restore_seconds": float(match[2]), **compared}
    finally:
        run.kill()


def measure(bench: Bench) -> Iterator[dict]:
    """Return one row per fault."""
    every = bench.args.every
    run = bench.start()
    try:
        yield measure_save(run)
        for fault in FAULTS if not bench.args.moves_only else ():
            if bench.in_time():
                yield inject(bench, run, fault)
        run.wait_for(rf"^step {every + every // 2}/", 0)  # losses to compare with after a move to the first checkpoint
        yield {"fault": "SIGTERM", "ended_seconds": run.stop()}
    finally:
        run.kill()
    if bench.args.processes < 2 or not bench.in_time():
        return
    # Back to the oldest checkpoint, so that the steps after it are known.
    known = bench.losses()
    folder = bench.run / "checkpoints"
    for step in sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())[1:]:
        shutil.rmtree(folder / str(step))
    yield move(bench, 2, known, every // 2)
    if bench.in_time():
        yield move(bench, 1, known, every // 2)


def describe(row: dict) -> str:
    """The row in words."""
    parts = []
    if "save_seconds" in row:
        held = row["save_blocking_seconds"]
        written = row["save_seconds"]
        parts.append(f"held up training for {held:.2g} s, on disk after {written:.2g} s")
    if "ended_seconds" in row:
        parts.append(f"all ended after {row['ended_seconds']:.1f} s")
    if "first_new_step_seconds" in row:
        again = row["first_new_step_seconds"]
        parts.append(f"first new step after {again:.1f} s, {row['lost_steps']} steps repeated")
    if "restore_seconds" in row:
        parts.append(f"restored in {row['restore_seconds']:.1f} s")
    if row.get("compared_steps"):
        difference = row["largest_relative_difference"]
        parts.append(
            f"{row['equal_losses']} of {row['compared_steps']} repeated losses bit-equal"
            + (f", the others within {difference:.1e} (relative)" if difference else "")
        )
    return "; ".join(parts)


def keep(row: dict, scorecard: bool) -> None:
    """Appends the row to the results, and to those of the scorecard."""
    append_rows("recovery", [{"implementation": "jaxstack", **row}])
    if not scorecard:
        return
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    test = f"{row['fault']}, {row['processes']} processes on {row['devices']} devices ({row['work']})"
    known = {"device": row["device"], "versions": {"jax": metadata.version("jax")}, "date": date}
    line = {"row": "GPU", "test": test, "figure": describe(row), **known}
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    """Measures, keeps each row as it comes, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="of the run")
    parser.add_argument("--config", default="configs/gpt2-124m.yaml", help="of the run")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--step-seconds", type=float, default=30, help="after which a silent rank is stuck")
    parser.add_argument("--seconds", type=float, default=240, help="after which no more faults begin")
    parser.add_argument("--moves-only", action="store_true", help="no faults: only on to half of the devices, and back")
    parser.add_argument("--record", action="store_true", help=f"append the figures to {RESULTS.name}")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the run")
    args = parser.parse_intermixed_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))  # and the run with it
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        os.environ["JAX_PLATFORMS"] = "cpu"  # of this process, which only writes rows
        for row in measure(bench):
            rows.append({**bench.common, **row})
            keep(rows[-1], args.record)
            print(f"after {time.monotonic() - bench.began:.0f} s: {row['fault']}: {describe(row)}", flush=True)
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
