"""The tables of docs/compression_cache.md: the bytes and the perplexity of each format of the cache and of weights."""

import functools
from collections.abc import Iterable

from scripts.pages.page import Cell, Page, table_of
from scripts.pages.rows import RESULTS, Row, read_newest_run


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


def table(part: str, rows: Iterable[Row]) -> str:
    """Return the table of one part of the page."""
    work, ratio, title, last = PARTS[part]
    rows = [row for row in rows if row["work"] == work]
    columns = {"format": "{format}", "bits a value": "{bits_per_value:.3f}", ratio: "{ratio:.3f}",
               "perplexity": "{perplexity:.3f}", "change": "{change_percent:+.2f} %", title: last}  # fmt: skip
    about = "{date:.10}, commit {commit:.7}, {device}, `{command}`.".format_map(rows[0])
    return f"{table_of(columns, rows)}\n\n{about}"


def part(name: str) -> str:
    """Return the table of a part, from the stored rows."""
    return table(name, read_newest_run(RESULTS / "cache_formats.jsonl"))


PAGES = (Page("compression_cache.md", {name: functools.partial(part, name) for name in PARTS}),)
