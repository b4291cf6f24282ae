"""The best learning rate over the width of a model, in the standard parametrization and in muP.

    python benchmarks/transfer.py --widths 64,512 --steps 100 --optimizer adamw

A Transformer of two layers learns the bytes of the quickstart's text. Every learning rate 2^-k of the range is tried at
every width; a row has the losses of one width, the mean over the last fifth of the steps. The learning rate is an
argument of one compiled program, so that a width is compiled once.
"""

import argparse
import dataclasses
import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.rows import append_rows, print_table, require_commit
from jaxstack.data.config import DataConfig
from jaxstack.data.loader import open_data
from jaxstack.functional.module import FunctionalModule
from jaxstack.loss import language_model_loss
from jaxstack.models import ModelConfig, Transformer
from jaxstack.optim.base import Optimizer
from jaxstack.optim.build import build_optimizer
from jaxstack.optim.optimizers import OPTIMIZERS
from jaxstack.tune.coordinates import widen

BASE = ModelConfig(
    hidden_size=64, num_layers=2, num_heads=2, vocab_size=320, initialization="fan_in", intermediate_size=192
)
ROWS, LENGTH = 4, 32
EXPONENTS = {"standard": range(6, 14), "mup": range(6, 11)}
"""Parametrization -> k of the learning rates 2^-k that are tried."""


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Losses at one width.

    Attributes:
      width: hidden_size.
      losses: k -> loss at the learning rate 2^-k.
    """

    width: int
    losses: dict[int, float]

    @property
    def best(self) -> int:
        """k of the best learning rate."""
        return min(self.losses, key=lambda k: self.losses[k])


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
    module = FunctionalModule(lambda rngs: Transformer(model, rngs))
    params, non_params = jax.jit(module.init)(jax.random.key(0))
    batches = {name: jnp.asarray(x) for name, x in text(steps).items()}
    settings: Any = kind(weight_decay=0.0)

    def loss_of(params: Any, batch: Any) -> jax.Array:
        found = language_model_loss(module.merge(params, non_params), batch)
        return found.total / found.count

    @jax.jit
    def run(peak: jax.Array) -> jax.Array:
        rate = lambda step: peak * jnp.minimum((step + 1) / (0.1 * steps), 1.0)  # noqa: E731
        optimizer = build_optimizer(settings, rate, params, total_steps=steps, width=module.width)

        def step(carry: Any, batch: Any) -> Any:
            params, state = carry
            loss, gradients = jax.value_and_grad(loss_of)(params, batch)
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), loss

        return jax.lax.scan(step, (params, optimizer.init(params)), batches)[1]

    return np.stack([np.asarray(run(jnp.asarray(rate, jnp.float32))) for rate in rates])


def transfer(
    parametrization: str, widths: Sequence[int], steps: int, kind: type[Optimizer], exponents: Sequence[int] = ()
) -> list[Transfer]:
    """Return the losses at each width."""
    tried = exponents or EXPONENTS[parametrization]
    found = []
    for width in widths:
        losses = losses_at(model_at(width, parametrization), kind, [2.0**-k for k in tried], steps)
        last = np.nan_to_num(losses[:, -max(steps // 5, 1) :].mean(1), nan=np.inf)
        found.append(Transfer(width, {k: round(float(loss), 4) for k, loss in zip(tried, last, strict=True)}))
    return found


def main() -> None:
    """Measure, print and store the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", default="64,512", help="hidden sizes, multiples of 64 (64,512)")
    parser.add_argument("--steps", type=int, default=100, help="steps of each run (100)")
    parser.add_argument("--optimizer", default="adamw", help="optimizer.name (adamw)")
    arguments = parser.parse_args()
    require_commit("transfer")
    kinds = {kind.model_fields["name"].default: kind for kind in OPTIMIZERS}
    rows = []
    for parametrization in EXPONENTS:
        began = time.perf_counter()
        widths = [int(width) for width in arguments.widths.split(",")]
        for found in transfer(parametrization, widths, arguments.steps, kinds[arguments.optimizer]):
            rows.append(
                {
                    "work": "learning-rate transfer",
                    "optimizer": arguments.optimizer,
                    "parametrization": parametrization,
                    "width": found.width,
                    "steps": arguments.steps,
                    "best_rate": f"2^-{found.best}",
                    "losses": found.losses,
                    "device": jax.devices()[0].device_kind,
                    "seconds": round(time.perf_counter() - began, 1),
                }
            )
            print_table(rows[-1:], ["optimizer", "parametrization", "width", "best_rate", "losses", "seconds"])
    append_rows("transfer", rows)


if __name__ == "__main__":
    main()
