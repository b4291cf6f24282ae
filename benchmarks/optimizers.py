"""Steps and seconds that each optimizer needs to a loss, each at the best of the same number of learning rates.

    python benchmarks/optimizers.py                            # the quickstart's model and text
    python benchmarks/optimizers.py --work gpt2-124m           # one H100 or H200, about 80 minutes
    python benchmarks/optimizers.py --optimizers adamw,soap --rates 3 --steps 300
    python benchmarks/optimizers.py --tiny                     # tiny sizes on a simulated CPU device

Every optimizer trains on the same batches, with the work's schedule (schedule-free AdamW: constant after the warm-up),
at `--rates` learning rates a factor of two apart around its own centre (`CENTRES`); `edge` says that the best of them
is the first or last, so that more might be found beyond. `final_loss` is the mean over the last tenth of the steps at
the best rate. The loss to reach is that of AdamW; `steps_to_loss` is where the mean over a tenth of the run first
reaches it, `seconds_to_loss` the training time until there, without the first step. `state_bytes` is the optimizer's
state. Rows are appended to benchmarks/results/optimizers.jsonl when all trials of an optimizer are done.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.arguments import positive
from benchmarks.learning import Point, learn, mean_loss
from benchmarks.rows import SCRATCH, append_rows, print_table, require_commit
from benchmarks.steps import open_run

BASE = "adamw"
CENTRES = {"lion": 0.2, "sophia": 0.5, "adafactor": 5.0, "sgd": 100.0}
"""Optimizer -> centre of its learning rates, relative to AdamW's of the work; 1 for others."""
WORKS: dict[str, tuple[float, tuple[str, ...]]] = {
    "quickstart": (
        3e-3,
        ("model.preset=tiny", "train.steps=1000", "train.global_batch_size=4", "train.sequence_length=128",
         "schedule={name: linear, warmup_steps: 100}"),
    ),
    "gpt2-124m": (
        1e-3,
        ("model.preset=gpt2-124m", "model.scan_layers=false", "data.packing=false", "train.steps=1500",
         "train.global_batch_size=64", "train.sequence_length=1024", "schedule={name: cosine, warmup_steps: 150}"),
    ),
    "tiny": (
        3e-3,
        ("model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "data.tokenizer.name=byte",
         "train.steps=20", "train.global_batch_size=4", "train.sequence_length=32", "parallel.simulate_devices=1",
         "schedule={name: linear, warmup_steps: 2}"),
    ),
}  # fmt: skip
"""Work -> AdamW's centre, and its configuration."""
COLUMNS = (
    "optimizer", "rate", "edge", "final_loss", "eval_loss", "steps_to_loss", "seconds_to_loss", "milliseconds",
    "state_bytes",
)  # fmt: skip
POINTS = 100


def train(name: str, rate: float, overrides: list[str]) -> dict[str, Any]:
    """Train at one learning rate; return the curve, the held-out loss and the bytes of optimizer state."""
    import jax

    from jaxstack.run.build import make_trainer

    # Only the averaged weights of schedule-free AdamW are annealed.
    schedule = ["schedule.name=constant"] if name == "schedule_free_adamw" else []
    settings = [f"optimizer.name={name}", f"optimizer.learning_rate={rate}"]
    config, data = open_run([*overrides, *settings, *schedule])
    trainer = make_trainer(config, data)
    points = learn(trainer, every=max(1, config.train.steps // POINTS))
    evaluated = trainer.evaluate(max_tokens=2**20)
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trainer.state.optimizer))
    return {"points": points, "eval_loss": evaluated and evaluated["eval_loss"], "state_bytes": state}


def final_loss(points: list[Point]) -> float:
    """Return the mean loss over the last tenth of the tokens; infinity for a run that diverged."""
    total = points[-1]["tokens"]
    found = mean_loss(points, 0.9 * total, total)
    return found if math.isfinite(found) else math.inf


def reaches(points: list[Point], loss: float) -> Point | None:
    """Return the first point at which the mean over the tenth of the run before it is at most `loss`."""
    tenth = 0.1 * points[-1]["tokens"]
    later = (p for p in points if p["tokens"] >= tenth)
    return next((p for p in later if mean_loss(points, p["tokens"] - tenth, p["tokens"]) <= loss), None)


def tune(name: str, centre: float, count: int, overrides: list[str]) -> dict[str, Any]:
    """Train at `count` learning rates, and return what is known of the best."""
    rates = [centre * CENTRES.get(name, 1.0) * 2.0 ** (k - count // 2) for k in range(count)]
    trials = []
    for rate in rates:
        trials.append(train(name, rate, overrides))
        print(f"{name} {rate:.3g}: {final_loss(trials[-1]['points']):.4f}", flush=True)
    losses = [final_loss(trial["points"]) for trial in trials]
    best = losses.index(min(losses))
    return {
        "optimizer": name,
        "rate": rates[best],
        "edge": best in (0, count - 1),
        "final_loss": losses[best],
        "rates": [[rate, loss if math.isfinite(loss) else None] for rate, loss in zip(rates, losses, strict=True)],
        **trials[best],
    }


def compare(row: dict[str, Any], target: float) -> dict[str, Any]:
    """Return the row to store: steps and seconds to the loss, and the curve."""
    points = row.pop("points")
    found = reaches(points, target)
    steps, seconds = points[-1]["step"], points[-1]["seconds"]
    return {
        **row,
        "target_loss": target,
        "steps": steps,
        "steps_to_loss": found and found["step"],
        "seconds_to_loss": found and found["seconds"],
        "milliseconds": 1e3 * seconds / max(steps - 1, 1),
        "curve": [[p["step"], p["tokens"], round(p["seconds"], 3), p["loss"]] for p in points],
    }


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    from jaxstack.optim.optimizers import OPTIMIZERS

    names = [kind.model_fields["name"].default for kind in OPTIMIZERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=[work for work in WORKS if work != "tiny"], default="quickstart")
    parser.add_argument("--optimizers", default=",".join(names), help="names, AdamW always first (default: all)")
    parser.add_argument("--rates", type=positive(int), default=4, help="learning rates of each (4)")
    parser.add_argument("--steps", type=positive(int), help="steps of each trial (default: the work's)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a simulated CPU device")
    return parser


def main() -> None:
    """Measure, print and store the rows."""
    parser = make_parser()
    args, given = parser.parse_known_args()
    if wrong := [word for word in given if "=" not in word]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    script = f"{SCRATCH}optimizers" if args.tiny else "optimizers"
    require_commit(script)
    work = "tiny" if args.tiny else args.work
    centre, overrides = WORKS[work]
    steps = [f"train.steps={args.steps}"] if args.steps else []
    target, rows = math.inf, []
    for name in dict.fromkeys([BASE, *args.optimizers.split(",")]):
        row = tune(name, centre, args.rates, [*overrides, *steps, *given])
        target = row["final_loss"] if name == BASE else target
        import jax

        device = {"device": jax.devices()[0].device_kind, "devices": 1, "implementation": "jaxstack"}
        rows.append({"work": work, **device, **compare(row, target)})
        append_rows(script, rows[-1:])
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
