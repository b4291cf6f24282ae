"""The table of docs/reliability.md, from the figures that `pytest tests/reliability --full --record` writes."""

import json
from pathlib import Path

from scripts.pages.page import Page, escaped, table_of
from scripts.pages.rows import ROOT, Row

RECORDS = ROOT / "tests" / "reliability" / "results.jsonl"
COLUMNS = {"row": "{row}", "test": "{test}", "measured": "{figure}", "device": "{device}", "jax": "{versions[jax]}",
           "date": "{date:.10}"}  # fmt: skip


def newest_rows(records: Path = RECORDS) -> list[Row]:
    """Return the newest record of each test, full-length before shortened ones, in the order of the scorecard."""
    rows = [json.loads(line) for line in records.read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: (row.get("full", False), row["date"]))
    newest = {(row["row"], row.get("name", row["test"])): row for row in rows}
    return sorted(newest.values(), key=lambda row: (str(row["row"]).zfill(2), row["test"]))


def results_table(rows: list[Row]) -> str:
    """Return the table of the records."""
    return table_of(
        {title: lambda row, form=form: escaped(form.format_map(row)) for title, form in COLUMNS.items()}, rows
    )


PAGES = (Page("reliability.md", {"results": lambda: results_table(newest_rows())}),)
