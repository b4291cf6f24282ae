"""What copies of the state in host memory cost a run: its steps with and without them, in turn.

    python benchmarks/reliability/memory_copies.py --processes 2
    JAX_PLATFORMS=cpu python benchmarks/reliability/memory_copies.py --processes 2 --interval 4 --steps 16 \
        model.preset=tiny parallel.simulate_devices=2 train.global_batch_size=8 train.sequence_length=64

A run under the launcher, with `checkpoint.memory_every_steps` of `--interval` and of 0, by turns. The first copy and
the step after it are not counted: it compiles, and touches host memory that later ones use again. `step_seconds` is the
mean over all other steps with the time that copies hold up between them, `waited_seconds` that time of all, and `cost`
the mean with copies relative to the mean without, of the same turn. `copies` are those that became complete meanwhile,
`copies_seen` the step of each, and the first step after which it was complete; `slow_steps` those that took over 1.1
times the median, and their seconds.
Each process has one device; the data is random. Rows are appended to benchmarks/results/memory_copies.jsonl. Further
arguments are the run's.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.launched import run_steps
from benchmarks.rows import append_rows, print_table, require_commit

SLOW = 1.1
"""Steps are listed as slow from this multiple of the median on."""
COLUMNS = ("work", "processes", "interval", "copies", "step_seconds", "slowest_step_seconds", "copy_gib", "cost")


def train(args: argparse.Namespace, folder: Path, interval: int) -> dict:
    """Run `args.steps` steps with copies every `interval` steps (0: none); return a row."""
    name = f"every-{interval}"
    layout = ("parallel.data=1", "parallel.fsdp=-1", *args.overrides)
    settings = (f"checkpoint.memory_every_steps={interval}", *layout)
    row = run_steps(
        args.config, folder, name, settings, processes=args.processes, steps=args.steps, warm_up=args.warm_up
    )
    lines = row.pop("metrics")
    # Times of steps leave out how long a copy holds up the loop, such as until the copy before is complete.
    waited = lines[-1].get("memory_copy_seconds", 0.0) - lines[0].get("memory_copy_seconds", 0.0)
    row["step_seconds"] += waited / row["steps"]
    slow = [
        [line["step"], round(line["step_time_seconds"], 3)]
        for line in lines
        if line["step_time_seconds"] > SLOW * row["median_step_seconds"]
    ]
    arrived = {line["memory_copy_step"]: line["step"] for line in reversed(lines) if "memory_copy_step" in line}
    return {
        **row, "work": " ".join([Path(args.config).stem, *args.overrides]), "interval": interval,
        "copy_gib": lines[-1].get("memory_copy_bytes", 0) / 2**30, "waited_seconds": waited,
        "copies": len({line.get("memory_copy_step", -1) for line in lines}) - 1,
        "copies_seen": sorted([copied, step] for copied, step in arrived.items()), "slow_steps": slow,
    }  # fmt: skip


def main() -> None:
    """Measures the turns, keeps each row as it comes, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="of the run, each with one device")
    parser.add_argument("--config", default="configs/llama3-1b.yaml", help="of the run")
    parser.add_argument("--interval", type=int, default=20, help="steps between copies")
    parser.add_argument("--steps", type=int, default=100, help="of each run")
    parser.add_argument("--warm-up", type=int, help="steps that are not counted (left out: until after the first copy)")
    parser.add_argument("--turns", type=int, default=1, help="runs of each kind")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the run")
    args = parser.parse_intermixed_args()
    require_commit("memory_copies")
    args.warm_up = args.interval + 1 if args.warm_up is None else args.warm_up
    rows = []
    for _ in range(args.turns):
        with tempfile.TemporaryDirectory() as folder:
            for interval in (0, args.interval):
                row = train(args, Path(folder), interval)
                if interval:
                    row["cost"] = row["step_seconds"] / rows[-1]["step_seconds"] - 1
                rows.append(row)
                append_rows("memory_copies", [{"implementation": "jaxstack", **row}])
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
