"""The tables of docs/compression_cache.md: the bytes and the perplexity of each format of the cache and of weights."""

import functools
from collections.abc import Iterable
from pathlib import Path

from scripts.pages.page import Cell, Page, table_of
from scripts.pages.rows import RESULTS, Row, read_all


def meets_claim(row: Row) -> bool:
    """Return True if a cache has at most half of bfloat16's bytes, at a perplexity of at most 1 % more."""
    return row["ratio"] >= 2 and row["change_percent"] <= 1


def verdict(row: Row) -> str:
    """Return whether a format meets the claim."""
    return "–" if row["ratio"] == 1 else "met" if meets_claim(row) else "**missed**"


PARTS: dict[str, tuple[str, str, str, Cell]] = {
    "cache": ("cache of keys and values", "bfloat16 / stored", "half the bytes at 1 %", verdict),
    "weights": ("weights", "float32 / stored", "next token right", lambda row: f"{100 * row['accuracy']:.2f} %"),
}
"""Part of the page -> work of its rows, heading of the ratio, and the last column."""


def read_formats(results: Path = RESULTS) -> list[Row]:
    """Return the rows of the newest measurement of each model, in the order of the models' sizes.

    `accuracy_points` is how many percentage points more often the next token is right than with float32 weights, and
    `accuracy_percent` how many percent of their accuracy this is.
    """
    rows = [row for row in read_all(results / "cache_formats.jsonl") if "model" in row]
    newest = {row["model"]: row["run"] for row in rows}
    rows = [row for row in rows if row["run"] == newest[row["model"]]]
    exact = {row["model"]: row["accuracy"] for row in rows if row["format"] == "none (float32)"}
    found = [{**row, **_lost(row["accuracy"], exact[row["model"]])} if "accuracy" in row else row for row in rows]
    return sorted(found, key=lambda row: row["parameters"])


def _lost(accuracy: float, exact: float) -> Row:
    return {"accuracy_points": 100 * (accuracy - exact), "accuracy_percent": 100 * (accuracy / exact - 1)}


MOST_LOST = 0.9
"""Percent of accuracy that the paper of BCT loses at most."""


def bct_losses(rows: Iterable[Row]) -> str:
    """Return what BCT loses, in the paper's measure and in two stricter ones, of each model."""
    weights = [row for row in rows if row["work"] == PARTS["weights"][0]]
    plain = [row for row in weights if row["format"] == "bct; activations and softmax in 8-bit integers"]
    swept = {row["model"]: row for row in weights if row["format"] == "bct, by the sweep of GPTQ"}

    def told(worst: float) -> str:
        return "met" if worst > -MOST_LOST else "**missed**"

    points = min(row["accuracy_points"] for row in plain)
    percent = min(row["accuracy_percent"] for row in plain)
    perplexity = -max(row["change_percent"] for row in plain)
    models = (
        f"a model of {row['parameters']:,} parameters {_lost_by(row)}; calibrated {_lost_by(swept[row['model']])}"
        for row in plain
    )
    return (
        f"The paper loses less than {MOST_LOST} % of accuracy at 8 times fewer bytes. Here this is {told(points)} in "
        f"percentage points of next-token accuracy, {told(percent)} in percent of that accuracy, and "
        f"{told(perplexity)} in perplexity without calibration: {'; '.join(models)}."
    )


def _lost_by(row: Row) -> str:
    return (
        f"{row['accuracy_points']:+.2f} points ({row['accuracy_percent']:+.1f} %), perplexity "
        f"{row['change_percent']:+.1f} %"
    )


def table(part: str, rows: Iterable[Row]) -> str:
    """Return the table of one part of the page for one model."""
    work, ratio, title, last = PARTS[part]
    rows = [row for row in rows if row["work"] == work]
    columns = {"format": "{format}", "bits a value": "{bits_per_value:.3f}", ratio: "{ratio:.3f}",
               "perplexity": "{perplexity:.3f}", "change": "{change_percent:+.2f} %", title: last}  # fmt: skip
    about = (
        "{parameters:,} parameters, {max_tokens:,} held-out tokens; {date:.10}, commit {commit:.7}, {device}, "
        "`{command}`."
    )
    return f"{table_of(columns, rows)}\n\n{about.format_map(rows[0])}"


def part(name: str) -> str:
    """Return the tables of a part, one for each model, from the stored rows."""
    rows = read_formats()
    models = dict.fromkeys(row["model"] for row in rows)
    return "\n\n".join(table(name, [row for row in rows if row["model"] == model]) for model in models)


TABLES = {name: functools.partial(part, name) for name in PARTS}
PAGES = (Page("compression_cache.md", {**TABLES, "bct": lambda: bct_losses(read_formats())}),)
