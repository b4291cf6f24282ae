"""Bayesian search against random search: the best held-out loss of a small language model after 10, 20 and 30 trials.

    python benchmarks/tuning/tune_search.py --seeds 10
    python benchmarks/tuning/tune_search.py --seeds 10 --samplers random,tpe,gp    (gp needs PyTorch)

The model is a one-layer Transformer over the bytes of Python's standard library. All of its training steps are one
compiled program with the hyperparameters as arguments, so that a trial takes a fraction of a second; proposals, records
and constraints are those of `jaxstack.tune`. Each seed draws its own initial weights and its own proposals, the same
weights for every sampler. The row of a seed has the best loss after each number of trials. `python
-m scripts.pages` shows the rows in docs/tuning.md.
"""

import argparse
import functools
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import jax
import jax.numpy as jnp
import optax
import yaml
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.rows import append_rows, require_commit
from jaxstack.data.loader import open_data
from jaxstack.loss import language_model_loss
from jaxstack.optim.schedules import Linear
from jaxstack.run.build import resolve_model
from jaxstack.run.build_model import build_model
from jaxstack.run_config import RunConfig, load_config
from jaxstack.tune.optuna_study import OptunaStudy, Outcome, best_of, check_packages
from jaxstack.tune.space import StudyConfig, read_space

SCRIPT = "tune_search"
WORK = "study of 5 hyperparameters, bytes, 1 layer"
STEPS = 80
ROWS = 8
LENGTH = 64
HELD_OUT = 32
SPACE: dict[str, Any] = {
    "optimizer.learning_rate": {"low": 1e-5, "high": 1.0, "log": True},
    "optimizer.b1": {"low": 0.0, "high": 0.99},
    "optimizer.b2": {"low": 0.5, "high": 0.9999},
    "optimizer.weight_decay": {"low": 1e-4, "high": 10.0, "log": True},
    "schedule.warmup_steps": {"low": 0, "high": STEPS // 2},
}
CONFIG = {
    "model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "scan_layers": False},
    "data": {"tokenizer": {"name": "byte"}},
    "train": {"steps": STEPS, "global_batch_size": ROWS, "sequence_length": LENGTH},
    "schedule": {"name": "linear"},
}
COUNTS = (10, 20, 30)
Train = Callable[[int, Mapping[str, Any]], float]
"""Function from a seed and a trial's values to the held-out loss."""


def read_batches(config: RunConfig) -> tuple[RunConfig, dict[str, jax.Array], dict[str, jax.Array]]:
    """Return the configuration with its vocabulary, training batches [steps, rows, length] and one of held-out rows."""
    data = open_data(config.data, sequence_length=LENGTH, seed=0)
    config = config.model_copy(update={"model": resolve_model(config.model, data.tokenizer.vocab_size)})
    found = data.batches(global_batch_size=ROWS, rows=range(ROWS), start=0)
    host = [next(found) for _ in range(STEPS)]
    held_out = next(data.held_out_batches(batch_size=HELD_OUT, rows=range(HELD_OUT), max_tokens=None))
    return config, jax.tree.map(lambda *x: jnp.stack(x), *host), jax.tree.map(jnp.asarray, held_out)


def make_training(config: RunConfig) -> Train:
    """Return a function that trains the model with given hyperparameters; it compiles once."""
    config, batches, held_out = read_batches(config)
    make = build_model(config, jnp.float32)

    def loss_of(graph: Any, rest: Any, params: Any, batch: Any) -> jax.Array:
        loss = language_model_loss(nnx.merge(graph, params, rest), batch)
        return loss.total / loss.count

    @jax.jit
    def train(seed: jax.Array, values: Mapping[str, jax.Array]) -> jax.Array:
        graph, params, rest = nnx.split(make(nnx.Rngs(jax.random.key(seed))), nnx.Param, ...)
        after = Linear().decay(STEPS)
        warmup = values["schedule.warmup_steps"]

        def rate(step: jax.Array) -> jax.Array:
            rising = (step + 1) / jnp.maximum(warmup, 1)
            falling = after((step - warmup) * STEPS / (STEPS - warmup))
            return values["optimizer.learning_rate"] * jnp.where(step < warmup, rising, falling)

        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.scale_by_adam(values["optimizer.b1"], values["optimizer.b2"]),
            optax.add_decayed_weights(values["optimizer.weight_decay"]),
            optax.scale_by_learning_rate(rate),
        )
        objective = functools.partial(loss_of, graph, rest)

        def step(carry: Any, batch: Any) -> tuple[Any, None]:
            params, state = carry
            updates, state = optimizer.update(jax.grad(objective)(params, batch), state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), batches)
        return objective(params, held_out)

    def run(seed: int, values: Mapping[str, Any]) -> float:
        return float(train(jnp.asarray(seed), {key: jnp.float32(value) for key, value in values.items()}))

    return run


def search(train: Train, sampler: str, seed: int, folder: Path, config: Path) -> dict[str, Any]:
    """Run a study, and return its row."""
    study = StudyConfig.model_validate(
        {"name": f"{sampler}-{seed}", "space": SPACE, "sampler": sampler, "trials": COUNTS[-1], "seed": seed}
    )
    # All begin at random: the configuration's own values would be the same good first trial for all.
    space = read_space(SPACE, config, [], "SPACE")
    stored = OptunaStudy(study, space, folder, {"seed": seed}, STEPS, base_first=False)
    began = time.process_time()
    losses = []
    for _ in range(study.trials):
        number, values = stored.ask()
        loss = train(seed, values)
        finite = math.isfinite(loss)
        stored.tell(number, Outcome("complete", loss) if finite else Outcome("failed", reason="not finite"))
        losses.append(loss if finite else math.inf)
    best = best_of(stored.records())
    assert best is not None and best.value == min(losses)
    bests = {f"loss_at_{count}": min(losses[:count]) for count in COUNTS}
    lowest = [round(loss, 4) if math.isfinite(loss) else None for loss in itertools.accumulate(losses, min)]
    seconds = round(time.process_time() - began, 1)
    return {"sampler": sampler, "seed": seed, **bests, "bests": lowest, "cpu_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds (10)")
    parser.add_argument("--first-seed", type=int, default=0, help="first of the seeds (0)")
    parser.add_argument("--samplers", default="random,tpe", help="samplers to compare (random,tpe)")
    args = parser.parse_args()
    require_commit(SCRIPT)
    samplers = args.samplers.split(",")
    for sampler in samplers:
        check_packages(StudyConfig.model_validate({"space": SPACE, "sampler": sampler}))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "small.yaml"
        config.write_text(yaml.safe_dump(CONFIG))
        train = make_training(load_config(config))
        device = jax.devices()[0].device_kind
        found: dict[str, list[float]] = {sampler: [] for sampler in samplers}
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            for sampler, losses in found.items():
                row = search(train, sampler, seed, folder, config)
                losses.append(row[f"loss_at_{COUNTS[-1]}"])
                shown = ", ".join(f"{count} trials {row[f'loss_at_{count}']:.4f}" for count in COUNTS)
                print(f"seed {seed}, {sampler:6}: {shown} ({row['cpu_seconds']} s)", flush=True)
                common = {"work": WORK, "implementation": f"jaxstack {sampler}", "device": device, "devices": 1}
                append_rows(SCRIPT, [{**common, **row}])
    for sampler, losses in found.items():
        wins = sum(a < b for a, b in zip(losses, found.get("random", losses), strict=True))
        print(f"{sampler:6}: mean loss {mean(losses):.4f}, better than random at {wins} of {args.seeds} seeds")


if __name__ == "__main__":
    main()
