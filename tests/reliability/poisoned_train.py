"""Trains a small network with statistics: `poisoned_train.py FOLDER STEPS nan|flip STEP,...`.

nan: the batch of each step holds one NaN. flip: after the step, one bit of one device's copy of a weight changes.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxstack import Trainer
from jaxstack.checkpoint.config import CheckpointConfig
from jaxstack.cli import run_command
from jaxstack.loop import LoopSettings
from jaxstack.observe.config import ObserveConfig
from jaxstack.optim.optimizers import AdamW
from jaxstack.optim.schedules import Constant
from jaxstack.parallel import ParallelConfig, make_mesh
from jaxstack.resilience.config import ResilienceConfig
from jaxstack.run_config import TrainConfig
from tests.resilience.bits import flip_copy

DEVICE = 3


def network(rngs: nnx.Rngs) -> nnx.Module:
    """Eight numbers to one."""
    return nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs), nnx.Linear(16, 1, rngs=rngs))


def squares(model, batch):
    return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)


class Flipping(Trainer):
    """Damages its state after some steps."""

    flips: frozenset[int] = frozenset()

    def train_step(self, batch):
        metrics = super().train_step(batch)
        if int(self.state.step) in self.flips:
            params = self.state.params
            layer = next(iter(params["layers"]))
            kernel = params["layers"][layer]["kernel"]
            params["layers"][layer]["kernel"] = flip_copy(kernel, DEVICE, 77)
        return metrics


def train(folder: str, steps: int, kind: str, when: frozenset[int]) -> None:
    def data(step: int) -> dict:
        x = np.random.default_rng(step).normal(size=(16, 8)).astype(np.float32)
        y = x.sum(axis=1)
        if kind == "nan" and step + 1 in when:
            y[5] = np.nan
        return {"x": x, "y": y}

    mesh = make_mesh(ParallelConfig(data=-1), jax.devices()[:4])
    trainer = Flipping(
        network, squares, data, optimizer=AdamW(learning_rate=1e-2), schedule=Constant(), mesh=mesh,
        train=TrainConfig(steps=steps, global_batch_size=16),
    )  # fmt: skip
    trainer.flips = when if kind == "flip" else frozenset()
    settings = LoopSettings(
        checkpoint=CheckpointConfig(every_steps=5, keep=100),
        observe=ObserveConfig(trackers=("jsonl",), log_every=1),
        resilience=ResilienceConfig(checksum_every_steps=4 if kind == "flip" else None),
    )
    trainer.fit(folder, settings)


if __name__ == "__main__":
    folder, steps, kind, when = sys.argv[1:]
    chosen = frozenset(map(int, when.split(","))) if when else frozenset()
    sys.exit(run_command("poisoned", lambda: train(folder, int(steps), kind, chosen)))
