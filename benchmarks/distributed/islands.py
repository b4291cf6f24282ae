"""Held-out loss and bytes between workers of each method, at equal tokens, against data parallelism.

    python benchmarks/distributed/islands.py         # a model of bytes on two simulated devices, a few minutes
    python benchmarks/distributed/islands.py --work quickstart --workers 4 --methods diloco,gossip
    python benchmarks/distributed/islands.py --gpus --work long --methods diloco,diloco_steady  # 3,000 steps, 2 GPUs
    python benchmarks/distributed/islands.py --tiny  # tiny sizes, to try the script

Every row trains on the same batches in the same order, with the same schedule. `data_parallel` splits the same devices
along `data`, and what it sends counts as bytes between workers; it is measured first if no row of it with the same
settings and commit is stored. `bytes_per_step` is what each device sends to other workers in a step on average, read
from the compiled programs; `relative_loss` is the held-out loss relative to that of data parallelism. Further words are
overrides of the configuration.
Rows are appended to benchmarks/results/islands.jsonl.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.rows import SCRATCH, append_rows, print_table, read_own_rows, require_commit
from benchmarks.steps import open_run, run_as_command

METHODS = {
    "data_parallel": (),
    "local_sgd": ("local_sgd={name: local_sgd, every: 20}",),
    "local_sgd_synchronous": ("local_sgd={name: local_sgd, every: 20, synchronous_steps: 200}",),
    "diloco": ("local_sgd={name: diloco, every: 20}",),
    "diloco_calm": ("local_sgd={name: diloco, every: 20, outer_learning_rate: 0.9, momentum: 0.3}",),
    "diloco_steady": ("local_sgd={name: diloco, every: 20, momentum: 0.6}",),
    "diloco_int8": ("local_sgd={name: diloco, every: 20, compression: int8}",),
    "diloco_int8_often": (
        "local_sgd={name: diloco, every: 6, compression: int8, outer_learning_rate: 0.9, momentum: 0.3}",
    ),
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
    "long": (
        "model={num_layers: 6, hidden_size: 512, num_heads: 8, intermediate_size: 1536, scan_layers: false}",
        "data.tokenizer.name=byte", "train.steps=3000", "train.global_batch_size=32", "train.sequence_length=512",
        "optimizer.learning_rate=1e-3", "optimizer.b2=0.95", "schedule={name: cosine, warmup_steps: 150}",
    ),
    "tiny": (
        "model={num_layers: 2, hidden_size: 32, num_heads: 2}", "data.tokenizer.name=byte", "train.steps=40",
        "train.global_batch_size=8", "train.sequence_length=32", "schedule={name: linear, warmup_steps: 2}",
    ),
}  # fmt: skip
"""Work -> its configuration."""
BASE = "data_parallel"
READ_EVERY = 20
"""Steps from one reading of the loss to the next on GPUs, which run on meanwhile."""
COLUMNS = ("method", "islands", "eval_loss", "relative_loss", "bytes_per_step", "relative_bytes", "seconds")


def train(method: str, overrides: list[str]) -> dict[str, Any]:
    """Train one row; return its held-out loss, and the bytes that a device sends to other workers in a step."""
    import jax

    from jaxstack.run.build import make_trainer

    config, data = open_run(overrides)
    trainer = make_trainer(config, data)
    trainer.compile(trainer.peek_batch())
    batches = trainer.batches(0)
    began = time.perf_counter()
    loss = float("nan")
    # Each step is waited for: with hundreds of queued programs simulated CPU devices run out of threads and hang.
    every = READ_EVERY if config.parallel.simulate_devices is None else 1
    for step in range(1, config.train.steps + 1):
        metrics = trainer.train_step(next(batches)[0])
        if step % every == 0 or step == config.train.steps:
            loss = trainer.read(metrics)["loss"]
    seconds = time.perf_counter() - began
    batches.close()
    evaluated = trainer.evaluate(max_tokens=2**17)
    assert evaluated is not None
    return {
        "method": method,
        "device": jax.devices()[0].device_kind,
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


def stored_base(script: str, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the newest row of data parallelism at this commit with these fields; None if there is none."""
    wanted = {"method": BASE, **wanted}
    rows = reversed(read_own_rows(script))
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


def measure(args: argparse.Namespace, names: list[str], given: list[str]) -> None:
    """Measure, print and store the row of each method, that of data parallelism first if none is stored."""
    work = "tiny" if args.tiny else args.work
    script = f"{SCRATCH}islands" if args.tiny else "islands"
    require_commit(script)
    rows: list[dict[str, Any]] = []
    common = {"work": work, "implementation": "jaxstack", "islands": args.workers, "devices": args.workers}
    common |= {"overrides": given} if given else {}
    simulated = [] if args.gpus else [f"parallel.simulate_devices={args.workers}"]
    # On GPUs the base is measured in each run: their kind is not known before the first row.
    base = None if args.gpus else stored_base(script, {"device": "cpu", "overrides": given or None, **common})
    for name in dict.fromkeys(names if base else [BASE, *names]):
        axis = "data" if name == BASE else "workers"
        layout = [f"parallel.{axis}={args.workers}", *simulated]
        row = train(name, [*WORKS[work], *layout, *METHODS[name], *given])
        base = row if name == BASE else base
        assert base is not None
        row["relative_loss"] = row["eval_loss"] / base["eval_loss"]
        row["relative_bytes"] = row["bytes_per_step"] / base["bytes_per_step"]
        rows.append({**common, **row})
        append_rows(script, rows[-1:])
        print(f"{name}: {row['eval_loss']:.4f}, {row['bytes_per_step']:,.0f} bytes a step", flush=True)
    print_table(rows, COLUMNS)


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=positive(int), default=2, help="number of workers (2)")
    parser.add_argument("--methods", default=",".join(METHODS), help="names (default: all)")
    parser.add_argument("--gpus", action="store_true", help="a GPU for each worker, in place of simulated CPU devices")
    parser.add_argument("--work", choices=[work for work in WORKS if work != "tiny"], default="bytes")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    args, given = parser.parse_known_args()
    names = args.methods.split(",")
    if wrong := [word for word in given if "=" not in word] or [name for name in names if name not in METHODS]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}; methods: {', '.join(METHODS)}")
    run_as_command("islands.py", lambda: measure(args, names, given))


if __name__ == "__main__":
    main()
