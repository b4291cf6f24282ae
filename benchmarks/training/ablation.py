"""Speed, memory and loss of each technique: from plain float32 to all of them, one more per row, on real text.

    python benchmarks/training/ablation.py
    python benchmarks/training/ablation.py --quick   # 30 steps instead of 100
    python benchmarks/training/ablation.py --steps 400 --timeout 600  # losses that say more; float32 takes longest
    python benchmarks/training/ablation.py --eighth  # 2 instead of 8 layers, for 160 steps
    python benchmarks/training/ablation.py --tiny    # tiny sizes on simulated CPU devices

The first 8 of the 16 layers of llama3-1b, with a vocabulary of 32,768 (620 million parameters), train on Python's
standard library. Each row adds one technique to the row before it; all see the same batches in the same order, with
the same optimizer (AdamW, float32 weights and moments, clipping). `--eighth` trains the first 2 layers, an eighth of
the model's, on smaller batches with a cosine schedule, and leaves out the techniques that need more layers.

The first row is a plain JAX program: one jitted step, layers in a Python loop, no rematerialisation, attention and
loss from XLA's operations, all logits at once. It has two of our optimisations, as it would not fit otherwise: its
attention skips keys that a block of queries cannot see, and recomputes its weights in the backward pass. The last two
rows trade speed for memory and compile time.

`final_loss` is the mean over the last quarter of the steps, `loss_ratio` that by the first row's, `speedup` the first
row's time by this row's, where both are of one run. `loss_ratio_tf32` and `speedup_tf32` compare with the row of TF32
matmuls in the same way: what a plain program gains by one setting of jax is not ours. `joules_per_token` is of all but
the first steps, by the driver's energy counter, which is updated every 0.1 s; `dollars_per_billion_tokens` follows from
`--price`. Each row runs in a process of its own and is appended to benchmarks/results/ablation.jsonl at once. With
`--eighth` all processes start at the same time, and each compiles and trains when its turn comes. A row that is to run
in FP8 and does not fails.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.energy import EnergyCounter, cost_fields
from benchmarks.rows import append_rows, print_table, require_commit
from benchmarks.steps import open_run, rates, run_as_command, run_process
from benchmarks.training.learning import Point, count_matmuls, learn, mean_loss

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
EIGHTH = ("model.num_layers=2", "train.global_batch_size=4", "schedule.name=cosine", "optimizer.learning_rate=6.0e-4")
LEFT_OUT_OF_EIGHTH = ("FP8 matmuls", "scanned layers", "full rematerialisation")
"""Techniques whose effect two layers do not show: `FP8 matmuls` keeps the first and the last layer in bfloat16."""
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
    "variant", "tokens_per_second_per_device", "mfu", "milliseconds", "speedup", "speedup_tf32", "joules_per_token",
    "dollars_per_billion_tokens", "peak_memory_bytes", "final_loss", "loss_ratio", "loss_ratio_tf32", "compile_seconds",
)  # fmt: skip
READY = "ready to compile"
"""Line that a worker process prints when its trainer is built."""
BASELINES = {"": "float32, nothing else", "_tf32": "TF32 matmuls"}
"""Suffix of `speedup` and `loss_ratio` -> the row that they compare with."""


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


def compare(row: dict[str, Any], baselines: dict[str, dict[str, Any]]) -> None:
    """Add the speedup over each baseline that was measured, and the ratio to its loss."""
    for suffix, name in BASELINES.items():
        if base := baselines.get(name):
            row[f"loss_ratio{suffix}"] = row["final_loss"] / base["final_loss"]
            row[f"speedup{suffix}"] = base["milliseconds"] / row["milliseconds"]


def measure(variant: str, overrides: list[str], in_turn: bool = False) -> dict[str, Any]:
    """Measure one variant in this process and return its row; `in_turn`: wait for the parent process (see `Worker`)."""
    import jax

    from jaxstack.observe.throughput import peak_memory_bytes
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
            mesh=trainer.rules.mesh, train=config.train, seed=config.run.seed,
        )  # fmt: skip
    if in_turn:
        print(READY, flush=True)
        if not sys.stdin.readline():
            raise SystemExit("the parent process has ended")
    began = time.perf_counter()
    trainer.compile(trainer.peek_batch())
    compile_seconds = time.perf_counter() - began
    matmuls = count_matmuls(trainer)
    energy = EnergyCounter()
    uncounted = 0

    def begin_energy(point: Point) -> None:
        """Begin to count after the first steps, which create the state and load kernels."""
        nonlocal uncounted
        if not uncounted:
            uncounted = int(point["tokens"])
            energy.__enter__()

    points = learn(trainer, every=EVERY, say=begin_energy)
    energy.__exit__(None, None, None)
    steps = [(b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in zip(points, points[1:], strict=False)]
    last = points[-1]["tokens"]
    milliseconds = 1e3 * statistics.median(steps)
    backends = {kernel["operation"]: kernel["backend"] for kernel in trainer.describe()["kernels"]}
    return {
        "implementation": "jaxstack", **rates(config, milliseconds, 1, jax.devices()[0].device_kind),
        "milliseconds": milliseconds, "peak_memory_bytes": peak_memory_bytes(), "compile_seconds": compile_seconds,
        "final_loss": mean_loss(points, 0.75 * last, last), "tokens": last, "backends": backends,
        "matmuls": matmuls, "joules": energy.joules,
        "joules_tokens": last - uncounted,
    }  # fmt: skip


class Worker:
    """A worker process that is started at once, prepares its trainer, and measures when `run` is called.

    Args:
        variant: Name of the row.
        arguments: Arguments of the Python interpreter.
    """

    def __init__(self, variant: str, arguments: list[str]) -> None:
        self.variant = variant
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Wait until the process is about to compile, or has failed."""
        assert self._process.stdout is not None
        while self._process.stdout.readline() not in (f"{READY}\n", ""):
            pass

    def run(self, timeout: float) -> dict[str, Any] | None:
        """Let the process measure; return its row, or print why it failed and return None."""
        try:
            out, _ = self._process.communicate("\n", timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            print(f"{self.variant}: no result within {timeout:.0f} s", flush=True)
            return None
        if self._process.returncode:
            self._errors.seek(0)
            print(f"{self.variant} failed: {self._errors.read()[-1500:].strip()}", flush=True)
            return None
        row = json.loads(out.splitlines()[-1])
        print(f"{self.variant}: {row['tokens_per_second_per_device']:,.0f} tokens/s/device", flush=True)
        return row


def measured_rows(
    variants: Sequence[str], arguments: Sequence[str], timeout: float, in_turn: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the variants with their rows, each from a process of its own, without those that fail.

    Args:
        variants: Names of `TECHNIQUES`.
        arguments: Overrides of the configuration.
        timeout: Seconds that a row may take.
        in_turn: Start all processes at the same time, to measure one after the other; together they must fit into the
            GPU's memory.
    """
    command = [__file__, "--in-turn", "--worker"] if in_turn else [__file__, "--worker"]
    workers = [Worker(variant, [*command, variant, *arguments]) for variant in variants] if in_turn else []
    for worker in workers:
        worker.wait_until_ready()
    for number, variant in enumerate(variants):
        whole = [*command, variant, *arguments]
        row = workers[number].run(timeout) if in_turn else run_process(variant, whole, timeout)
        if row:
            yield variant, row


def main() -> None:
    """Measures every technique in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="30 steps of 8 x 2048 tokens instead of 100")
    parser.add_argument("--steps", type=positive(int), help="number of steps; default: 100; with --eighth: 160")
    parser.add_argument("--eighth", action="store_true", help="2 layers, 4 x 2048 tokens a step, cosine schedule")
    parser.add_argument("--price", type=positive(float), default=3.0, help="dollars for an hour of one GPU (3)")
    parser.add_argument("--only", nargs="+", choices=TECHNIQUES, metavar="TECHNIQUE",
        help=f"rows to measure, of: {', '.join(TECHNIQUES)}")  # fmt: skip
    parser.add_argument("--timeout", type=positive(float), default=240, help="seconds a row may take")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on simulated CPU devices; rows go to tiny/")
    parser.add_argument("--in-turn", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        variant, *overrides = args.worker
        run_as_command("ablation.py", lambda: print(json.dumps(measure(variant, overrides, args.in_turn))))
    script = "tiny/ablation" if args.tiny else "ablation"
    require_commit(script)
    steps = args.steps or (8 if args.tiny else 160 if args.eighth else 30 if args.quick else 100)
    overrides = [
        *MODEL, "data.packing=false", "train.global_batch_size=8", "train.sequence_length=2048",
        "schedule.name=constant", "optimizer.learning_rate=3.0e-4", *(EIGHTH if args.eighth else ()),
        *(TINY if args.tiny else ()), f"train.steps={steps}", f"schedule.warmup_steps={steps // 4}",
    ]  # fmt: skip
    chosen = [name for name in TECHNIQUES if not (args.eighth and name in LEFT_OUT_OF_EIGHTH)]
    share, rows_of_batch = ("an eighth", 4) if args.eighth else ("half", 8)
    work = f"{share} of llama3-1b, {steps} steps of {rows_of_batch} x 2048 tokens of real text"
    work = "tiny llama" if args.tiny else work
    rows: list[dict[str, Any]] = []
    baselines: dict[str, dict[str, Any]] = {}
    for variant, row in measured_rows(args.only or chosen, overrides, args.timeout, args.eighth):
        baselines[variant] = row
        compare(row, baselines)
        speed = row["tokens_per_second_per_device"]
        row |= cost_fields(row.pop("joules"), row.pop("joules_tokens"), speed, args.price)
        rows.append({"work": work, "variant": f"{list(TECHNIQUES).index(variant)} {variant}", **row})
        append_rows(script, rows[-1:])
    if not rows:
        raise SystemExit(1)
    print_table(rows, COLUMNS)
    for suffix, name in BASELINES.items():
        compared = [row for row in rows if f"speedup{suffix}" in row]
        if len(compared) > 1:
            best = max(compared, key=lambda row: row[f"speedup{suffix}"])
            gain = best[f"speedup{suffix}"]
            loss = best[f"loss_ratio{suffix}"]
            print(f"{best['variant']}: {gain:.1f} times the speed of {name} at {loss:.4f} of its loss")


if __name__ == "__main__":
    main()
