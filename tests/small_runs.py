"""Very small language-model trainers on any layout, and batches with everything that makes rows differ."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxstack.loss import language_model_loss
from jaxstack.models import in_fp8
from jaxstack.parallel import make_mesh
from jaxstack.run.build_model import build_model
from jaxstack.run.setting import Setting
from jaxstack.run_config import RunConfig, load_config
from jaxstack.trainer import Trainer

VOCABULARY = 64
LENGTH = 16
SMALL = (
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=8",
    "model.intermediate_size=48",
    f"model.vocab_size={VOCABULARY}",
    f"train.sequence_length={LENGTH}",
    "optimizer.learning_rate=0.01",
    "train.steps=10",
)


def unpacked_batch_at(step: int, rows: int, length: int, vocabulary: int) -> dict[str, np.ndarray]:
    """`batch_at` with one document a row."""
    batch = batch_at(step, rows, length, vocabulary)
    return {name: batch[name] for name in ("tokens", "labels")}


def batch_at(step: int, rows: int, length: int = LENGTH, vocabulary: int = VOCABULARY) -> dict[str, np.ndarray]:
    """Batch `step`: packed documents, small ids more often than large, rows that differ in how many labels count."""
    random = np.random.default_rng(step)
    tokens = (vocabulary * random.random((rows, length + 1)) ** 3).astype(np.int32)
    ends = random.random((rows, length)) < 0.1
    segments = np.cumsum(ends, 1).astype(np.int32) + 1
    labels = tokens[:, 1:].copy()
    ignored = random.random((rows, length)) < np.linspace(0, 0.95, rows)[:, None]
    labels[ignored] = -100
    return {"tokens": tokens[:, :-1], "labels": labels, "segment_ids": segments}


def small_config(*overrides: str) -> RunConfig:
    """A model of two layers; `overrides` as on the command line."""
    return load_config(None, [*SMALL, *overrides])


def make_trainer(
    config: RunConfig,
    data: Any = None,
    devices: Sequence[Any] | None = None,
    *,
    eval_data: Any = None,
    dtype: Any = np.float32,
) -> Trainer:
    """A trainer on as many of the simulated devices as the layout of `config` needs."""
    size = math.prod(config.parallel.degrees.values())
    setting = Setting(config, make_mesh(config.parallel, devices if devices is not None else jax.devices()[:size]))
    rows = config.train.global_batch_size
    return Trainer(
        lambda rngs: in_fp8(build_model(config, dtype)(rngs), config.precision),
        language_model_loss,
        data or (lambda step: batch_at(step, rows, config.train.sequence_length, config.model.vocab_size)),
        optimizer=config.optimizer.model_copy(update={"clip_norm": config.optimizer.clip_norm}),
        schedule=config.schedule,
        mesh=setting.mesh,
        layout=setting.layout,
        train=config.train,
        eval_data=eval_data,
        seed=config.run.seed,
    )


def run_steps(trainer: Trainer, steps: int, start: int = 0) -> list[float]:
    """The losses of `steps` steps from batch `start` on."""
    return [m["loss"] for m in metrics_of_steps(trainer, steps, start)]


def metrics_of_steps(trainer: Trainer, steps: int, start: int = 0) -> list[dict[str, float]]:
    """The metrics of `steps` steps from batch `start` on."""
    batches = trainer.batches(start)
    try:
        metrics = [trainer.train_step(next(batches)[0]) for _ in range(steps)]
    finally:
        batches.close()
    return [trainer.read(m) for m in metrics]
