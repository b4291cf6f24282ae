"""The tables and pictures of docs/tuning.md and docs/optimizers.md."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from benchmarks.picture import Panel, draw
from benchmarks.tuning.optimizers import mean_curve, summarize
from jaxstack.tune.coordinate_check import PARAMETRIZATIONS, QUANTITIES, CoordinateCheckResult
from jaxstack.tune.coordinate_check import draw as draw_coordinates
from scripts.pages.page import Page, table
from scripts.pages.rows import RESULTS, Row, read_all, read_rows

WORKS = {"optimizers": "small", "optimizers large": "gpt2-124m"}
"""Part of the page -> work of benchmarks/tuning/optimizers.py, as it is without other settings."""
DRAWN = ("adamw", "muon", "soap", "lion", "sophia", "schedule_free_adamw")
SAMPLERS = ("tpe", "gp", "random")
COUNTS = (10, 20, 30)


def source(rows: Iterable[Row]) -> str:
    """Return a sentence about the rows: the device, and each command with the date and the commit of its newest row."""
    rows = sorted(rows, key=lambda row: row["date"])
    newest = {row["command"]: row for row in rows}
    runs = [f"`{command}`, {measured([row])}" for command, row in newest.items()]
    return f"{rows[-1]['device']}; {'; '.join(runs)}."


def measured(rows: Iterable[Row]) -> str:
    """Return the dates and the commits at which rows were measured."""
    places = dict.fromkeys((row["date"][:10], row["commit"][:7]) for row in rows)
    return ", ".join(f"{date} at {commit}" for date, commit in places)


def read_runs(work: str, results: Path = RESULTS) -> list[Row]:
    """Return the rows of each optimizer's newest search at a work of the benchmark `optimizers`, on one device.

    The device is that of the newest row. A search has each learning rate and seed once: a row that comes again begins
    another one.
    """
    rows = [row for row in read_all(results / "optimizers.jsonl") if row["work"] == work]
    searches: dict[str, dict[tuple[int, int], Row]] = {}
    for row in (row for row in rows if row["device"] == rows[-1]["device"]):
        runs = searches.setdefault(row["optimizer"], {})
        key = (row["power"], row["seed"])
        if key in runs:
            runs.clear()
        runs[key] = row
    return [row for runs in searches.values() for row in runs.values()]


def read_studies(results: Path = RESULTS) -> dict[tuple[str, int], dict[str, Row]]:
    """Return (run, seed) -> sampler -> row of the benchmark `tune_search`, of the runs that stored every trial's best.

    Older runs are left out: the samplers' settings were chosen on their seeds. Of a sampler and a seed the newest study
    counts.
    """
    studies: dict[tuple[str, int], dict[str, Row]] = {}
    for row in (row for row in read_all(results / "tune_search.jsonl") if "bests" in row):
        for (run, seed), study in studies.items():
            if row["sampler"] != "random" and seed == row["seed"] and run != row["run"]:
                study.pop(row["sampler"], None)
        studies.setdefault((row["run"], row["seed"]), {})[row["sampler"]] = row
    return {key: study for key, study in studies.items() if len(study) > 1}


# --- docs/optimizers.md ----------------------------------------------------------------------------------------------


def optimizers(work: str) -> str:
    """Return the table of the optimizers at a work."""
    runs = read_runs(work)
    found = summarize(runs)
    if not found:
        return f"Not measured yet; `python benchmarks/tuning/optimizers.py --work {work}` measures it."
    base = found[0]
    timed = "processor time" if base["device"] == "cpu" else "time"
    titles = ["", "learning rate", "loss", "held-out loss", "steps to AdamW's loss", f"{timed} to it",
              f"{timed} a step", "state, bytes a parameter", "measured"]  # fmt: skip
    lines = []
    for row in found:
        lines.append([
            f"`{row['optimizer']}`",
            _power(row["rate"]) + " (edge)" * row["edge"],
            f"{row['final_loss']:.3f}" + (f" ± {row['spread']:.3f}" if row["spread"] is not None else ""),
            f"{row['eval_loss']:.3f}",
            f"{row['steps_to_loss']:.0f} ({row['steps_to_loss'] / row['steps']:.0%})" if row["steps_to_loss"] else "–",
            f"{row['seconds_to_loss'] / base['seconds_to_loss']:.2f}" if row["steps_to_loss"] else "–",
            f"{row['milliseconds'] / base['milliseconds']:.2f}",
            f"{row['state_bytes'] / row['parameters']:.1f}",
            measured(run for run in runs if run["optimizer"] == row["optimizer"]),
        ])  # fmt: skip
    about = (
        f"{base['parameters'] / 1e6:.3g} million parameters, {base['steps']:.0f} steps, {base['tokens'] / 1e6:.3g} "
        f"million tokens; {timed} relative to AdamW's ({base['seconds_to_loss']:.1f} s, {base['milliseconds']:.1f} ms "
        f"a step); {source(runs)}"
    )
    drawn = ["![Training loss of optimizers](pictures/optimizers.svg)", ""] if work == "small" else []
    return "\n".join([*drawn, table(titles, lines), "", about])


def _power(rate: float) -> str:
    """Return a power of two as 2^k."""
    return f"2^{round(math.log2(rate))}"


def coordinates(rows: Sequence[Row]) -> str:
    """Return the table of the coordinate check: growth from the smallest width to the largest."""
    if not rows:
        return "`python benchmarks/tuning/coordinates.py` measures it."
    lines = []
    for row in rows:
        ends = [f"{row[quantity][0]:.3g} to {row[quantity][-1]:.3g}" for quantity in QUANTITIES]
        widths = f"{row['widths'][0]} to {row['widths'][-1]}"
        lines.append([f"`{row['optimizer']}`", widths, _named(row), *ends, measured([row])])
    titles = ["optimizer", "widths", "parametrization", "embeddings", "residual stream", "logits", "measured"]
    return "\n".join([table(titles, lines), "", f"Mean magnitude after {rows[-1]['steps']} steps; {source(rows)}"])


def _named(row: Row) -> str:
    return "muP" if row["parametrization"] == "mup" else row["parametrization"]


def transfers(rows: Sequence[Row]) -> str:
    """Return the table of the best learning rate at each width."""
    if not rows:
        return "`python benchmarks/tuning/transfer.py` measures it."
    drawn = "![Loss over the learning rate at the widths, standard and muP](pictures/transfer.svg)"
    head = ("parametrization", "width", "best learning rate", "its loss", "loss at 2^-8", "measured")
    lines = []
    for row in rows:
        best = row["losses"][str(row["best"])]
        at = row["losses"]["8"]
        lines.append([_named(row), str(row["width"]), f"2^-{row['best']}", f"{best:.3f}",
                      str(at if at is None else format(at, ".3f")), measured([row])])  # fmt: skip
    spent = sum(row["cpu_seconds"] for row in rows)
    about = f"{rows[-1]['steps']} steps, {spent:.0f} s of processor time in all; {source(rows)}"
    return "\n\n".join([drawn, table(head, lines), about])


# --- docs/tuning.md --------------------------------------------------------------------------------------------------


def samplers(studies: Mapping[tuple[str, int], Mapping[str, Row]]) -> str:
    """Return the comparison of samplers in words and as a table."""
    if not studies:
        return "Not measured yet; `python benchmarks/tuning/tune_search.py` measures it."
    compared = [sampler for sampler in SAMPLERS[:-1] if _studies_with(sampler, studies)]
    lines = [
        *(_against_random(sampler, _studies_with(sampler, studies)) for sampler in compared),
        "",
        f"| sampler, mean of the best loss | {' | '.join(f'after {count} trials' for count in COUNTS)} |",
        "|---|" + "---|" * len(COUNTS),
    ]
    for sampler in compared:
        same = _studies_with(sampler, studies)
        for name in (sampler, "random"):
            means = [mean(study[name][f"loss_at_{count}"] for study in same) for count in COUNTS]
            label = f"`{name}`" + f", at the {len(same)} seeds of `{sampler}`" * (name == "random")
            lines.append(f"| {label} | {' | '.join(f'{loss:.3f}' for loss in means)} |")
    rows = [row for study in studies.values() for row in study.values()]
    drawn = "![Best loss so far over the trials of a study](pictures/study.svg)"
    return "\n".join([*lines, "", source(rows), "", drawn])


def _studies_with(sampler: str, studies: Mapping[tuple[str, int], Mapping[str, Row]]) -> list[Mapping[str, Row]]:
    """Return the studies of a run and seed that a sampler took part in."""
    return [study for study in studies.values() if sampler in study]


def _against_random(sampler: str, studies: Sequence[Mapping[str, Row]]) -> str:
    """Return a sentence about a sampler's best loss against random search's with the same seeds."""
    found = _gains(sampler, studies)
    tied = f", and the same at {found['ties']}," if found["ties"] else ""
    return (
        f"`{sampler}` found a lower held-out loss than random search at {found['wins']} of {found['seeds']} "
        f"seeds{tied} after {COUNTS[-1]} trials; the mean difference is {found['gain']:.3f} with a standard error of "
        f"{found['error']:.3f}."
    )


def _gains(sampler: str, studies: Sequence[Mapping[str, Row]]) -> dict[str, float]:
    """Return how a sampler's best losses after all trials compare with random search's at the same seeds.

    `gain` is the mean difference, above 0 where the sampler's losses are lower, `error` its standard error.
    """
    last = f"loss_at_{COUNTS[-1]}"
    gains = [study["random"][last] - study[sampler][last] for study in studies]
    error = stdev(gains) / len(gains) ** 0.5
    counts = {"seeds": len(gains), "wins": sum(gain > 0 for gain in gains), "ties": sum(gain == 0 for gain in gains)}
    return {**counts, "gain": mean(gains), "error": error, "errors": mean(gains) / error}


def search_rows(results: Path = RESULTS) -> list[Row]:
    """Return a row for each sampler beside random search: `_gains` over all seeds, with the place of its oldest row."""
    studies = read_studies(results)
    found = []
    for sampler in SAMPLERS[:-1]:
        same = _studies_with(sampler, studies)
        oldest = min((study[sampler] for study in same), key=lambda row: row["date"], default=None)
        if oldest is not None:
            found.append({**oldest, **_gains(sampler, same)})
    return found


def optimizer_rows(results: Path = RESULTS) -> list[Row]:
    """Return a row for each optimizer at each work: the means over its seeds, with the place of its newest row.

    `steps_ratio` is the number of its steps to AdamW's loss over AdamW's; None where it does not reach that loss.
    """
    found = []
    for work in WORKS.values():
        runs = read_runs(work, results)
        for row in summarize(runs):
            newest = [run for run in runs if run["optimizer"] == row["optimizer"]][-1]
            ratio = row["steps_to_loss"] / row["steps"] if row["steps_to_loss"] else None
            steps = f"{ratio:.0%} of AdamW's steps to its loss" if ratio else "AdamW's loss is not reached"
            found.append({**newest, **row, "work": work, "steps_ratio": ratio, "steps_in_words": steps})
    return found


# --- both ------------------------------------------------------------------------------------------------------------


def make_pictures() -> dict[str, str]:
    """Return file name -> SVG of everything that has rows."""
    drawn: dict[str, str] = {}
    studies = read_studies()
    if studies:
        curves = {
            name: _mean_bests([study[name] for study in _studies_with("tpe", studies)]) for name in ("tpe", "random")
        }
        drawn["study.svg"] = draw(
            [Panel(f"Best held-out loss so far, mean of {len(studies)} studies", "trials", curves)], "Studies"
        )
    if rows := read_rows(RESULTS / "transfer.jsonl"):
        drawn["transfer.svg"] = draw([_transfer_panel(kind, rows) for kind in PARAMETRIZATIONS], "Learning rates")
    checks = [row for row in read_rows(RESULTS / "coordinates.jsonl") if row["optimizer"] == "adamw"]
    if checks:
        values = {(row["parametrization"], quantity): tuple(row[quantity]) for row in checks for quantity in QUANTITIES}
        drawn["coordinates.svg"] = draw_coordinates(
            CoordinateCheckResult(tuple(checks[0]["widths"]), checks[0]["steps"], values)
        )
    again = [row for row in read_runs("small") if row["seed"]]
    if again:
        runs = {name: [row for row in again if row["optimizer"] == name] for name in DRAWN}
        lines = {n: [(p["step"], p["loss"]) for p in mean_curve(r) if p["step"] > 50] for n, r in runs.items() if r}
        drawn["optimizers.svg"] = draw([Panel("Training loss, mean of three seeds", "steps", lines)], "Optimizers")
    return drawn


def _mean_bests(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Return (trial, mean of the best losses so far), from the trial on at which every study has one."""
    trials = enumerate(zip(*(row["bests"] for row in rows), strict=True), 1)
    return [(number, mean(losses)) for number, losses in trials if None not in losses]


def _transfer_panel(parametrization: str, rows: Iterable[Row]) -> Panel:
    curves = {}
    for row in rows:
        if row["parametrization"] == parametrization and row["optimizer"] == "adamw":
            points = ((-int(k), loss) for k, loss in row["losses"].items() if loss is not None)
            curves[f"width {row['width']}"] = sorted(points)
    name = "muP" if parametrization == "mup" else "Standard"
    return Panel(f"{name}: loss over learning rate", "log2 of the learning rate", curves)


OPTIMIZERS = {
    "coordinates": lambda: coordinates(read_rows(RESULTS / "coordinates.jsonl")),
    "transfer": lambda: transfers([r for r in read_rows(RESULTS / "transfer.jsonl") if r["optimizer"] == "adamw"]),
} | {part: functools.partial(optimizers, work) for part, work in WORKS.items()}
PAGES = (
    Page("tuning.md", {"samplers": lambda: samplers(read_studies())}, make_pictures),
    Page("optimizers.md", OPTIMIZERS),
)
