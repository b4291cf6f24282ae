"""The registry of methods for training on islands (device groups): DiLoCo, gossip, ..., each one file listed here."""

import functools
import operator
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from jaxstack.config.features import Excludes, Feature
from jaxstack.islands.base import IslandMethod
from jaxstack.islands.diloco import DiLoCo
from jaxstack.islands.folder import FolderDiLoCo
from jaxstack.islands.gossip import Gossip
from jaxstack.islands.local_sgd import LocalSGD
from jaxstack.islands.streaming import StreamingDiLoCo

METHODS = (DiLoCo, StreamingDiLoCo, LocalSGD, Gossip, FolderDiLoCo)
"""Every method that `islands.name` can choose. A new one is added here."""

if TYPE_CHECKING:
    AnyIslandMethod: TypeAlias = IslandMethod
else:
    AnyIslandMethod = Annotated[functools.reduce(operator.or_, METHODS), Field(discriminator="name")]


def _excludes(used: str) -> tuple[Excludes, ...]:
    """Return what training on islands excludes.

    Args:
      used: template of what turns it on, for messages.
    """
    table = (
        ("pipeline", "parallel.pipeline", "the step of an island has no place for the schedule of stages"),
        ("batch ramp", "train.batch_ramp", "the programs of the exchanges are compiled for one batch size"),
        ("evaluation tasks", "train.eval_tasks", "tasks need one model, and each island has its own"),
        ("gradient noise scale", "observe.noise_scale", "islands do not share gradients, which it compares"),
        ("compressed weights", "compression.rules", "the mean of compressed weights is not in compressed form"),
        ("distillation", "distill.teacher", "the exchange would have to leave the teacher's weights out"),
        (
            "schedule-free AdamW",
            "optimizer.name={optimizer.name}",
            "its parameters are averages over steps already, which the exchange would mix with the point it steps from",
        ),
    )
    return tuple(
        Excludes(other, reason, f"{used} does not support {key}; remove it, or do without islands.")
        for other, key, reason in table
    )


ISLANDS = Feature(
    "islands",
    "parallel",
    lambda parallel: parallel.islands > 1,
    ("parallel.islands=2",),
    excludes=(
        Excludes(
            "separate runs",
            "each run is one island then",
            "islands.name=folder describes one island of separate runs; set parallel.islands=1.",
        ),
        *_excludes("parallel.islands ({parallel.islands})"),
    ),
)
"""Several islands (device groups that each train a model copy) in one run."""
SEPARATE_RUNS = Feature(
    "separate runs",
    "islands",
    lambda islands: isinstance(islands, FolderDiLoCo),
    excludes=_excludes("islands.name=folder"),
)
"""Runs that each train a model copy and exchange changes through a folder."""
FEATURES = (SEPARATE_RUNS, ISLANDS)
"""Features of training on islands (device groups), see `jaxstack.config.features`."""
