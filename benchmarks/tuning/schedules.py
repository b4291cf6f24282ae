"""Steps that each learning-rate schedule needs to a loss that a constant rate reaches, on real text.

    python benchmarks/tuning/schedules.py                     # about half an hour on two free CPU cores
    python benchmarks/tuning/schedules.py --steps 2400 --rates 1e-3 2e-3
    python benchmarks/tuning/schedules.py --set model.num_layers=2 model.hidden_size=64 data.tokenizer.vocab_size=1024
    python benchmarks/tuning/schedules.py --schedules cosine  # beside the constant rate only
    python benchmarks/tuning/schedules.py --tiny              # a few steps of a tiny model

The model of configs/quickstart.yaml trains on its text, Python's standard library, with each schedule at each peak
rate of `--rates`, on the same batches. The target is the lowest held-out loss that a constant rate reaches at the best
of these rates; `steps_to_target` is the first evaluation of a schedule, at its best rate, at or below the target. A
schedule runs over all `--steps`, so that it reaches the target while its rate still falls: a run that was planned to
end there would need fewer. Runs must be long enough that the noise of the steps limits the loss: in a few hundred steps
the constant rate, which moves furthest, is ahead. All have the same warm-up, except one_cycle, which has its own. Rows
are appended to benchmarks/results/schedules.jsonl.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.rows import append_rows, print_table, require_commit
from benchmarks.steps import open_run, rates, run_as_command, run_process

BASE = "constant"
WARMUP = 50
TIMESCALE = 1000
"""Of inverse_sqrt: with its default, the warm-up, the rate falls to a sixth of the peak in 2,000 steps."""
WARMED_UP = (BASE, "cosine", "linear", "wsd", "inverse_sqrt")
SCHEDULES: dict[str, tuple[str, ...]] = {
    **{name: (f"schedule.name={name}", f"schedule.warmup_steps={WARMUP}") for name in WARMED_UP},
    "one_cycle": ("schedule.name=one_cycle",),
}
"""Name of each schedule -> its settings; others have their defaults."""
SCHEDULES["inverse_sqrt, long timescale"] = (*SCHEDULES["inverse_sqrt"], f"schedule.timescale={TIMESCALE}")
SCHEDULES["inverse_sqrt, long timescale, decay"] = (
    *SCHEDULES["inverse_sqrt, long timescale"],
    "schedule.decay_fraction=0.2",
)
MODEL = (
    "model.preset=tiny", "train.global_batch_size=4", "train.sequence_length=128", "optimizer.b2=0.98",
    "parallel.data=-1",
)  # fmt: skip
TINY = ("model.num_layers=1", "model.hidden_size=32", "model.intermediate_size=64", "data.tokenizer.name=byte")
EVALUATIONS = 20
"""Evaluations of a run."""
EVAL_TOKENS = 8_000
COLUMNS = (
    "work",
    "variant",
    "learning_rate",
    "lowest_loss",
    "target",
    "steps_to_target",
    "steps_ratio",
    "milliseconds",
)

Curve = list[tuple[int, float]]
"""(step, held-out loss) of each evaluation."""


def measure(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the row of one run: its curve of held-out losses."""
    import time

    import jax

    from jaxstack.run.build import make_trainer

    config, data = open_run(overrides)
    trainer = make_trainer(config, data)
    steps = config.train.steps
    curve = []
    spent = 0.0
    every = max(1, steps // EVALUATIONS)
    batches = trainer.batches(0)
    for step in range(1, steps + 1):
        began = time.perf_counter()
        loss = trainer.train_step(next(batches)[0])["loss"]
        float(loss)
        spent += (time.perf_counter() - began) * (step > 1)
        if step % every == 0 or step == steps:
            found = trainer.evaluate(max_tokens=EVAL_TOKENS)
            assert found is not None, "the text has a held-out part"
            curve.append((step, float(found["eval_loss"])))
    batches.close()
    milliseconds = 1e3 * spent / max(steps - 1, 1)
    return {
        "implementation": "jaxstack", **rates(config, milliseconds, jax.device_count(), jax.devices()[0].device_kind),
        "milliseconds": milliseconds, "curve": curve,
    }  # fmt: skip


def best_run(runs: Mapping[float, Curve]) -> float:
    """Return the peak rate whose curve has the lowest loss."""
    return min(runs, key=lambda rate: min(loss for _, loss in runs[rate]))


def steps_to(curve: Curve, target: float) -> int | None:
    """Return the step of the first evaluation at or below `target`, or None."""
    return next((step for step, loss in curve if loss <= target), None)


def fewest_steps(runs: Mapping[float, Curve], target: float) -> tuple[float, int | None]:
    """Return the peak rate that reaches `target` first, and its steps; the best rate and None if none does."""
    reached = {rate: steps for rate, curve in runs.items() if (steps := steps_to(curve, target)) is not None}
    if not reached:
        return best_run(runs), None
    rate = min(reached, key=lambda rate: reached[rate])
    return rate, reached[rate]


def main() -> None:
    """Train every schedule at every rate, and compare the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive(int), default=1200, help="steps of each run")
    parser.add_argument("--rates", type=positive(float), nargs="+", default=[1.5e-3, 3e-3, 6e-3], help="peak rates")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES), metavar="NAME",
                        help=f"schedules beside {BASE} (default: all)")  # fmt: skip
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="overrides of every run")
    parser.add_argument("--timeout", type=positive(float), default=1200, help="seconds a run may take")
    parser.add_argument("--tiny", action="store_true", help="a tiny model; rows go to tiny/")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        run_as_command("schedules.py", lambda: print(json.dumps(measure(args.worker))))
    script = "tiny/schedules" if args.tiny else "schedules"
    require_commit(script)
    steps = min(args.steps, 48) if args.tiny else args.steps
    model = "tiny model" if args.tiny else ", ".join(["quickstart", *args.set])
    work = f"{model}, {steps} steps of real text"
    measured: dict[str, dict[float, dict[str, Any]]] = {}
    rows: list[dict[str, Any]] = []
    for name in dict.fromkeys([BASE, *args.schedules]):
        for rate in args.rates:
            overrides = [*MODEL, *SCHEDULES[name], *(TINY if args.tiny else ()), *args.set, f"train.steps={steps}"]
            command = [__file__, "--worker", *overrides, f"optimizer.learning_rate={rate}"]
            row = run_process(f"{name}, rate {rate:g}", command, args.timeout)
            if row:
                measured.setdefault(name, {})[rate] = row
        if BASE not in measured:
            raise SystemExit(1)
        if name in measured:
            rows.append({"work": work, **compare(measured, name)})
            append_rows(script, rows[-1:])
    print_table(rows, COLUMNS)


def compare(measured: Mapping[str, Mapping[float, dict[str, Any]]], name: str) -> dict[str, Any]:
    """Return the row of a schedule, at the rate that reaches the target first.

    Args:
        measured: schedule -> peak rate -> row with its `curve`; those of the constant rate are among them.
        name: the schedule.
    """
    curves = {schedule: {rate: row["curve"] for rate, row in runs.items()} for schedule, runs in measured.items()}
    target = min(loss for curve in curves[BASE].values() for _, loss in curve)
    _, base_steps = fewest_steps(curves[BASE], target)
    rate, steps = fewest_steps(curves[name], target)
    lowest = {f"{r:g}": min(loss for _, loss in curve) for r, curve in curves[name].items()}
    return {
        "variant": name, "learning_rate": rate, "target": target, "steps_to_target": steps,
        "lowest_loss": min(lowest.values()), "lowest_losses": lowest,
        "steps_ratio": steps / base_steps if steps and base_steps else None, **measured[name][rate],
    }  # fmt: skip


if __name__ == "__main__":
    main()
