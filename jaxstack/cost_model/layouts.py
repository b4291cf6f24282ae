"""Tables of parallel layouts: one NumPy column per setting, so that formulas evaluate thousands of layouts at once."""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from jaxstack.errors import ConfigError, nearest
from jaxstack.parallel.config import AXES, ParallelConfig, factorizations
from jaxstack.parallel.pipeline.plan import fitting_microbatches, plan_pipeline
from jaxstack.run_config import RunConfig

Floats = NDArray[np.float64]

REMATS = ("none", "save_dots", "save_attention", "full", "offload", "save_attention_offload")
"""Values of `model.remat`; a column of `LayoutTable` has their indices."""
ON_DEVICE = REMATS[:4]
"""Policies that store nothing in host memory, from most to least memory."""
SCHEDULES = ("none", "gpipe", "1f1b", "interleaved", "zero_bubble")
"""Values of `parallel.pipeline_schedule`; `none` without a pipeline."""
RECIPES = ("none", "delayed", "current", "blockwise")
"""Values of `precision.fp8`."""
_MORE_VIRTUAL_STAGES = (4, 8)
"""Numbers of virtual stages of a device that a search tries in addition to 2."""
_COLUMNS = (*AXES, "sequence", "zero", "schedule", "chunks", "microbatches", "remat", "fp8")
_NAMED = {"schedule": SCHEDULES, "remat": REMATS, "fp8": RECIPES}
"""Columns that have indices of names."""
MICROBATCH_SIZE = "microbatch_size"
"""Name that restrictions of a search have for the sequences of a microbatch in each replica."""
VIRTUAL_STAGE_LAYERS = "virtual_stage_layers"
"""Name that restrictions have for the layers of a virtual stage of pipelines; layouts without one always have it."""


@dataclasses.dataclass(frozen=True)
class LayoutTable:
    """Table of parallel layouts: a row for each layout, a column for each setting (degrees, ZeRO stage, remat, ...).

    Attributes:
      columns: choice -> values, [layouts]; the keys are the mesh axes, `sequence` (0 or 1), `zero`, `schedule` and
        `remat` and `fp8` (indices in `SCHEDULES`, `REMATS` and `RECIPES`), `chunks` (virtual stages of a device), and
        `microbatches` (of a pipeline or of gradient accumulation).
    """

    columns: dict[str, Floats]

    def __len__(self) -> int:
        return len(self.columns["data"])

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    def remat_in(self, *names: str) -> NDArray[np.bool_]:
        """Return a mask, True for the layouts whose rematerialisation policy is one of `names`."""
        return np.isin(self["remat"], [REMATS.index(name) for name in names])

    def schedule_in(self, *names: str) -> NDArray[np.bool_]:
        """Return a mask, True for the layouts whose pipeline schedule is one of `names`."""
        return np.isin(self["schedule"], [SCHEDULES.index(name) for name in names])

    def select(self, rows: NDArray[Any]) -> "LayoutTable":
        """Return the table with only these row numbers, or only the rows for which a mask is True."""
        return LayoutTable({name: column[rows] for name, column in self.columns.items()})

    def configuration(self, row: int, config: RunConfig) -> RunConfig:
        """Return a copy of the run configuration that uses the parallel layout in row `row` of this table."""
        value = {name: int(column[row]) for name, column in self.columns.items()}
        stages = value["pipeline"] > 1
        pipeline = {
            "microbatches": value["microbatches"],
            "pipeline_schedule": SCHEDULES[value["schedule"]],
            "pipeline_virtual_stages": value["chunks"],
        }
        parallel = _with_degrees(config.parallel, {axis: value[axis] for axis in AXES}) | {
            "sequence": bool(value["sequence"]),
            "zero": value["zero"],
            **(pipeline if stages else {}),
        }
        train = config.train.model_copy(update={"gradient_accumulation": 1 if stages else value["microbatches"]})
        precision = config.precision.model_copy(update={"fp8": RECIPES[value["fp8"]]})
        if value["fp8"] == 0:
            precision = precision.model_copy(update={"fp8_rules": ()})
        return config.model_copy(
            update={
                "parallel": ParallelConfig.model_validate(parallel),
                "train": train,
                "model": config.model.model_copy(update={"remat": REMATS[value["remat"]]}),
                "precision": precision,
            }
        )


def layout_table_of(config: RunConfig) -> LayoutTable:
    """Return a layout table with a single row: the layout of a configuration whose degrees are given."""
    parallel = config.parallel
    train = config.train
    stages = parallel.pipeline > 1
    plan = plan_pipeline(parallel, train.global_batch_size, train.gradient_accumulation) if stages else None
    row = {
        **parallel.degrees,
        "sequence": parallel.sequence,
        "zero": parallel.zero,
        "schedule": SCHEDULES.index(plan.schedule) if plan else 0,
        "chunks": plan.chunks if plan else 1,
        "microbatches": plan.microbatches if plan else train.gradient_accumulation,
        "remat": REMATS.index(config.model.remat),
        "fp8": RECIPES.index(config.precision.fp8),
    }
    return LayoutTable({name: np.array([row[name]], float) for name in _COLUMNS})


def parse_restrictions(text: str) -> dict[str, int]:
    """Parse the restrictions of a search, such as `zero=0,remat=full,microbatch_size=4`.

    Args:
      text: settings with the only value that a search shall try, separated by commas: columns of `LayoutTable`,
        `microbatch_size`, the sequences of a microbatch in each replica, or `virtual_stage_layers`, the layers of a
        virtual stage of interleaved pipelines. `sequence=0` is tried only if it is asked for.

    Returns:
      Setting -> value; for settings with named values their index.

    Raises:
      ConfigError: a setting or a value is unknown, or a setting has two values.
    """
    found: dict[str, int] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = map(str.strip, part.partition("="))
        known = (*_COLUMNS, MICROBATCH_SIZE, VIRTUAL_STAGE_LAYERS)
        if name not in known:
            raise ConfigError(f"--only {part!r}: there is no setting {name!r}; {nearest(name, known)}")
        if name in found:
            raise ConfigError(f"--only {text!r} has {name} twice, and a search tries a single value; leave one out.")
        named = _NAMED.get(name)
        if named is None and not value.isdecimal():
            raise ConfigError(f"--only {part!r}: {name} needs a whole number, such as {name}=1.")
        if named is not None and value not in named:
            raise ConfigError(f"--only {part!r}: {name} must be one of {', '.join(named)}.")
        found[name] = int(value) if named is None else named.index(value)
    return found


def enumerate_layouts(
    config: RunConfig,
    devices: int,
    remats: Sequence[str] = ON_DEVICE,
    recipes: Sequence[str] | None = None,
    only: Mapping[str, int] | None = None,
) -> tuple[LayoutTable, collections.Counter[str]]:
    """Return all layouts of a configuration that the trainer accepts, and how many layouts each rule refuses.

    Args:
      config: model, batch and settings; its degrees are replaced. The vocabulary must be set.
      devices: product of the degrees.
      remats: policies of `model.remat` to try.
      recipes: values of `precision.fp8` to try; default: the configuration's.
      only: restrictions by `parse_restrictions`; layouts with other degrees are not enumerated at all, those with
        other settings are counted as refused.

    Returns:
      The layouts, and the number of refused ones by rule (its message without values).
    """
    only = only or {}
    remats = (REMATS[only["remat"]],) if "remat" in only else remats
    recipes = (RECIPES[only["fp8"]],) if "fp8" in only else recipes or (config.precision.fp8,)
    refused: collections.Counter[str] = collections.Counter()
    rows: list[tuple[float, ...]] = []
    for numbers in factorizations(devices, len(AXES)):
        degrees: dict[str, int] = dict(zip(AXES, numbers, strict=True))
        if any(degrees[axis] != only.get(axis, degrees[axis]) for axis in AXES):
            continue
        for parallel in _variants(config, degrees, only, refused):
            train = config.train.model_copy(update={"gradient_accumulation": 1})
            problems = config.model_copy(update={"parallel": parallel, "train": train}).layout_problems()
            if problems:
                refused[_without_values(problems[0])] += 1
            else:
                rows.extend(_rows(parallel, config, remats, recipes))
    table = np.array(rows, float).reshape(-1, len(_COLUMNS))
    found = LayoutTable({name: table[:, index] for index, name in enumerate(_COLUMNS)})
    return _select_only(found, config, only, refused), refused


def _select_only(
    layouts: LayoutTable, config: RunConfig, only: Mapping[str, int], refused: collections.Counter[str]
) -> LayoutTable:
    """Return the layouts with the values of `only`; count the others in `refused`."""
    for name, value in only.items():
        shown = _NAMED[name][value] if name in _NAMED else value
        if name == MICROBATCH_SIZE:
            fits = microbatch_size(layouts, config) == value
        elif name == VIRTUAL_STAGE_LAYERS:
            stages = layouts["pipeline"] * layouts["chunks"]
            fits = (layouts["pipeline"] == 1) | (stages * value == config.model.num_layers)
        else:
            fits = layouts[name] == value
        refused.update({f"{name} other than {shown}": int((~fits).sum())} if not fits.all() else {})
        layouts = layouts.select(fits)
    return layouts


def microbatch_size(layouts: LayoutTable, config: RunConfig) -> Floats:
    """Return the number of sequences of a microbatch in each replica, for each layout."""
    rows = layouts["data"] * layouts["fsdp"] * layouts["expert"] * layouts["microbatches"]
    return config.train.global_batch_size / rows


def _variants(
    config: RunConfig, degrees: dict[str, int], only: Mapping[str, int], refused: collections.Counter[str]
) -> Iterator[ParallelConfig]:
    """Yield a ParallelConfig with these degrees for each pipeline schedule; count the invalid ones in `refused`."""
    base = _with_degrees(config.parallel, degrees) | {"sequence": degrees["tensor"] > 1 and only.get("sequence") != 0}
    for schedule in SCHEDULES[1:] if degrees["pipeline"] > 1 else (None,):
        for chunks in _virtual_stages(config, degrees["pipeline"], only) if schedule == "interleaved" else (None,):
            tree = base | {"pipeline_schedule": schedule, "pipeline_virtual_stages": chunks}
            try:
                yield ParallelConfig.model_validate(tree)
            except ValidationError as error:
                refused[_without_values(error.errors()[0]["msg"].removeprefix("Value error, "))] += 1


def _virtual_stages(config: RunConfig, stages: int, only: Mapping[str, int]) -> list[int]:
    """Return the numbers of virtual stages to try: those asked for, or 2 and what gives no device more layers."""
    layers = config.model.num_layers
    if VIRTUAL_STAGE_LAYERS in only and "chunks" not in only:
        chunks = layers // (stages * max(only[VIRTUAL_STAGE_LAYERS], 1))
        return [chunks] if chunks > 1 else []
    chosen = only.get("chunks", config.parallel.pipeline_virtual_stages or 1)
    if chosen > 1:
        return [chosen]

    def on_a_device(chunks: int) -> int:
        return math.ceil(layers / (stages * chunks)) * chunks

    return [2, *(n for n in _MORE_VIRTUAL_STAGES if stages * n <= layers and on_a_device(n) <= on_a_device(2))]


def _with_degrees(base: ParallelConfig, degrees: dict[str, int]) -> dict[str, Any]:
    """Return the fields of `base` with new degrees, and with defaults for the fields that depend on the degrees."""
    dependent = {
        "auto": False,
        "zero": 0,
        "sequence": False,
        "microbatches": None,
        "pipeline_schedule": None,
        "pipeline_virtual_stages": None,
        "prefetch": base.prefetch and degrees["pipeline"] == 1,
        "context_method": base.context_method if degrees["context"] > 1 else "auto",
    }
    return base.model_dump() | degrees | dependent


def _rows(
    parallel: ParallelConfig, config: RunConfig, remats: Sequence[str], recipes: Sequence[str]
) -> Iterator[tuple[float, ...]]:
    """Yield a row of the layout table for each ZeRO stage, number of microbatches, remat policy and FP8 recipe."""
    schedule = SCHEDULES.index(parallel.schedule) if parallel.pipeline > 1 else 0
    zeros = (0, 1, 2) if parallel.data > 1 else (0,)
    counts = fitting_microbatches(parallel, config.train.global_batch_size)
    policies = [REMATS.index(name) for name in remats]
    fp8 = [RECIPES.index(name) for name in recipes]
    for choice in itertools.product(
        (parallel.sequence,), zeros, (schedule,), (parallel.virtual_stages,), counts, policies, fp8
    ):
        yield (*parallel.degrees.values(), *choice)


def _without_values(message: str) -> str:
    """Return an error message with its values removed, so that violations of one rule are counted together."""
    rule = re.split(r"[;.:] |, because", message)[0]
    # `2 x context` is part of a rule and stays; numbers such as `4 / 2 rows` are values.
    return re.sub(r"\s*\([^)]*\)|\s+-?\d+(?:\s*/\s*-?\d+)?\b(?! x )", "", rule).strip()


def count_tokens(config: RunConfig) -> int:
    """Return the number of tokens of a train step, of preferences those of all sequences of a pair."""
    sequences = 1 if config.preference.loss is None else config.preference.method.rows
    return config.train.global_batch_size * sequences * config.train.sequence_length
