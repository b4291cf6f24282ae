"""Fills the table of docs/reliability.md from tests/reliability/results.jsonl.

python -m pytest tests/reliability --full --record && python scripts/reliability_page.py
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests" / "reliability" / "results.jsonl"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN = "<!-- results -->\n"
END = "<!-- end of results -->\n"


def newest_rows(results: Path = RESULTS) -> list[dict[str, Any]]:
    """Return the newest record of each test, full-length before shortened ones, in the order of the scorecard."""
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: (row.get("full", False), row["date"]))
    newest = {(row["row"], row.get("name", row["test"])): row for row in rows}
    return sorted(newest.values(), key=lambda row: (str(row["row"]).zfill(2), row["test"]))


def make_page(page: str, rows: list[dict[str, Any]]) -> str:
    """Return the page with its table replaced."""
    lines = ["| row | test | measured | device | jax | date |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = (row["row"], row["test"], row["figure"], row["device"], row["versions"]["jax"], row["date"][:10])
        lines.append(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |")
    head, _, rest = page.partition(BEGIN)
    tail = rest.partition(END)[2]
    return f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(make_page(PAGE.read_text(encoding="utf-8"), newest_rows()), encoding="utf-8")
    print(f"wrote {PAGE}")
