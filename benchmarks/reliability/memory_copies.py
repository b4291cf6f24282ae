"""What copies of the state in host memory cost a run: its steps with and without them, in turn.

    python benchmarks/reliability/memory_copies.py --processes 2
    JAX_PLATFORMS=cpu python benchmarks/reliability/memory_copies.py --processes 2 --interval 4 --steps 16 \
        model.preset=tiny parallel.simulate_devices=2 train.global_batch_size=8 train.sequence_length=64

A run under the launcher, with `checkpoint.memory_every_steps` of `--interval` and of 0, by turns. The first interval is
not counted. `step_seconds` is the mean over all other steps, those that wait for a copy included, and `cost` the mean
with copies relative to the mean without, of the same turn. Each process has one device; the data is random. Rows are
appended to benchmarks/results/memory_copies.jsonl. Further arguments are the run's.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.rows import append_rows, print_table
from jaxstack.launch.child import descendants

COLUMNS = ("work", "processes", "interval", "step_seconds", "slowest_step_seconds", "copy_gib", "cost")


def train(args: argparse.Namespace, folder: Path, interval: int) -> dict:
    """Run `args.steps` steps with copies every `interval` steps (0: none); return a row."""
    command = [
        sys.executable, "-m", "jaxstack.launch", "--processes", str(args.processes), "--",
        sys.executable, "-m", "jaxstack.train", "--config", args.config, f"run.dir={folder}",
        f"run.name=every-{interval}", "data.sources=[{path: synthetic}]", f"train.steps={args.steps}",
        "train.eval_every_steps=null", "checkpoint.every_steps=1000000", f"checkpoint.memory_every_steps={interval}",
        "observe.log_every=1", "observe.trackers=[jsonl]", "parallel.data=1", "parallel.fsdp=-1", *args.overrides,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    device = ""
    for line in process.stdout or ():
        lines.append(line)
        if match := re.search(r" compute on (\d+) x (.+?) \(", line):
            device = match[2]
        if line.startswith(f"step {args.steps}/"):  # without the last save and evaluation, which are not measured
            for pid in [*descendants(process.pid), process.pid]:
                os.kill(pid, signal.SIGKILL)
    process.wait()
    metrics = folder / f"every-{interval}" / "metrics.jsonl"
    found = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    steps = [one for one in found if "step_time_seconds" in one and one["step"] > args.warm_up]
    if len(steps) < args.steps - args.warm_up:
        raise SystemExit("the run ended too early:\n" + "".join(lines[-30:]))
    times = [one["step_time_seconds"] for one in steps]
    return {
        "work": " ".join([Path(args.config).stem, *args.overrides]), "device": device, "processes": args.processes,
        "interval": interval, "steps": len(times), "step_seconds": statistics.fmean(times),
        "median_step_seconds": statistics.median(times), "slowest_step_seconds": max(times),
        "copy_gib": steps[-1].get("memory_copy_bytes", 0) / 2**30,
        "blocked_seconds": steps[-1].get("memory_copy_seconds", 0.0),
    }  # fmt: skip


def main() -> None:
    """Measures the turns, keeps each row as it comes, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="of the run, each with one device")
    parser.add_argument("--config", default="configs/llama3-1b.yaml", help="of the run")
    parser.add_argument("--interval", type=int, default=20, help="steps between copies")
    parser.add_argument("--steps", type=int, default=100, help="of each run")
    parser.add_argument("--warm-up", type=int, help="steps that are not counted (left out: one interval)")
    parser.add_argument("--turns", type=int, default=1, help="runs of each kind")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the run")
    args = parser.parse_intermixed_args()
    args.warm_up = args.interval if args.warm_up is None else args.warm_up
    rows = []
    for _ in range(args.turns):
        with tempfile.TemporaryDirectory() as folder:
            without = train(args, Path(folder), 0)
            with_copies = train(args, Path(folder), args.interval)
        with_copies["cost"] = with_copies["step_seconds"] / without["step_seconds"] - 1
        for row in (without, with_copies):
            rows.append(row)
            os.environ.setdefault("JAX_PLATFORMS", "cpu")  # of this process, which only writes rows
            append_rows("memory_copies", [{"implementation": "jaxstack", **row}])
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
