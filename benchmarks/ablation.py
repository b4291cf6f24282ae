"""Speed, memory and loss of each technique: from plain float32 to all of them, one more per row, on real text.

    python benchmarks/ablation.py
    python benchmarks/ablation.py --quick    # 30 steps instead of 100
    python benchmarks/ablation.py --tiny     # tiny sizes on simulated CPU devices

The first 8 of the 16 layers of llama3-1b, with a vocabulary of 32,768 (620 million parameters), train on Python's
standard library. Each row adds one technique to the row before it; all see the same batches in the same order, with
the same optimizer (AdamW, float32 weights and moments, clipping).

The first row is a plain JAX program: one jitted step, layers in a Python loop, no rematerialisation, attention and
loss from XLA's operations, all logits at once. It has two of our optimisations, as it would not fit otherwise: its
attention skips keys that a block of queries cannot see, and recomputes its weights in the backward pass. The last two
rows trade speed for memory and compile time.

`final_loss` is the mean over the last quarter of the steps, `loss_ratio` that by the first row's, `speedup` the first
row's time by this row's, where both are of one run. Each row runs in a process of its own and is appended to
benchmarks/results/ablation.jsonl at once. A row that is to run in FP8 and does not fails.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.arguments import positive
from benchmarks.learning import count_matmuls, learn, mean_loss
from benchmarks.rows import append_rows, print_table
from benchmarks.steps import open_run, rates, run_as_command, run_process

MODEL = ("model.preset=llama3-1b", "model.num_layers=8", "model.vocab_size=32768", "data.tokenizer.vocab_size=32768")
TINY = (
    "model.num_layers=4", "model.hidden_size=64", "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=16",
    "model.intermediate_size=128", "model.vocab_size=512", "data.tokenizer.name=byte", "train.sequence_length=64",
    "train.global_batch_size=4", "parallel.simulate_devices=1",
)  # fmt: skip
PLAIN = (
    "precision.compute=float32", "model.attention_implementation=xla_dense", "model.remat=none",
    "model.scan_layers=false",
)  # fmt: skip
EVERY = 4
TECHNIQUES: dict[str, tuple[str, ...]] = {
    "float32, nothing else": PLAIN,
    "TF32 matmuls": (),
    "bfloat16 compute": ("precision.compute=bfloat16",),
    "flash attention": ("model.attention_implementation=null",),
    "fused loss": (),
    "FP8 matmuls": ("precision.fp8=current",),
    "FP8 in every layer, delayed scaling": ("precision.fp8=delayed", "precision.fp8_rules=[{path: _proj, fp8: true}]"),
    "scanned layers": ("model.scan_layers=true",),
    "full rematerialisation": ("model.remat=full",),
}
"""Technique -> what it changes in the configuration. TF32 and the loss are not of the configuration, see `measure`."""
COLUMNS = (
    "variant", "tokens_per_second_per_device", "mfu", "milliseconds", "speedup", "peak_memory_bytes", "final_loss",
    "loss_ratio", "compile_seconds",
)  # fmt: skip


def full_logits_loss(model: Any, batch: Any) -> Any:
    """Cross-entropy by the textbook: all logits in float32, then their log-softmax."""
    import jax

    labels = batch["labels"]
    scores = jax.nn.log_softmax(model(batch["tokens"], positions=batch.get("positions")), axis=-1)
    picked = jax.numpy.take_along_axis(scores, jax.numpy.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    real = labels >= 0
    return -(picked * real).sum() / real.sum()


def overrides_of(variant: str) -> list[str]:
    """The configuration of a row: that of all rows up to it."""
    names = list(TECHNIQUES)
    return [override for name in names[: names.index(variant) + 1] for override in TECHNIQUES[name]]


def measure(variant: str, overrides: list[str]) -> dict[str, Any]:
    """The row of one variant, in this process."""
    import jax

    from jaxstack.observe.memory import peak_memory_bytes
    from jaxstack.run.build import make_trainer
    from jaxstack.trainer import Trainer

    reached = list(TECHNIQUES)[: list(TECHNIQUES).index(variant) + 1]
    if "TF32 matmuls" not in reached:
        jax.config.update("jax_default_matmul_precision", "highest")
    config, data = open_run([*overrides_of(variant), *overrides])
    trainer = make_trainer(config, data)
    if "fused loss" not in reached:
        trainer = Trainer(
            trainer.module.make, full_logits_loss, data, optimizer=config.optimizer, schedule=config.schedule,
            mesh=trainer.rules, train=config.train, seed=config.run.seed,
        )  # fmt: skip
    began = time.perf_counter()
    trainer.compile(trainer.peek_batch())
    compile_seconds, matmuls = time.perf_counter() - began, count_matmuls(trainer)
    points = learn(trainer, every=EVERY)
    steps = [(b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in zip(points, points[1:], strict=False)]
    last = points[-1]["tokens"]
    milliseconds = 1e3 * statistics.median(steps)
    backends = {kernel["operation"]: kernel["backend"] for kernel in trainer.describe()["kernels"]}
    return {
        "implementation": "jaxstack", **rates(config, milliseconds, 1, jax.devices()[0].device_kind),
        "milliseconds": milliseconds, "peak_memory_bytes": peak_memory_bytes(), "compile_seconds": compile_seconds,
        "final_loss": mean_loss(points, 0.75 * last, last), "tokens": last, "backends": backends,
        "matmuls": matmuls,
    }  # fmt: skip


def main() -> None:
    """Measures every technique in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="30 steps of 8 x 2048 tokens instead of 100")
    parser.add_argument("--only", nargs="+", default=list(TECHNIQUES), choices=TECHNIQUES, metavar="TECHNIQUE",
        help=f"rows to measure, of: {', '.join(TECHNIQUES)}")  # fmt: skip
    parser.add_argument("--timeout", type=positive(float), default=240, help="seconds a row may take")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on simulated CPU devices; rows go to tiny/")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        variant, *overrides = args.worker
        run_as_command("ablation.py", lambda: print(json.dumps(measure(variant, overrides))))
    steps = 8 if args.tiny else 30 if args.quick else 100
    overrides = [
        *MODEL, "data.packing=false", "train.global_batch_size=8", "train.sequence_length=2048",
        *(TINY if args.tiny else ()), f"train.steps={steps}", "schedule.name=constant",
        f"schedule.warmup_steps={steps // 4}", "optimizer.learning_rate=3.0e-4",
    ]  # fmt: skip
    work = "tiny llama" if args.tiny else f"half of llama3-1b, {steps} steps of 8 x 2048 tokens of real text"
    rows: list[dict[str, Any]] = []
    first: dict[str, Any] | None = None
    for variant in args.only:
        row = run_process(variant, [__file__, "--worker", variant, *overrides], args.timeout)
        if row:
            first = row if variant == next(iter(TECHNIQUES)) else first
            if first:
                row["loss_ratio"] = row["final_loss"] / first["final_loss"]
                row["speedup"] = first["milliseconds"] / row["milliseconds"]
            rows.append({"work": work, "variant": f"{list(TECHNIQUES).index(variant)} {variant}", **row})
            append_rows("tiny/ablation" if args.tiny else "ablation", rows[-1:])
    if not rows:
        raise SystemExit(1)
    print_table(rows, COLUMNS)
    compared = [row for row in rows if "speedup" in row]
    if len(compared) > 1:
        best = max(compared, key=lambda row: row["speedup"])
        what, gain, loss = best["variant"], best["speedup"], best["loss_ratio"]
        print(f"{what}: {gain:.1f} times the first row's speed at {loss:.4f} of its loss")


if __name__ == "__main__":
    main()
