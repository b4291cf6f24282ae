"""Held-out loss and bytes between workers of each method, at equal tokens, against data parallelism.

    python benchmarks/distributed/islands.py         # a model of bytes on two simulated devices, a few minutes
    python benchmarks/distributed/islands.py --work quickstart --workers 4 --methods diloco,gossip
    python benchmarks/distributed/islands.py --tiny  # tiny sizes, to try the script

Every row trains on the same batches in the same order. `data_parallel` splits the same devices along `data`, and what
it sends counts as bytes between workers; it is measured first if no row of it is stored. `bytes_per_step` is what each
device sends to other workers in a step on average, read from the compiled programs; `relative_loss` is the held-out
loss relative to that of data parallelism.
Rows are appended to benchmarks/results/islands.jsonl.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.rows import RESULTS, SCRATCH, append_rows, print_table, require_commit
from benchmarks.steps import open_run

METHODS = {
    "data_parallel": (),
    "local_sgd": ("local_sgd={name: local_sgd, every: 20}",),
    "local_sgd_synchronous": ("local_sgd={name: local_sgd, every: 20, synchronous_steps: 200}",),
    "diloco": ("local_sgd={name: diloco, every: 20}",),
    "diloco_calm": ("local_sgd={name: diloco, every: 20, outer_learning_rate: 0.9, momentum: 0.3}",),
    "diloco_int8": ("local_sgd={name: diloco, every: 20, compression: int8}",),
    "diloco_powersgd": ("local_sgd={name: diloco, every: 20, compression: powersgd, rank: 4}",),
    "streaming": ("local_sgd={name: streaming, every: 20, fragments: 2}",),
    "gossip": ("local_sgd={name: gossip, every: 20}",),
}
"""Name -> the overrides of its row."""
WORKS = {
    "bytes": (
        "model={num_layers: 2, hidden_size: 96, num_heads: 4, intermediate_size: 256}", "data.tokenizer.name=byte",
        "train.steps=400", "train.global_batch_size=16", "train.sequence_length=128", "optimizer.learning_rate=3e-3",
        "optimizer.b2=0.98", "schedule={name: linear, warmup_steps: 40}",
    ),
    "quickstart": (
        "model.preset=tiny", "train.steps=300", "train.global_batch_size=8", "train.sequence_length=128",
        "optimizer.learning_rate=3e-3", "optimizer.b2=0.98", "schedule={name: linear, warmup_steps: 30}",
    ),
    "tiny": (
        "model={num_layers: 2, hidden_size: 32, num_heads: 2}", "data.tokenizer.name=byte", "train.steps=40",
        "train.global_batch_size=8", "train.sequence_length=32", "schedule={name: linear, warmup_steps: 2}",
    ),
}  # fmt: skip
"""Work -> its configuration."""
BASE = "data_parallel"
COLUMNS = ("method", "islands", "eval_loss", "relative_loss", "bytes_per_step", "relative_bytes", "seconds")


def train(method: str, overrides: list[str]) -> dict[str, Any]:
    """Train one row; return its held-out loss, and the bytes that a device sends to other workers in a step."""
    from jaxstack.run.build import make_trainer

    config, data = open_run(overrides)
    trainer = make_trainer(config, data)
    trainer.compile(trainer.peek_batch())
    batches = trainer.batches(0)
    began = time.perf_counter()
    loss = float("nan")
    for _ in range(config.train.steps):
        # Each step is waited for: with hundreds of queued programs simulated CPU devices run out of threads and hang.
        loss = trainer.read(trainer.train_step(next(batches)[0]))["loss"]
    seconds = time.perf_counter() - began
    batches.close()
    evaluated = trainer.evaluate(max_tokens=2**17)
    assert evaluated is not None
    return {
        "method": method,
        "steps": config.train.steps,
        "train_loss": loss,
        **{key: evaluated.get(key) for key in ("eval_loss", "eval_worker_distance")},
        "bytes_per_step": bytes_per_step(trainer),
        "seconds": seconds,
    }


def bytes_per_step(trainer: Any) -> float:
    """Return the bytes that each device sends to other workers in a step on average; without workers all bytes."""
    steps = trainer.train.steps
    if hasattr(trainer.wrapper, "bytes_of_steps"):
        return trainer.wrapper.bytes_of_steps(trainer, steps) / steps
    return sum(row["wire_bytes"] for row in trainer.describe()["collectives"])


def stored_base(script: str, work: str, workers: int) -> dict[str, Any] | None:
    """Return the newest stored row of data parallelism for this work and number of workers; None if there is none."""
    path = RESULTS / f"{script}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    wanted = {"method": BASE, "work": work, "islands": workers}
    return next((row for row in reversed(rows) if all(row[key] == value for key, value in wanted.items())), None)


def main() -> None:
    """Measure, print and store the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=positive(int), default=2, help="number of workers (2)")
    parser.add_argument("--methods", default=",".join(METHODS), help="names (default: all)")
    parser.add_argument("--work", choices=[work for work in WORKS if work != "tiny"], default="bytes")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    args, given = parser.parse_known_args()
    names = args.methods.split(",")
    if wrong := [word for word in given if "=" not in word] or [name for name in names if name not in METHODS]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}; methods: {', '.join(METHODS)}")
    work = "tiny" if args.tiny else args.work
    script = f"{SCRATCH}islands" if args.tiny else "islands"
    require_commit(script)
    rows: list[dict[str, Any]] = []
    base = stored_base(script, work, args.workers)
    for name in dict.fromkeys(names if base else [BASE, *names]):
        axis = "data" if name == BASE else "workers"
        layout = [f"parallel.{axis}={args.workers}", f"parallel.simulate_devices={args.workers}"]
        row = train(name, [*WORKS[work], *layout, *METHODS[name], *given])
        base = row if name == BASE else base
        assert base is not None
        row["relative_loss"] = row["eval_loss"] / base["eval_loss"]
        row["relative_bytes"] = row["bytes_per_step"] / base["bytes_per_step"]
        common = {"work": work, "implementation": "jaxstack", "islands": args.workers}
        rows.append({**common, "device": "cpu", "devices": args.workers, **row})
        append_rows(script, rows[-1:])
        print(f"{name}: {row['eval_loss']:.4f}, {row['bytes_per_step']:,.0f} bytes a step", flush=True)
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
