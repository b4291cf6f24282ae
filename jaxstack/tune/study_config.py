"""The study file: which configuration values a hyperparameter search varies, in how many trials, and how."""

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, field_validator

from jaxstack.config.base import Component
from jaxstack.config.loader import build_component, load_yaml
from jaxstack.errors import ConfigError


class StudyConfig(Component):
    """Configuration of a hyperparameter study: which configuration values are searched, in how many trials, and how."""

    name: str = "study"
    """Name of the study; its directory is `run.dir`/name. Default: the name of the study file."""
    trials: int = Field(default=30, ge=1, le=100_000)
    """Number of trials, over all processes and hosts; raise it to go on with a study."""
    space: dict[str, JsonValue]
    """`section.key` -> `{low, high, log, step}` for a range, or a list of choices."""
    metric: Literal["eval_loss", "eval_bits_per_byte"] = "eval_loss"
    """Value to minimize, of the evaluation after a trial's last step. Bits per byte compare between tokenizers."""
    sampler: Literal["tpe", "gp", "random"] = "tpe"
    """`tpe`: tree-structured Parzen estimator (Bergstra et al. 2011); `gp`: Gaussian process, which needs PyTorch and
    SciPy; `random`: no model, for comparison."""
    startup_trials: int | None = Field(default=None, ge=1)
    """Random trials before the sampler's model proposes any. Default: a fifth of `trials`, from 5 to 10."""
    pruner: Literal["median", "hyperband", "none"] = "median"
    """Rule that stops a trial early by its held-out losses so far: above the median of the other trials at the same
    step, or successive halving (Li et al. 2018)."""
    pruner_startup_trials: int = Field(default=5, ge=0)
    """Trials that must have ended before the median rule stops any."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the proposals. One worker repeats a study exactly; several finish in an order that varies."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Trials that run at once on this host, each a process of its own; the host's GPUs are dealt out evenly."""
    storage: str | None = None
    """Journal file or database URL (`postgresql://...`) that the hosts of a study share. Default: a journal file in
    the study's directory."""
    keep_checkpoints: Literal["best", "all", "none"] = "best"
    """Checkpoints that are kept: the best trial's so far, those of every trial, or none."""

    @property
    def random_trials(self) -> int:
        """Number of trials with random values at the start of the study: `startup_trials`, or its default."""
        return self.startup_trials or min(max(self.trials // 5, 5), 10)

    @field_validator("space")
    @classmethod
    def _is_not_empty(cls, space: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if not space:
            raise ValueError("should have at least one section.key, such as optimizer.learning_rate.")
        return space

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name):
            rule = "must be at most 200 letters, digits, '.', '_' and '-', because it names a directory"
            raise ValueError(f"{rule}; found {name!r}.")
        return name


def load_study(path: str | Path) -> StudyConfig:
    """Read and validate the YAML file of a hyperparameter study.

    Raises:
      ConfigError: the file is missing or no YAML, or has an unknown key or a wrong value.
    """
    path = Path(path)
    if not path.exists():
        raise ConfigError(f"study file {path} does not exist; see docs/tuning.md for what it holds.")
    named = {"name": re.sub(r"[^A-Za-z0-9._-]", "-", path.stem)}
    return build_component(StudyConfig, {**named, **load_yaml(path, "keys such as `trials:` and `space:`")}, str(path))
