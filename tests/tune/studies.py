"""A configuration file, study files and studies of a closed-form loss."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxstack.tune.optuna_study import OptunaStudy, Outcome
from jaxstack.tune.space import StudyConfig, read_space

SPACE = {
    "optimizer.learning_rate": {"low": 1e-4, "high": 1e-1, "log": True},
    "schedule.warmup_steps": {"low": 0, "high": 20},
    "model.norm": ["rms_norm", "layer_norm"],
}


def write_config(folder: Path, **sections: Any) -> Path:
    """A small configuration whose runs are in `folder`."""
    path = folder / "small.yaml"
    base = {
        "run": {"dir": str(folder / "runs")},
        "model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2},
        "train": {"steps": 20, "global_batch_size": 4, "sequence_length": 32, "eval_every_steps": 5},
    }
    path.write_text(yaml.safe_dump({**base, **sections}))
    return path


def write_study(folder: Path, stem: str = "study", **keys: Any) -> Path:
    path = folder / f"{stem}.yaml"
    path.write_text(yaml.safe_dump({"trials": 4, "space": SPACE, **keys}))
    return path


def open_study(folder: Path, space: Mapping[str, Any] = SPACE, identity: Any = None, **keys: Any) -> OptunaStudy:
    """A study without processes; opening it again goes on with it."""
    keys.setdefault("base_first", False)
    base_first = keys.pop("base_first")
    study = StudyConfig.model_validate({"name": "s", "space": dict(space), **keys})
    found = read_space(study.space, write_config(folder), [], "study.yaml")
    return OptunaStudy(study, found, folder, identity or {"of": "tests"}, 20, base_first=base_first)


def bowl(values: Mapping[str, Any]) -> float:
    """A loss with its minimum of 1 at a learning rate of 0.01, with rms_norm and without a warm-up."""
    distance = math.log10(values["optimizer.learning_rate"] / 0.01)
    return 1 + distance**2 + 0.01 * values["schedule.warmup_steps"] + 0.3 * (values["model.norm"] == "layer_norm")


def complete(study: OptunaStudy, count: int) -> list[dict[str, Any]]:
    """Runs trials of `bowl`; returns their values."""
    found = []
    for _ in range(count):
        number, values = study.ask()
        study.tell(number, Outcome("complete", bowl(values), -0.5))
        found.append(values)
    return found
