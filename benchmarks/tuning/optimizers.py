"""Steps and seconds that each optimizer needs to AdamW's loss, each tuned with the same number of runs.

    python benchmarks/tuning/optimizers.py                    # a small model on the quickstart's text; a CPU
    python benchmarks/tuning/optimizers.py --work gpt2-124m --optimizers adamw,muon --text 'corpus/**/*.txt'  # a GPU
    python benchmarks/tuning/optimizers.py --tiny             # tiny sizes, rows in tiny/

Each optimizer has six runs to find its learning rate, on a grid of powers of two around its own centre (`CENTRES`):
`COARSE` in steps of four, then the two neighbours of the best. The best of the six is run again with `--seeds` other
seeds, which change the initial weights and the order of the text; the results are those of these runs alone. `edge`
says that the best rate is at the end of the grid, so that a better one may lie beyond.

`final_loss` is the mean training loss over the last tenth of the steps, over all seeds. No text is seen twice: the
command refuses text that is too short (`--text` takes other files than Python's standard library). AdamW's loss is the
loss to reach: `steps_to_loss` is the step at which the mean over a tenth of the run first is as low, and
`seconds_to_loss` the training time until there without the first step. On a CPU these are seconds of processor time,
which hold on a machine that does other work too. `state_bytes` is the optimizer's state.

Every run is a row of benchmarks/results/optimizers.jsonl. Runs that have a row of the same commit are not repeated: a
command that was stopped goes on, and `--minutes` ends it before a run that would take longer. `python -m scripts.pages`
shows the results in docs/optimizers.md.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.rows import SCRATCH, append_rows, print_table, read_own_rows, require_commit
from benchmarks.steps import open_run
from benchmarks.training.learning import Point, learn, mean_loss
from jaxstack.optim.base import Optimizer, RunInfo
from jaxstack.optim.optimizers import OPTIMIZERS
from jaxstack.run.build import make_trainer

BASE = "adamw"
COARSE = (-3, -1, 1, 3)
"""Powers of two, relative to the centre, that are tried first. The last two runs are next to the best of them."""
CENTRES = {"lion": -2, "schedule_free_adamw": 1, "adafactor": 3, "sgd": 7}
"""Optimizer -> power of two of its centre, relative to AdamW's; 0 for others."""
SETTINGS = {
    "schedule_free_adamw": ("schedule.name=constant",),  # only its averaged weights are annealed
    "ademamix": ("optimizer.b3=0.999",),  # the default, 0.9999, is for more than 10,000 steps
}
"""Optimizer -> settings other than its defaults."""
POINTS = 50


@dataclass(frozen=True)
class Work:
    """A model and text to train on.

    Attributes:
        centre: Power of two of the centre of AdamW's learning rates.
        overrides: Configuration, `section.key=value`.
        eval_tokens: Number of held-out tokens.
    """

    centre: int
    overrides: tuple[str, ...]
    eval_tokens: int = 2**16


WORKS = {
    "small": Work(
        -8,
        ("model={hidden_size: 64, num_layers: 2, num_heads: 2, intermediate_size: 192}", "data.tokenizer.name=byte",
         "train.steps=500", "train.global_batch_size=8", "train.sequence_length=64", "parallel.simulate_devices=1",
         "schedule={name: linear, warmup_steps: 50}"),
    ),
    "gpt2-124m": Work(
        -10,
        ("model.preset=gpt2-124m", "data.packing=false", "train.steps=150", "train.global_batch_size=64",
         "train.sequence_length=1024", "schedule={name: linear, warmup_steps: 15}"),
        eval_tokens=2**20,
    ),
    "tiny": Work(
        -8,
        ("model={hidden_size: 32, num_layers: 1, num_heads: 2}", "data.tokenizer.name=byte", "train.steps=20",
         "train.global_batch_size=4", "train.sequence_length=32", "parallel.simulate_devices=1",
         "schedule={name: linear, warmup_steps: 2}"),
        eval_tokens=2**10,
    ),
}  # fmt: skip
COLUMNS = (
    "optimizer", "rate", "edge", "final_loss", "spread", "eval_loss", "steps_to_loss", "seconds_to_loss",
    "milliseconds", "state_bytes",
)  # fmt: skip
SHOWN = ("work", "device", "optimizer", "rate", "state_bytes", "parameters", "tokens", "commit", "date")
"""What a summary takes from a row."""
Row = Mapping[str, Any]
Key = tuple[int, int]
"""A run of an optimizer: power of two of its learning rate relative to the centre, and its seed."""


def next_run(losses: Mapping[Key, float], seeds: int) -> Key | None:
    """Return the next run of an optimizer, given the final losses of those that are done; None if all are done."""
    tuned = {power: loss for (power, seed), loss in losses.items() if seed == 0}
    for power in COARSE:
        if power not in tuned:
            return power, 0
    centre = min(COARSE, key=lambda power: tuned[power])
    wanted = [(centre - 1, 0), (centre + 1, 0)]
    best = min(tuned, key=lambda power: (tuned[power], power))
    return next((key for key in [*wanted, *((best, seed) for seed in range(1, seeds + 1))] if key not in losses), None)


class RateState(NamedTuple):
    """State of an optimizer whose learning rate is a value, not a constant of the compiled step."""

    rate: Any
    inner: Any


def with_rate_as_value(settings: Optimizer) -> Optimizer:
    """Return the optimizer whose learning rate, of peak 1, is multiplied by the `rate` of its state.

    All rates of an optimizer share one compiled step, which takes longer to make than a run of a small model.
    """

    def scaled(chain: optax.GradientTransformation) -> optax.GradientTransformation:
        chain = optax.with_extra_args_support(chain)

        def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
            updates, inner = chain.update(updates, state.inner, params, **extra)
            return jax.tree.map(lambda x: state.rate * x, updates), RateState(state.rate, inner)

        return optax.GradientTransformationExtraArgs(lambda params: RateState(jnp.ones(()), chain.init(params)), update)

    class WithRate(type(settings)):
        def wrap(self, chain: optax.GradientTransformation, run: RunInfo) -> optax.GradientTransformation:
            return super().wrap(scaled(chain), run)

    return WithRate.model_validate({**settings.model_dump(), "learning_rate": 1.0})


def set_rate(state: optax.OptState, rate: float) -> optax.OptState:
    """Return the state of an optimizer of `with_rate_as_value` at another learning rate."""

    def changed(part: Any) -> Any:
        if not isinstance(part, RateState):
            return part
        return part._replace(rate=jax.device_put(jnp.float32(rate), part.rate.sharding))

    return jax.tree.map(changed, state, is_leaf=lambda part: isinstance(part, RateState))


def train(name: str, key: Key, work: Work, overrides: Sequence[str]) -> dict[str, Any]:
    """Train once, and return the row."""
    power, seed = key
    rate = 2.0 ** (work.centre + CENTRES.get(name, 0) + power)
    config, data = open_run([*overrides, f"optimizer.name={name}", *SETTINGS.get(name, ()), f"run.seed={seed}"])
    tokens = config.train.steps * config.train.global_batch_size * config.train.sequence_length
    if data.train_tokens < tokens:
        raise SystemExit(
            f"{tokens:,} training tokens are more than the {data.train_tokens:,} of the text, some of which would be "
            "seen twice: name more text with --text, or take fewer --steps"
        )
    trainer = make_trainer(config.model_copy(update={"optimizer": with_rate_as_value(config.optimizer)}), data)
    trainer.state = trainer.state._replace(optimizer=set_rate(trainer.state.optimizer, rate))
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    points = learn(trainer, every=max(1, config.train.steps // POINTS), clock=clock)
    loss = final_loss(points)
    steps = config.train.steps
    row = {
        "optimizer": name,
        "power": power,
        "rate": rate,
        "seed": seed,
        "final_loss": loss if math.isfinite(loss) else None,
        "milliseconds": round(1e3 * points[-1]["seconds"] / max(steps - 1, 1), 3),
        "state_bytes": sum(x.nbytes for x in jax.tree.leaves(trainer.state.optimizer)) - 4,  # without the rate
        "parameters": sum(x.size for x in jax.tree.leaves(trainer.state.params)),
        "tokens": tokens,
    }
    if seed:
        evaluated = trainer.evaluate(max_tokens=work.eval_tokens)
        row["eval_loss"] = evaluated and evaluated["eval_loss"]
        row["curve"] = [[p["step"], p["tokens"], round(p["seconds"], 3), round(p["loss"], 4)] for p in points]
    return row


def final_loss(points: Sequence[Point]) -> float:
    """Return the mean loss over the last tenth of the tokens; infinity for a run that diverged."""
    total = points[-1]["tokens"]
    found = mean_loss(list(points), 0.9 * total, total)
    return found if math.isfinite(found) else math.inf


def reaches(points: Sequence[Point], loss: float) -> Point | None:
    """Return the first point at which the mean over the tenth of the run before it is at most `loss`."""
    tenth = 0.1 * points[-1]["tokens"]
    later = (p for p in points if p["tokens"] >= 1.5 * tenth)  # the losses of the start weigh too much before
    return next((p for p in later if mean_loss(list(points), p["tokens"] - tenth, p["tokens"]) <= loss), None)


def mean_curve(rows: Sequence[Row]) -> list[Point]:
    """Return the curve of the mean over runs, which have the same steps."""
    names = ("step", "tokens", "seconds", "loss")
    return [dict(zip(names, map(mean, zip(*at, strict=True)), strict=True))
            for at in zip(*(row["curve"] for row in rows), strict=True)]  # fmt: skip


def summarize(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return one row for each optimizer that has runs with other seeds: AdamW first, then the fewest steps first.

    Args:
        rows: Runs of one work on one device.
    """
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row["optimizer"], []).append(row)
    curves: dict[str, list[Point]] = {}
    found = []
    for name, runs in by_name.items():
        again = [row for row in runs if row["seed"]]
        if not again:
            continue
        curves[name] = mean_curve(again)
        finals = [row["final_loss"] if row["final_loss"] is not None else math.inf for row in again]
        first = again[0]
        found.append({
            **{key: first[key] for key in SHOWN},
            "tuned": sum(not row["seed"] for row in runs),
            "seeds": len(again),
            "edge": abs(first["power"]) > max(COARSE),
            "final_loss": final_loss(curves[name]),
            "spread": stdev(finals) if len(finals) > 1 and math.isfinite(sum(finals)) else None,
            "eval_loss": mean(row["eval_loss"] for row in again),
            "milliseconds": mean(row["milliseconds"] for row in again),
            "steps": curves[name][-1]["step"],
        })  # fmt: skip
    if BASE not in curves:
        return found
    target = final_loss(curves[BASE])
    for row in found:
        reached = reaches(curves[row["optimizer"]], target)
        row |= {f"{name}s_to_loss": reached and reached[key] for name, key in (("step", "step"), ("second", "seconds"))}
    return sorted(
        found, key=lambda row: (row["optimizer"] != BASE, row["steps_to_loss"] or math.inf, row["final_loss"])
    )


def _place(row: Row) -> tuple[bool, float, float]:
    return row["optimizer"] != BASE, row["steps_to_loss"] or math.inf, row["final_loss"]


def stored_rows(script: str, same: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the newest row of each run at this commit that has these values, of all commands so far."""
    rows = [row for row in read_own_rows(script) if all(row.get(key) == value for key, value in same.items())]
    return list({(row["optimizer"], row["power"], row["seed"]): row for row in rows}.values())


def run_all(args: argparse.Namespace, names: Sequence[str], given: Sequence[str]) -> tuple[list[dict[str, Any]], int]:
    """Make the runs that have no row yet; return all rows, and the number of optimizers that are not done."""
    script = f"{SCRATCH}optimizers" if args.tiny else "optimizers"
    require_commit(script)
    label = "tiny" if args.tiny else args.work
    work = WORKS[label]
    changes = [*([f"train.steps={args.steps}"] if args.steps else []), *given]
    same = {"work": " ".join([label, *changes]), "device": jax.devices()[0].device_kind}
    text = [f"data.sources={json.dumps([{'path': glob} for glob in args.text])}"] if args.text else []
    rows = stored_rows(script, same)
    began = time.perf_counter()
    longest = 0.0
    open_ = 0
    for name in names:
        losses = {(row["power"], row["seed"]): _loss(row) for row in rows if row["optimizer"] == name}
        while (key := next_run(losses, args.seeds)) is not None:
            started = time.perf_counter()
            if started - began + longest > 60 * args.minutes:
                open_ += 1
                break
            row = {**same, "implementation": f"jaxstack {name}", "devices": 1}
            row |= train(name, key, work, [*work.overrides, *text, *changes])
            longest = max(longest, time.perf_counter() - started)
            losses[key] = _loss(row)
            append_rows(script, [row])
            shown = f"{name} at {row['rate']:.3g}, seed {key[1]}: loss {losses[key]:.4f}"
            print(f"{shown} ({time.perf_counter() - started:.1f} s)", flush=True)
    return stored_rows(script, same), open_


def _loss(row: Row) -> float:
    return math.inf if row["final_loss"] is None else row["final_loss"]


def make_parser(names: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        names: All optimizers.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=[work for work in WORKS if work != "tiny"], default="small")
    parser.add_argument("--optimizers", default=",".join(names), help="names, AdamW always first (default: all)")
    parser.add_argument("--seeds", type=positive(int), default=3, help="runs at the best rate (3)")
    parser.add_argument("--steps", type=positive(int), help="steps of each run, 20 or more (default: the work's)")
    parser.add_argument("--text", nargs="+", metavar="GLOB", help="files to train on (default: Python's library)")
    parser.add_argument("--minutes", type=positive(float), default=math.inf, help="end after about so many minutes")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a simulated CPU device")
    return parser


def main() -> None:
    """Measure, print and store the rows."""
    known = [kind.model_fields["name"].default for kind in OPTIMIZERS]
    parser = make_parser(known)
    args, given = parser.parse_known_args()
    if wrong := [word for word in given if "=" not in word or word.startswith("-")]:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    if args.steps and args.steps < 20:
        parser.error(f"--steps: {args.steps} is less than 20, the fewest whose tenths have a loss of their own")
    names = list(dict.fromkeys([BASE, *args.optimizers.split(",")]))
    if wrong := [name for name in names if name not in known]:
        parser.error(f"--optimizers: {wrong[0]!r} is none of {', '.join(known)}")
    rows, open_ = run_all(args, names, given)
    print_table(summarize(rows), COLUMNS)
    if open_:
        print(f"{open_} of {len(names)} optimizers are not done: the same command goes on")


if __name__ == "__main__":
    main()
