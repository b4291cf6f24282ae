"""The registry of methods for training on workers: DiLoCo, gossip, ..., each one file listed here."""

import functools
import operator
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from jaxstack.config.features import MODEL_DIRECTORY, Excludes, Feature
from jaxstack.local_sgd.base import WorkerMethod
from jaxstack.local_sgd.diloco import DiLoCo
from jaxstack.local_sgd.folder import FolderDiLoCo
from jaxstack.local_sgd.gossip import Gossip
from jaxstack.local_sgd.local_sgd import LocalSGD
from jaxstack.local_sgd.streaming import StreamingDiLoCo

METHODS = (DiLoCo, StreamingDiLoCo, LocalSGD, Gossip, FolderDiLoCo)
"""Every method that `local_sgd.name` can choose. A new one is added here."""

if TYPE_CHECKING:
    AnyWorkerMethod: TypeAlias = WorkerMethod
else:
    AnyWorkerMethod = Annotated[functools.reduce(operator.or_, METHODS), Field(discriminator="name")]


def _excludes(used: str) -> tuple[Excludes, ...]:
    """Return what training on workers excludes.

    Args:
      used: template of what turns it on, for messages.
    """
    table = (
        (
            "pipeline",
            "parallel.pipeline",
            "neither the step nor the exchange knows the order of weights by stages",
        ),
        ("batch ramp", "train.batch_ramp", "the programs of the exchanges are compiled for one batch size"),
        ("evaluation tasks", "train.eval_tasks", "tasks need one model, and each worker has its own"),
        ("gradient noise scale", "observe.noise_scale", "workers do not share gradients, which it compares"),
        ("compressed weights", "compression.rules", "the mean of compressed weights is not in compressed form"),
        ("distillation", "distill.teacher", "the exchange would have to leave the teacher's weights out"),
        ("preferences", "preference.loss", "the exchange would have to leave the reference's weights out"),
        (
            "schedule-free AdamW",
            "optimizer.name={optimizer.name}",
            "its parameters are averages over steps, and the exchange would leave out the point that it steps from",
        ),
    )
    return tuple(
        Excludes(other, reason, f"{used} does not support {key}; remove it, or do without workers.")
        for other, key, reason in table
    )


SEVERAL_WORKERS = Feature(
    "workers",
    "parallel",
    lambda parallel: parallel.workers > 1,
    ("parallel.workers=2",),
    excludes=(
        Excludes(
            "separate runs",
            "each run is one worker then",
            "local_sgd.name=folder describes one worker of separate runs; set parallel.workers=1.",
        ),
        *_excludes("parallel.workers ({parallel.workers})"),
    ),
)
"""Several workers in one run."""
SEPARATE_RUNS = Feature(
    "separate runs",
    "local_sgd",
    lambda workers: isinstance(workers, FolderDiLoCo),
    (f"local_sgd={{name: folder, folder: {MODEL_DIRECTORY}, worker: 0, count: 2}}",),
    excludes=_excludes("local_sgd.name=folder"),
)
"""Runs that each train a model copy and exchange changes through a folder."""
FEATURES = (SEPARATE_RUNS, SEVERAL_WORKERS)
"""Features of training on workers, see `jaxstack.config.features`."""
