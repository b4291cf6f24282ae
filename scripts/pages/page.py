"""A page of the documentation with made parts, and the tables in them."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from scripts.pages.rows import ROOT, Row

DOCS = ROOT / "docs"
PICTURES = DOCS / "pictures"
Cell = str | Callable[[Row], str]
"""A format string such as `"{milliseconds:.2f}"` that takes a row's values, or a function of the row."""


def fill(page: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return the page with its made parts replaced, each between `<!-- made: NAME -->` and `<!-- end -->`.

    Args:
      page: text of the page.
      parts: name of a part -> function that returns its text; parts without one are left as they are.
    """

    def replaced(found: re.Match[str]) -> str:
        text = parts[found[1]]() if found[1] in parts else found[2].strip()
        return f"<!-- made: {found[1]} -->\n\n{text}\n\n<!-- end -->"

    return re.sub(r"<!-- made: ([\w ]+) -->\n(.*?)<!-- end -->", replaced, page, flags=re.S)


@dataclass(frozen=True)
class Page:
    """A page: its file in docs/ and what is made in it."""

    file: str
    parts: Mapping[str, Callable[[], str]]
    """Name of a made part -> function that returns its text, see `fill`."""
    pictures: Callable[[], Mapping[str, str]] = dict
    """Returns file name -> SVG of the page's pictures."""
    rewrite: Callable[[str], str] = str
    """Makes what lies outside of named parts: takes and returns the text of the page."""

    def read(self) -> str:
        """Return the stored text; empty if there is none."""
        path = DOCS / self.file
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def make(self, text: str) -> str:
        """Return the text with its made parts made anew."""
        return fill(self.rewrite(text), self.parts)


def table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    head, rule, *rest = spaced_table(titles, lines).splitlines()
    return "\n".join([head.replace("|  |", "| |"), rule.replace(" ", ""), *rest])


def spaced_table(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown whose source has spaces around every cell."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [titles, ["---"] * len(titles), *lines])


def table_of(columns: Mapping[str, Cell], rows: Iterable[Row]) -> str:
    """Return a table with a line for each row; `columns` are title -> cell."""
    return table([*columns], ([show(cell, row) for cell in columns.values()] for row in rows))


def show(cell: Cell, row: Row) -> str:
    """Return the text of a cell."""
    return cell.format_map(row) if isinstance(cell, str) else cell(row)


def escaped(text: str) -> str:
    """Return text whose vertical bars do not end a cell."""
    return text.replace("|", "\\|")
