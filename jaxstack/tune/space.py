"""A hyperparameter study: its configuration, and the ranges and choices for configuration values that it searches."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, Field, JsonValue, field_validator

from jaxstack.config.base import Component
from jaxstack.config.loader import (
    Tree,
    build_component,
    drop_keys_of_replaced,
    load_yaml,
    merge_overrides,
    overridden_keys,
)
from jaxstack.errors import ConfigError, nearest
from jaxstack.run_config import RunConfig, config_from_tree, load_tree


class StudyConfig(Component):
    """Configuration of a hyperparameter study: which configuration values are searched, in how many trials, and how."""

    name: str = "study"
    """Name of the study; its directory is `run.dir`/name. Default: the name of the study file."""
    trials: int = Field(default=30, ge=1, le=100_000)
    """Number of trials, over all processes and hosts; raise it to go on with a study."""
    space: dict[str, JsonValue]
    """`section.key` -> `{low, high, log, step}` for a range, or a list of choices."""
    metric: Literal["eval_loss", "eval_bits_per_byte"] = "eval_loss"
    """Value to minimize, of the final evaluation of a trial. Bits per byte compare between tokenizers."""
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
    """Trials that run at once on this host, each in a separate process; the host's GPUs are dealt out evenly."""
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
            rule = "must be 1 to 200 letters, digits, '.', '_' and '-', first a letter or digit, as a directory's name"
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


Values: TypeAlias = Mapping[str, Any]
"""`section.key` -> value of one trial."""
_OF_THE_STUDY = ("run.name", "run.dir", "run.init_from", "run.branch_from", "run.branch_step")
"""Keys that a study sets itself, or that must be the same for all trials."""
_RANGE_KEYS = ("low", "high", "log", "step")
_MISSING = object()
"""Result of a look-up of a key that a configuration does not have."""


@dataclasses.dataclass(frozen=True)
class Range:
    """A range of numbers to search, from `low` to `high`, both included.

    Attributes:
      low: smallest value.
      high: largest value.
      log: draw the logarithm uniformly, not the value.
      step: distance between values; None: any number, or every whole number.
      whole: the key takes whole numbers.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False

    def samples(self) -> list[Any]:
        """Return both ends of the range, to check that the run configuration accepts them as values."""
        return [self.low, self.high]

    def contains(self, value: object) -> bool:
        """Return True if a value is in the range, and on its grid if it has one."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        steps = (value - self.low) / self.step if self.step is not None else 0.0
        return abs(steps - round(steps)) < 1e-9


@dataclasses.dataclass(frozen=True)
class Choice:
    """A list of values to choose from, of any type and without order."""

    values: tuple[Any, ...]

    def samples(self) -> list[Any]:
        """Return all values, to check that the run configuration accepts them."""
        return list(self.values)

    def contains(self, value: object) -> bool:
        """Return True if a value is one of the choices."""
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.values)


Dimension: TypeAlias = Range | Choice


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """Search space of a study: a range or choices for each hyperparameter, and the base configuration to change.

    Attributes:
      dimensions: `section.key` -> its range or choices.
      tree: the configuration as plain data, with the command's overrides and without defaults.
      origin: name of the configuration in messages.
    """

    dimensions: Mapping[str, Dimension]
    tree: Tree
    origin: str

    def configuration(self, values: Values) -> RunConfig:
        """Return the run configuration with a trial's hyperparameter values.

        A key that the trial's optimizer, schedule or attention kind (chosen by a `name` in the space) does not have is
        left out.

        Raises:
          ConfigError: the values do not fit together.
        """
        return _with_values(self.tree, values, self.origin)

    def used(self, values: Values) -> dict[str, Any]:
        """Return the values of a trial whose keys its configuration has; all if that configuration is invalid."""
        try:
            config = self.configuration(values)
        except ConfigError:
            return dict(values)
        return {key: value for key, value in values.items() if _look_up(config, key) is not _MISSING}

    def base_values(self) -> dict[str, Any] | None:
        """Return the base configuration's values of all hyperparameters; None if any is outside the search space."""
        base = config_from_tree(self.tree, self.origin)
        values = {key: _value_at(base, key) for key in self.dimensions}
        inside = all(dimension.contains(values[key]) for key, dimension in self.dimensions.items())
        return values if inside else None


def read_space(space: Mapping[str, Any], config: str | Path, overrides: Sequence[str], study: str) -> SearchSpace:
    """Parse the search space of a study file, and check that the run configuration accepts its values.

    Args:
      space: `section.key` -> `{low, high, log, step}` or a list, from the study file.
      config: the YAML file of the configuration.
      overrides: `section.key=value` strings, laid over the file.
      study: name of the study file in messages.

    Raises:
      ConfigError: a key is unknown or fixed by an override, a range is empty, or the configuration refuses its ends.
    """
    tree = load_tree(config, overrides)
    config_from_tree(tree, str(config), overrides)  # raises the errors of the configuration itself
    fixed = overridden_keys(overrides)
    dimensions: dict[str, Dimension] = {}
    for key, text in space.items():
        where = f"{study}: space.{key}"
        if key in fixed:
            raise ConfigError(f"{where} is also set on the command line: remove it from one of the two.")
        if key in _OF_THE_STUDY:
            raise ConfigError(f"{where} cannot be searched: it is the same for all trials, or the study sets it.")
        if len(key.split(".")) < 2:
            raise ConfigError(f"{where} must have the form section.key, such as optimizer.learning_rate.")
        dimensions[key] = _read_dimension(text, where)
    checked = {key: _validate_dimension(key, dimensions, tree, f"{study}: space.{key}") for key in dimensions}
    return SearchSpace(checked, tree, str(config))


def _read_dimension(text: object, where: str) -> Dimension:
    if isinstance(text, list):
        if len({json.dumps(value) for value in text}) < max(2, len(text)):
            raise ConfigError(f"{where} must list at least two different choices; found {text}.")
        return Choice(tuple(text))
    for name in text if isinstance(text, dict) else ():
        if name not in _RANGE_KEYS:
            raise ConfigError(f"{where}: unknown key {name!r}; {nearest(str(name), _RANGE_KEYS)}")
    if not isinstance(text, dict) or not {"low", "high"} <= text.keys():
        raise ConfigError(f"{where} must be a list of choices or {{low: ..., high: ...}}; found {text!r}.")
    low = _number(text, "low", where)
    high = _number(text, "high", where)
    step = _number(text, "step", where) if text.get("step") is not None else None
    log = text.get("log", False)
    if not isinstance(log, bool):
        raise ConfigError(f"{where}.log must be true or false; found {log!r}.")
    if low >= high:
        raise ConfigError(f"{where}: low ({low}) must be less than high ({high}).")
    if log and low <= 0:
        raise ConfigError(f"{where}: low ({low}) must be more than 0 for a logarithmic range.")
    if step is not None and (step <= 0 or log):
        raise ConfigError(f"{where}.step must be more than 0, and is not for logarithmic ranges; found {step}.")
    if step is not None:
        if step > high - low:
            raise ConfigError(f"{where}.step ({step}) must be at most high - low ({high - low:g}).")
        high = low + step * math.floor((high - low) / step + 1e-9)  # the last value of the grid
    return Range(low, high, log, step)


def _number(text: Mapping[str, object], name: str, where: str) -> float:
    value = text[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{where}.{name} must be a finite number; found {value!r}.")
    return value


def _validate_dimension(key: str, dimensions: Mapping[str, Dimension], tree: Tree, where: str) -> Dimension:
    """Check that the run configuration accepts the values of a range or choice; return it, `whole` set for integers.

    A value is accepted if it fits together with the configuration, or with a value of one of the other dimensions.
    """
    dimension = dimensions[key]
    others = [{other: value} for other, one in dimensions.items() if other != key for value in one.samples()]
    contexts: list[Values] = [{}, *others]

    def value_of(value: object) -> object:
        refused = None
        for context in contexts:
            try:
                return _value_at(_with_values(tree, {**context, key: value}, where, strict=True), key)
            except ConfigError as error:
                refused = refused or error
        raise refused or ConfigError(f"{where} cannot be {value!r}.")

    found = value_of(dimension.samples()[0])
    if isinstance(dimension, Range):
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ConfigError(f"{where}: {key} is not a number; give a list of choices.")
        dimension = dataclasses.replace(dimension, whole=isinstance(found, int))
        if dimension.whole and any(number % 1 for number in (dimension.low, dimension.high, dimension.step or 0)):
            raise ConfigError(f"{where}: low, high and step must be whole numbers, as {key} is one.")
    for value in dimension.samples()[1:]:
        value_of(value)
    return dimension


def _with_values(tree: Tree, values: Values, origin: str, strict: bool = False) -> RunConfig:
    """Return the configuration with hyperparameter values replaced; `strict` rejects keys that do not exist."""
    given = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    names = [f"{key}={value}" for key, value in values.items() if key.endswith(".name") and isinstance(value, str)]
    named = {name.partition("=")[0] for name in names}
    rest = [text for text in given if text.partition("=")[0] not in named]
    if strict:
        tree, _ = drop_keys_of_replaced(RunConfig, tree, names)
        tree = merge_overrides(tree, [*names, *rest])
    else:
        tree, _ = drop_keys_of_replaced(RunConfig, merge_overrides(tree, rest), names)
        tree = merge_overrides(tree, names)
    return config_from_tree(tree, origin)


def _value_at(config: RunConfig, key: str) -> Any:
    """Look up `section.key` in a configuration; return its value as plain data, or None if there is none."""
    found = _look_up(config, key)
    if found is _MISSING:
        return None
    return found.model_dump(mode="json", by_alias=True) if isinstance(found, BaseModel) else found


def _look_up(config: RunConfig, key: str) -> Any:
    """Return the value of `section.key` in a configuration; `_MISSING` if it has no such key."""
    found: Any = config
    for part in key.split("."):
        if isinstance(found, BaseModel):
            names = {field.alias or name: name for name, field in type(found).model_fields.items()}
            found = getattr(found, names[part]) if part in names else _MISSING
        else:
            found = found.get(part, _MISSING) if isinstance(found, Mapping) else _MISSING
    return found
