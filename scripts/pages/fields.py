"""The table, the sections and the pictures of docs/fields.md: claims of examples and what they measure."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.picture import Panel, draw
from scripts.pages import page
from scripts.pages.page import Page, escaped
from scripts.pages.rows import RESULTS, Row, read_rows


def newest_rows(results: Path = RESULTS) -> list[Row]:
    """Return the newest row of each example, in the order of their names."""
    return sorted(read_rows(results / "fields.jsonl"), key=lambda row: row["work"])


def verdict(row: Row) -> str:
    """Return which criteria are missed, if any."""
    missed = [criterion for criterion, met in row["checks"].items() if not met]
    return "**missed**: " + "; ".join(missed) if missed else "met"


def number(value: float | None) -> str:
    """Return a number with three significant digits; a dash for None."""
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def title(row: Row) -> str:
    """Return the name of an example in words."""
    words = str(row["work"]).replace("_", " ")
    return words.upper() if words == "fpga" else words.capitalize()


def table(rows: Iterable[Row]) -> str:
    """Return the table of claims and results."""
    lines = []
    for row in rows:
        name = f"[{title(row)}](examples/fields/{row['work']}.py)"
        source = re.sub(r"^arXiv:(\S+)$", r"[arXiv:\1](https://arxiv.org/abs/\1)", row["paper"])
        numbers = (number(row[key]) for key in ("ours", "baseline", "published"))
        cells = (f"{name}: {row['claim']} ({source})", row["measure"], *numbers, verdict(row))
        lines.append([escaped(cell) for cell in cells])
    return page.table(["claim", "measure", "ours", "baseline", "paper", "verdict"], lines)


def details(rows: Iterable[Row]) -> str:
    """Return a section for each example: its criteria, its further numbers and its picture."""
    parts = []
    for row in rows:
        criteria = "\n".join(f"- {'met' if met else '**missed**'}: {text}" for text, met in row["checks"].items())
        further = "\n".join(f"- {text}: {number(value)}" for text, value in row["numbers"].items())
        drawn = f"![{title(row)}](pictures/field-{row['work'].replace('_', '-')}.svg)\n\n" if row["picture"] else ""
        further += f"\n- bound: {row['bound']}" if "bound" in row else ""
        beside = f" at a load of {row['load']:.1f}" if "load" in row else ""
        parts.append(
            f"## {title(row)}\n\n{drawn}{criteria}\n{further}\n- time: {row['seconds']:.0f} s{beside}, "
            f"{row['date'][:10]}, commit {row['commit'][:7]}, `{row['command']}`"
        )
    return "\n\n".join(parts)


def make_pictures(rows: Iterable[Row]) -> Mapping[str, str]:
    """Return file name -> SVG of each example's curves."""
    return {
        f"field-{row['work'].replace('_', '-')}.svg": draw([Panel(**panel) for panel in row["picture"]], title(row))
        for row in rows
        if row["picture"]
    }


PARTS = {"table": lambda: table(newest_rows()), "details": lambda: details(newest_rows())}
PAGES = (Page("fields.md", PARTS, lambda: make_pictures(newest_rows())),)
