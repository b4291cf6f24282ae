"""Loss against tokens and against time in bfloat16, in each FP8 recipe and in float32, on real text.

    python benchmarks/training/convergence.py
    python benchmarks/training/convergence.py --tokens 10e6 --minutes 5  # short
    python benchmarks/training/convergence.py --text '/usr/lib/python3/**/*.py' --tokens 200e6 --minutes 60
    python benchmarks/training/convergence.py --recipes bf16 'fp8 delayed' --seeds 0 1 2 --together 2 --tokens 14e6
    python benchmarks/training/convergence.py --tiny                     # tiny sizes on simulated CPU devices

A Llama of 82 million parameters trains on Python's standard library or the text given, every recipe on the same
batches in the same order. The schedule ends with `--tokens`; a recipe that reaches `--minutes` of training earlier
stops there, with a message. `final_loss` is the mean over the last tenth of its tokens, `loss_ratio` that by
bfloat16's over the same tokens; `eval_loss` is that of held-out text, if the run reached all tokens. float32 runs
without TF32, and takes most of the time. Each recipe runs in a process of its own; its row, the curve included, is
appended to benchmarks/results/convergence.jsonl when it ends or fails. The picture is
benchmarks/results/convergence.svg. Recipes of one work can run one at a time, or concurrently on several GPUs.
With `--seeds` every recipe trains once with each: other initial weights, and the text in another order; ratios are to
bfloat16 with the same seed. `--together` runs share a GPU, so that their speed means nothing and is not in the rows.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.picture import Panel, draw
from benchmarks.reports import events, report
from benchmarks.rows import RESULTS, append_rows, print_table, read_own_rows
from benchmarks.steps import open_run, rates, run_as_command
from benchmarks.training.learning import Point, count_matmuls, learn, mean_loss

BASE = "bf16"
RECIPES: dict[str, tuple[str, ...]] = {
    BASE: ("precision.compute=bfloat16",),
    "fp8 current": ("precision.compute=bfloat16", "precision.fp8=current"),
    "fp8 delayed": ("precision.compute=bfloat16", "precision.fp8=delayed"),
    "fp8 blockwise": ("precision.compute=bfloat16", "precision.fp8=blockwise"),
    "float32": ("precision.compute=float32",),
}
RATE = 5e-4
MODEL = (
    "model.num_layers=12", "model.hidden_size=768", "model.num_heads=12", "model.num_kv_heads=4",
    "model.intermediate_size=2048", "model.scan_layers=false", "train.global_batch_size=64",
    "train.sequence_length=1024", f"optimizer.learning_rate={RATE}",
)  # fmt: skip
TINY = (
    "model.num_layers=2", "model.hidden_size=64", "model.num_heads=4", "model.num_kv_heads=2",
    "model.intermediate_size=128", "data.tokenizer.name=byte", "train.sequence_length=64", "train.global_batch_size=4",
    "parallel.simulate_devices=1",
)  # fmt: skip
SPEEDS = ("milliseconds", "tokens_per_second_per_device", "tflops_per_device", "mfu")
"""Fields that are left out of the rows of runs that share a GPU: they slow each other down."""
POINTS = 200
EVAL_TOKENS = 2**20
COLUMNS = (
    "variant", "tokens", "tokens_per_second_per_device", "milliseconds", "final_loss", "loss_ratio", "eval_loss",
    "eval_loss_ratio",
)  # fmt: skip

Row = dict[str, Any]


def train(minutes: float, overrides: list[str]) -> None:
    """Train one variant in this process, and report every point, then the row."""
    import jax

    from jaxstack.models import count_parameters
    from jaxstack.run.build import make_trainer

    config, data = open_run(overrides)
    if config.precision.compute == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")
    trainer = make_trainer(config, data)
    # The device runs empty for a moment at each point: a short run has fewer.
    every = max(1, config.train.steps // POINTS, min(4, config.train.steps // 10))
    report(device=jax.devices()[0].device_kind)
    points = learn(trainer, every=every, seconds=60 * minutes, say=lambda point: report(point=point))
    if len(points) < 2:
        raise SystemExit("the run is too short: give more --tokens")
    steps = points[-1]["step"]
    seconds = points[-1]["seconds"]
    found: Row = {"milliseconds": 1e3 * seconds / (steps - 1), "parameters": count_parameters(config.model).total}
    found |= rates(config, found["milliseconds"], 1, jax.devices()[0].device_kind)
    found["matmuls"] = count_matmuls(trainer)
    if steps == config.train.steps:
        evaluated = trainer.evaluate(max_tokens=EVAL_TOKENS)
        found["eval_loss"] = evaluated and evaluated["eval_loss"]
    report(values=found)


def run_variant(
    variant: str,
    overrides: Sequence[str],
    minutes: float,
    patience: float,
    environment: Mapping[str, str] | None = None,
) -> Row:
    """Train a variant in a process of its own; return its row, with `failed` if it broke off.

    Args:
        variant: Name of the row.
        overrides: The run's configuration, `section.key=value`.
        minutes: Minutes of training after which the run stops.
        patience: Seconds of silence after which the process is killed.
        environment: Variables that are set for the process.
    """
    row: Row = {"variant": variant, "implementation": "jaxstack", "devices": 1}
    points: list[Point] = []
    command = [sys.executable, __file__, "--worker", str(minutes), *overrides]
    for event in events(command, patience, environment):
        if "point" in event:
            points.append(event["point"])
            if len(points) % 20 == 0:
                print(f"{variant}: {points[-1]['tokens']:,.0f} tokens, loss {points[-1]['loss']:.4f}", flush=True)
        row |= event.get("values", {})
        row |= {key: event[key] for key in ("device", "failed") if key in event}
    row["curve"] = [[point["step"], point["tokens"], round(point["seconds"], 3), point["loss"]] for point in points]
    if "failed" in row:
        print(f"{variant} failed: {row['failed']}", flush=True)
    return row


def say_whether_cut(row: Row, total: int, minutes: float) -> None:
    """Says where a recipe stopped before the end of its schedule."""
    if (seen := row.get("tokens", 0)) < total:
        print(
            f"{row['variant']} stopped at {seen:,} of {total:,} tokens, before the end of its schedule: no held-out "
            f"loss. Give fewer --tokens, or more --minutes ({minutes:g}).", flush=True
        )  # fmt: skip


def points_of(row: Mapping[str, Any]) -> list[Point]:
    """A row's curve."""
    return [dict(zip(("step", "tokens", "seconds", "loss"), point, strict=True)) for point in row["curve"]]


def compare(row: Row, base: Mapping[str, Any] | None) -> None:
    """Adds the loss, and its ratio to that of bfloat16 over the same tokens."""
    points = points_of(row)
    if len(points) < 2:
        return
    row["tokens"] = points[-1]["tokens"]
    row["final_loss"] = mean_loss(points, 0.9 * row["tokens"], row["tokens"])
    if base is None or base["curve"][-1][1] < 0.9 * row["tokens"]:
        return
    common = min(row["tokens"], base["curve"][-1][1])
    ours, theirs = (mean_loss(curve, 0.9 * common, common) for curve in (points, points_of(base)))
    row["loss_ratio"] = ours / theirs
    if row.get("eval_loss") and base.get("eval_loss"):
        row["eval_loss_ratio"] = row["eval_loss"] / base["eval_loss"]


def kept_rows(name: str, work: str) -> dict[str, Row]:
    """Return the newest row with a curve of each recipe of this work, of all runs at this commit."""
    rows = [row for row in read_own_rows(name) if row["work"] == work and len(row["curve"]) > 1]
    return {row["variant"]: row for row in rows}


def variant_name(recipe: str, seed: int | None) -> str:
    """Return the name of the row of a recipe, and of a seed where several were asked for."""
    return recipe if seed is None else f"{recipe}, seed {seed}"


def measure(args: argparse.Namespace, overrides: Sequence[str], run: tuple[int | None, str]) -> Row:
    """Return the row of one run: a seed and a recipe."""
    seed, recipe = run
    own = [*overrides, *RECIPES[recipe], *([] if seed is None else [f"run.seed={seed}"])]
    share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / args.together:.3f}"} if args.together > 1 else None
    row = run_variant(variant_name(recipe, seed), own, args.minutes, args.patience, share)
    return {key: value for key, value in row.items() if args.together == 1 or key not in SPEEDS}


def picture(rows: Iterable[Mapping[str, Any]]) -> str:
    """Loss against tokens and against minutes of training."""
    curves = {row["variant"]: points_of(row)[1:] for row in rows if len(row["curve"]) > 2}
    by_tokens = {name: [(p["tokens"] / 1e6, p["loss"]) for p in points] for name, points in curves.items()}
    by_time = {name: [(p["seconds"] / 60, p["loss"]) for p in points] for name, points in curves.items()}
    panels = [
        Panel("Training loss (nats a token)", "million tokens", by_tokens),
        Panel("The same against time", "minutes of training", by_time),
    ]
    return draw(panels, "Training loss of each precision")


def main() -> None:
    """Trains every recipe in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES, metavar="RECIPE",
        help=f"to train, of: {', '.join(RECIPES)}")  # fmt: skip
    parser.add_argument("--tokens", type=positive(float), default=50e6, help="of the whole schedule")
    parser.add_argument("--minutes", type=positive(float), default=20.0, help="of training, after which a recipe stops")
    parser.add_argument("--text", default="stdlib", help="a source of data: stdlib, a file, a directory, a glob")
    parser.add_argument("--patience", type=positive(float), default=240, help="seconds of silence that end a recipe")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="train each recipe once with each seed")
    parser.add_argument("--together", type=positive(int), default=1, help="runs that share the device at a time (1)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on simulated CPU devices; rows go to tiny/")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        minutes, *overrides = args.worker
        run_as_command("convergence.py", lambda: train(float(minutes), overrides))
    tokens_per_step, tokens = (256, 12 * 256) if args.tiny else (65536, args.tokens)
    steps = max(2, round(tokens / tokens_per_step))
    source = [f"data.sources=[{{path: {json.dumps(args.text)}}}]", "data.packing=false"]
    overrides = [*MODEL, *source, *(TINY if args.tiny else ()), f"train.steps={steps}"]
    overrides.append(f"schedule.warmup_steps={steps // 10}")
    work = f"llama 82M, {steps} steps of 64 x 1024 tokens of {args.text}, learning rate {RATE:g}"
    work = "tiny llama" if args.tiny else work
    name = "tiny/convergence" if args.tiny else "convergence"
    runs = [(seed, recipe) for seed in args.seeds or [None] for recipe in args.recipes]
    rows = []
    with ThreadPoolExecutor(args.together) as pool:
        for (seed, recipe), found in zip(runs, pool.map(partial(measure, args, overrides), runs), strict=True):
            row = {"work": work, **found}
            compare(row, row if recipe == BASE else kept_rows(name, work).get(variant_name(BASE, seed)))
            rows.append(row)
            if "failed" not in row:
                say_whether_cut(row, steps * tokens_per_step, args.minutes)
            if len(row["curve"]) > 1:
                append_rows(name, [row])
                (RESULTS / f"{name}.svg").write_text(picture(kept_rows(name, work).values()), encoding="utf-8")
    if all("failed" in row for row in rows):
        raise SystemExit(1)
    print_table(rows, COLUMNS)
    for row in rows:
        if "loss_ratio" in row and row["variant"].partition(",")[0] != BASE:
            away = 100 * abs(row["loss_ratio"] - 1)
            verdict = "within 1%" if away <= 1 else "MORE THAN 1% AWAY"
            print(f"{row['variant']}: loss {row['loss_ratio']:.4f} of {BASE}'s, {verdict}")


if __name__ == "__main__":
    main()
