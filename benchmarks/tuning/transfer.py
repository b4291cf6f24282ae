"""The best learning rate over the width of a model, in the standard parametrization and in muP.

    python benchmarks/tuning/transfer.py
    python benchmarks/tuning/transfer.py --widths 64,128,512 --steps 200 --optimizer soap

A Transformer of two layers learns the bytes of the quickstart's text. Every learning rate 2^-k of the range is tried at
every width; a row has the losses of one width, the mean over the last fifth of the steps. The learning rate is an
argument of one compiled program, so that a width is compiled once. `cpu_seconds` is the processor time of a width with
its compilation, which holds on a machine that does other work too. `python -m scripts.pages` shows the rows
in docs/optimizers.md.
"""

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.rows import SCRATCH, append_rows, print_table, require_commit
from jaxstack.data.config import DataConfig
from jaxstack.data.loader import open_data
from jaxstack.loss import language_model_loss
from jaxstack.models import ModelConfig, Transformer
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.optim.base import Optimizer
from jaxstack.optim.build import build_optimizer
from jaxstack.optim.optimizers import OPTIMIZERS
from jaxstack.tune.coordinate_check import widen

BASE = ModelConfig(
    hidden_size=64, num_layers=2, num_heads=2, vocab_size=320, initialization="fan_in", intermediate_size=192
)
ROWS = 4
LENGTH = 32
EXPONENTS = {"standard": range(6, 14), "mup": range(6, 11)}
"""Parametrization -> k of the learning rates 2^-k that are tried."""


@functools.cache
def text(steps: int) -> dict[str, np.ndarray]:
    """Return tokens and labels [steps, rows, length] of the quickstart's text, one id a byte."""
    config = DataConfig.model_validate({"tokenizer": {"name": "byte"}})
    data = open_data(config, sequence_length=LENGTH, seed=0)
    found = list(itertools.islice(data.batches(global_batch_size=ROWS, rows=np.arange(ROWS), start=0), steps))
    return {name: np.stack([batch[name] for batch in found]) for name in ("tokens", "labels")}


def model_at(width: int, parametrization: str) -> ModelConfig:
    """Return the model at this width."""
    model = widen(BASE, width)
    if parametrization == "standard":
        return model
    return ModelConfig.model_validate({**model.model_dump(), "parametrization": "mup", "base_width": BASE.hidden_size})


def losses_at(model: ModelConfig, kind: type[Optimizer], rates: Sequence[float], steps: int) -> np.ndarray:
    """Train at each learning rate, after a warm-up over a tenth of the steps; return the losses [rates, steps]."""
    module = ModuleArrays(lambda rngs: Transformer(model, rngs))
    params, non_params = jax.jit(module.init)(jax.random.key(0))
    batches = {name: jnp.asarray(x) for name, x in text(steps).items()}
    settings: Any = kind(weight_decay=0.0)

    def loss_of(params: Any, batch: Any) -> jax.Array:
        found = language_model_loss(module.merge(params, non_params), batch)
        return found.total / found.count

    @jax.jit
    def run(peak: jax.Array) -> jax.Array:
        def rate(step):
            return peak * jnp.minimum((step + 1) / (0.1 * steps), 1.0)

        optimizer = build_optimizer(settings, rate, params, total_steps=steps, width=module.width)

        def step(carry: Any, batch: Any) -> Any:
            params, state = carry
            loss, gradients = jax.value_and_grad(loss_of)(params, batch)
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), loss

        return jax.lax.scan(step, (params, optimizer.init(params)), batches)[1]

    return np.stack([np.asarray(run(jnp.asarray(rate, jnp.float32))) for rate in rates])


def measure(width: int, parametrization: str, steps: int, name: str) -> dict[str, Any]:
    """Return the row of a width: the loss at each learning rate, None where it is not finite, and the best k."""
    kinds = {kind.model_fields["name"].default: kind for kind in OPTIMIZERS}
    tried = EXPONENTS[parametrization]
    began = (time.process_time(), time.perf_counter())
    losses = losses_at(model_at(width, parametrization), kinds[name], [2.0**-k for k in tried], steps)
    last = losses[:, -max(steps // 5, 1) :].mean(1)
    return {
        "work": f"learning-rate transfer, {name}, {steps} steps",
        "implementation": "jaxstack",
        "variant": f"{parametrization} width {width}",
        "device": jax.devices()[0].device_kind,
        "devices": 1,
        "optimizer": name,
        "parametrization": parametrization,
        "width": width,
        "steps": steps,
        "best": tried[int(np.argmin(np.nan_to_num(last, nan=np.inf)))],
        "losses": {k: round(float(x), 4) if np.isfinite(x) else None for k, x in zip(tried, last, strict=True)},
        "cpu_seconds": round(time.process_time() - began[0], 1),
        "seconds": round(time.perf_counter() - began[1], 1),
    }


def main() -> None:
    """Measure, print and store the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="64,512", help="hidden sizes, multiples of 64 (64,512)")
    parser.add_argument("--steps", type=positive(int), default=100, help="steps of each run (100)")
    parser.add_argument("--optimizer", default="adamw", help="optimizer.name (adamw)")
    parser.add_argument("--tiny", action="store_true", help="few steps at widths 64 and 128, rows in tiny/")
    args = parser.parse_args()
    script = f"{SCRATCH}transfer" if args.tiny else "transfer"
    require_commit(script)
    widths = [64, 128] if args.tiny else sorted({int(width) for width in args.widths.split(",")})
    rows = []
    for parametrization, width in itertools.product(EXPONENTS, widths):
        rows.append(measure(width, parametrization, 10 if args.tiny else args.steps, args.optimizer))
        append_rows(script, rows[-1:])
        print_table(rows[-1:], ["parametrization", "width", "best", "losses", "cpu_seconds"])
    for parametrization in EXPONENTS:
        ends = [row["best"] for row in rows if row["parametrization"] == parametrization]
        print(f"{parametrization}: best rate 2^-{ends[0]} at width {widths[0]}, 2^-{ends[-1]} at {widths[-1]}")
    print(f"{sum(row['cpu_seconds'] for row in rows):.0f} CPU seconds")


if __name__ == "__main__":
    main()
