"""The command `jaxstack plan --cluster`: rank a run's layouts on a cluster, and write the best as a configuration."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxstack.config.loader import dump_yaml
from jaxstack.cost_model.cluster import parse_cluster
from jaxstack.cost_model.forecast import CHINCHILLA_TOKENS, Forecast, TrainingBudget, compute_optimal, training_budget
from jaxstack.cost_model.layouts import parse_restrictions
from jaxstack.cost_model.search import SearchResult, describe_degrees, faster_part, search_layouts
from jaxstack.errors import ConfigError, cannot_write
from jaxstack.files import write_file
from jaxstack.models import count_parameters, model_flops_per_token
from jaxstack.observe.number_format import byte_size, short_number
from jaxstack.parallel.config import AXES
from jaxstack.plan.rehearsal import Rehearsal, rehearse, resolve_vocabulary
from jaxstack.plan.tensor_first import tensor_first_layout
from jaxstack.run_config import RunConfig, load_config

FP8_RECIPES = ("none", "delayed", "current")
"""Values of `precision.fp8` that `--fp8` tries."""

_MOST_TOKENS = 1e18
"""Limit of --tokens, ten thousand times more than any published training."""
_SLOWER = 1.1
"""Step time of the policy tensor-first, relative to the fastest layout, above which a warning names that one."""
_ONE_DEVICE = (
    *(f"parallel.{axis}=1" for axis in AXES),
    *("parallel.zero=0", "parallel.sequence=false", "parallel.context_method=auto", "train.gradient_accumulation=1"),
    *(f"parallel.{name}=null" for name in ("microbatches", "pipeline_schedule", "pipeline_virtual_stages")),
)
"""Overrides that select the layout of a single device."""


@dataclasses.dataclass(frozen=True)
class SearchOptions:
    """Command-line options of `jaxstack plan --cluster`.

    Attributes:
      cluster: text for `parse_cluster`.
      top: number of layouts to show.
      tokens: number of tokens to train on, `chinchilla`, or None.
      policy: `fastest` or `tensor-first`.
      only: text for `parse_restrictions`: settings of which a single value is tried; None: no restriction.
      price: price of one GPU for an hour; None: the cluster's.
      max_days: limit of the days that `tokens` may take; None: no limit.
      max_cost: limit of their cost; None: no limit.
      fp8: True tries FP8 recipes too, which change the numerics.
      verify: number of layouts to compile for their memory.
      output: file that the best layout's configuration is written to; None: none.
    """

    cluster: str
    top: int = 10
    tokens: str | None = None
    policy: str = "fastest"
    only: str | None = None
    price: float | None = None
    max_days: float | None = None
    max_cost: float | None = None
    fp8: bool = False
    verify: int = 0
    output: str | None = None


@dataclasses.dataclass(frozen=True)
class ClusterSearch:
    """Result of a layout search on a cluster, with the compiler-reported memory of the top-ranked layouts.

    Attributes:
      found: the ranked layouts.
      tokens: number of tokens to train on, or None.
      verified: compiled memory of the first layouts.
      notes: lines for people.
    """

    found: SearchResult
    tokens: float | None
    verified: list[Rehearsal]
    notes: list[str]

    def draw(self) -> str:
        """Format the result of the search as text for a terminal."""
        return draw_search(self.found, tokens=self.tokens, verified=self.verified, notes=self.notes)

    def describe(self) -> dict[str, object]:
        """Return the result of the search as plain JSON."""
        layouts = [
            {"layout": describe_degrees(one.config), **one.describe(), **self._budget(one)}
            for one in self.found.forecasts
        ]
        return {
            "tried": self.found.tried,
            "fitting": self.found.fitting,
            "search_seconds": self.found.seconds,
            "notes": self.notes,
            "refused": dict(self.found.refused),
            "layouts": layouts,
            "rehearsals": list(self.verified),
        }

    def _budget(self, one: Forecast) -> dict[str, object]:
        return {} if self.tokens is None else {"budget": dataclasses.asdict(training_budget(one, self.tokens))}


def search_cluster(config: RunConfig, options: SearchOptions) -> ClusterSearch:
    """Search for the fastest parallel layouts of a configuration on a cluster, as `jaxstack plan --cluster` does.

    Raises:
      ConfigError: an option, the cluster or the budget is wrong, or no layout fits.
    """
    cluster = parse_cluster(options.cluster)
    if options.price is not None:
        cluster = cluster.model_copy(update={"price_per_gpu_hour": options.price})
    model, assumed = resolve_vocabulary(config)
    known = config.model_copy(update={"model": model})
    tokens = parse_tokens(options.tokens, known)
    notes = []
    if assumed:
        notes.append("(assuming the vocabulary of the tokenizer that the run would train)")
    recipes = tuple(dict.fromkeys((config.precision.fp8, *FP8_RECIPES))) if options.fp8 else None
    only = parse_restrictions(options.only or "")
    if (options.fp8 or only.get("fp8")) and cluster.peak_tflops.float8 is None:
        asked = "--fp8" if options.fp8 else "--only fp8"
        raise ConfigError(
            f"{asked} needs FP8 tensor cores, which {cluster.name} does not have (peak_tflops.float8); leave it out."
        )
    if known.precision.fp8 != "none" and "fp8" not in only and cluster.peak_tflops.float8 is None:
        notes.append(
            f"{cluster.name} has no FP8 tensor cores: precision.fp8={known.precision.fp8} is forecast at its bfloat16 "
            "rate"
        )
    found = search_layouts(known, cluster, top=options.top, recipes=recipes, only=only)
    if options.policy == "tensor-first":
        fastest = found.best
        found = dataclasses.replace(found, forecasts=[tensor_first_layout(known, cluster, only)])
        notes.append("policy tensor-first: the smallest tensor x pipeline that fits")
        if found.best.step_seconds > _SLOWER * fastest.step_seconds:
            notes.append(
                f"warning: policy fastest takes {1e3 * fastest.step_seconds:,.1f} ms a step instead of "
                f"{1e3 * found.best.step_seconds:,.1f} ms, with {describe_degrees(fastest.config)}"
            )
    elif recipes is None and not only and (fewer := faster_part(known, found.best)) is not None:
        notes.append(
            f"{fewer.cluster.title} would be faster: {1e3 * fewer.step_seconds:,.1f} ms a step with "
            f"{describe_degrees(fewer.config)}; raise train.global_batch_size to use them all"
        )
    notes += _check_budget(found.best, tokens, options)
    if options.verify and cluster.name != "H200":
        raise ConfigError(f"--verify compiles for H200s only, and the cluster has {cluster.name}; leave it out.")
    if options.output is not None and not Path(options.output).parent.is_dir():
        # Before the compilation of layouts, which takes minutes.
        raise ConfigError(f"--output {options.output}: the directory {Path(options.output).parent} does not exist.")
    count = min(options.verify, len(found.forecasts))
    verified = [rehearse(one.config, cluster.devices) for one in found.forecasts[:count]]
    if options.output is not None:
        # A layout whose compiled memory does not fit is left out, if one that was compiled does fit.
        compiled = zip(found.forecasts, verified, strict=False)
        written = next((one for one, rehearsal in compiled if rehearsal["fits"]), found.best)
        name = "the first layout" if written is found.best else describe_degrees(written.config)
        write_configuration(written, config, options.output)
        notes.append(f"wrote {name} to {options.output}: python -m jaxstack.train --config {options.output}")
    return ClusterSearch(found, tokens, verified, notes)


def load_search_config(path: str | None, overrides: Sequence[str]) -> RunConfig:
    """Load the configuration of a layout search. Its own layout, which the search replaces, may be impossible.

    Raises:
      ConfigError: the file or another value is wrong.
    """
    try:
        return load_config(path, overrides)
    except ConfigError as error:
        try:
            config = load_config(path, [*overrides, *_ONE_DEVICE], report=lambda note: None)
        except ConfigError:
            raise error from None
    parallel = config.parallel.model_copy(update={"pipeline_virtual_stages": _virtual_stages(path, overrides)})
    return config.model_copy(update={"parallel": parallel})


def _virtual_stages(path: str | None, overrides: Sequence[str]) -> int | None:
    """Return the number of virtual stages that a configuration sets, whose other keys of the layout may not fit."""
    virtual = "parallel.pipeline_virtual_stages=null"
    two = [override for override in _ONE_DEVICE if override not in ("parallel.pipeline=1", virtual)]
    try:
        loaded = load_config(path, [*overrides, *two, "parallel.pipeline=2"], report=lambda note: None)
    except ConfigError:
        return None
    return loaded.parallel.pipeline_virtual_stages


def parse_tokens(text: str | None, config: RunConfig) -> float | None:
    """Parse a number of training tokens: a number, or `chinchilla` for 20 per parameter of the model.

    Raises:
      ConfigError: the text is neither.
    """
    if text is None:
        return None
    if text == "chinchilla":
        return float(CHINCHILLA_TOKENS * count_parameters(config.model).total)
    try:
        tokens = float(text)
    except ValueError:
        tokens = 0.0
    if not 1 <= tokens < _MOST_TOKENS:
        raise ConfigError(
            f"--tokens must be a number from 1 to {_MOST_TOKENS:g}, such as 3e11, or chinchilla (20 per parameter); "
            f"found {text!r}."
        )
    return tokens


def _check_budget(best: Forecast, tokens: float | None, options: SearchOptions) -> list[str]:
    """Return notes on what the user's limits of time and cost allow; raise ConfigError if training exceeds a limit.

    Raises:
      ConfigError: the tokens take longer or cost more than the limits; the message says what the limits allow.
    """
    limits = {"--max-days": options.max_days, "--max-cost": options.max_cost}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    if not given:
        return []
    if tokens is None:
        raise ConfigError(f"{' and '.join(given)} limits the training on --tokens, which is missing; add --tokens.")
    budget = training_budget(best, tokens)
    if options.max_cost is not None and budget.cost is None:
        raise ConfigError("--max-cost needs a price: add --price, or price_per_gpu_hour to the cluster's file.")
    needed = {"--max-days": budget.days, "--max-cost": budget.cost or 0.0}
    shares = {name: limit / needed[name] for name, limit in given.items()}
    tightest = min(shares, key=lambda name: shares[name])
    share = shares[tightest]
    flops = model_flops_per_token(best.config.model, best.config.train.sequence_length) * tokens * share
    parameters, optimum = compute_optimal(flops)
    advice = (
        f"the limit allows {short_number(tokens * share)} tokens of this model, or best a model of "
        f"{short_number(parameters)} parameters on {short_number(optimum)} tokens (Chinchilla)"
    )
    if share >= 1:
        return [f"within {tightest} {short_number(given[tightest])}: {advice}"]
    more = "" if tightest == "--max-cost" else f"; about {short_number(best.devices / share)} such GPUs would do"
    raise ConfigError(
        f"{short_number(tokens)} tokens take {short_number(budget.days)} days"
        + (f" and cost {budget.cost:,.0f}" if budget.cost is not None else "")
        + f" with the fastest layout ({describe_degrees(best.config)}), more than {tightest} "
        f"{short_number(given[tightest])}: {advice}{more}."
    )


def write_configuration(best: Forecast, config: RunConfig, path: str) -> None:
    """Write a configuration file with the layout of a forecast; the vocabulary size stays as in `config`, set or not.

    `parallel.simulate_devices` is left out, because the layout is that of the cluster's devices.

    Raises:
      ConfigError: the file cannot be written.
    """
    model = best.config.model.model_copy(update={"vocab_size": config.model.vocab_size})
    parallel = best.config.parallel.model_copy(update={"simulate_devices": None})
    written = best.config.model_copy(update={"model": model, "parallel": parallel})
    text = (
        f"# {describe_degrees(best.config)} on {best.cluster.title}, chosen by `jaxstack plan`.\n"
        f"# Predicted: {best.step_seconds:.3f} s a step, {best.tokens_per_second:,.0f} tokens/s, "
        f"{best.memory_bytes / 2**30:.1f} GiB on each GPU.\n"
    )
    try:
        write_file(
            Path(path),
            (text + dump_yaml(written)).encode(),
        )
    except OSError as error:
        raise cannot_write(f"--output {path}", error) from None


_TIME_TITLES = {
    "matmul": "matmul",
    "attention": "attn",
    "elementwise": "elem",
    "exposed_communication": "comm",
    "bubble": "bubble",
}
"""Part of the time -> title of its column."""


def draw_search(
    found: SearchResult, *, tokens: float | None = None, verified: Sequence[Rehearsal] = (), notes: Sequence[str] = ()
) -> str:
    """Format the result of a layout search as text for a terminal.

    Args:
      found: result of `search_layouts`.
      tokens: number of tokens to train on; adds days, cost and energy.
      verified: compiled memory of the first layouts.
      notes: lines under the title.
    """
    best = found.best
    lines = [
        f"{best.config.run.name} on {best.cluster.title}: {found.fitting:,} of {found.tried:,} possible layouts fit, "
        f"found in {found.seconds:.1f} s",
        *notes,
        "",
        *draw_forecasts(found.forecasts, tokens=tokens, verified=verified),
        "",
        f"memory of the first on each GPU, of {byte_size(best.cluster.memory_bytes)}",
        *align([[name.replace("_", " "), byte_size(size)] for name, size in _largest(best.memory)]),
    ]
    if tokens is not None:
        lines += ["", *draw_budget(training_budget(best, tokens))]
    if found.refused:
        lines += ["", "refused layouts, by the first rule or the largest part of the memory"]
        lines += align([[f"{count:,}", rule] for rule, count in found.refused.most_common(8)])
    return "\n".join(lines)


def draw_forecasts(
    forecasts: Sequence[Forecast], *, tokens: float | None = None, verified: Sequence[Rehearsal] = ()
) -> list[str]:
    """Format forecasts of layouts as a table, one line of text per layout."""
    rows = [dict(_cells(index + 1, forecast, tokens)) for index, forecast in enumerate(forecasts)]
    for row, rehearsal in zip(rows, verified, strict=False):
        row["compiled"] = byte_size(rehearsal["predicted_bytes"]) + ("" if rehearsal["fits"] else " (does not fit)")
    titles = list(dict.fromkeys(title for row in rows for title in row))
    return align([titles, *([row.get(title, "") for title in titles] for row in rows)])


def _cells(rank: int, forecast: Forecast, tokens: float | None) -> list[tuple[str, str]]:
    """Return (column title, text) of each cell of a layout's line in the table."""
    cells = [
        ("#", str(rank)),
        ("layout", describe_degrees(forecast.config)),
        ("memory", byte_size(forecast.memory_bytes)),
        ("step ms", _milliseconds(forecast.step_seconds)),
        *((title, _milliseconds(forecast.seconds[part])) for part, title in _TIME_TITLES.items()),
        ("tokens/s/GPU", f"{forecast.tokens_per_second / forecast.devices:,.0f}"),
        ("MFU %", f"{100 * forecast.mfu:.1f}"),
    ]
    if tokens is not None:
        budget = training_budget(forecast, tokens)
        cells += [("days", short_number(budget.days))]
        cells += [("cost", f"{budget.cost:,.0f}")] if budget.cost is not None else []
        cells += [("MWh", short_number(budget.kilowatt_hours / 1000))]
    return cells


def draw_budget(budget: TrainingBudget) -> list[str]:
    """Format time, cost and energy of training as one line."""
    cost = f", {budget.cost:,.0f} at the cluster's price" if budget.cost is not None else ""
    return [
        f"{short_number(budget.tokens)} tokens with the first: {short_number(budget.days)} days, "
        f"{short_number(budget.gpu_hours)} GPU-hours{cost}, {short_number(budget.kilowatt_hours / 1000)} MWh"
    ]


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines with aligned columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _largest(memory: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(((name, size) for name, size in memory.items() if size), key=lambda part: -part[1])


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.01 else f"{1e3 * seconds:.2f}"
