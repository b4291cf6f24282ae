"""Formats the result of a layout search as text: ranked layouts, memory of the best one, budget, refused layouts."""

from collections.abc import Mapping, Sequence

from jaxstack.observe.number_format import byte_size, short_number
from jaxstack.plan.forecast import Forecast, TrainingBudget, training_budget
from jaxstack.plan.rehearsal import Rehearsal
from jaxstack.plan.search import SearchResult, describe_degrees

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
