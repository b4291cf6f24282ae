"""Makes the tables of docs/compression_cache.md from benchmarks/results/cache_formats.jsonl.

python benchmarks/cache_formats.py --run runs/quickstart && python scripts/cache_page.py
"""

import functools
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.page_parts import fill_page
from scripts.result_rows import RESULTS, ROOT, Row, read_all

PAGE = ROOT / "docs" / "compression_cache.md"
PARTS = {
    "cache": ("cache of keys and values", "bfloat16 / stored"),
    "weights": ("weights", "float32 / stored"),
}
"""Part of the page -> work of its rows, and heading of the ratio."""


def meets_claim(row: Row) -> bool:
    """Return True if a cache has at most half of bfloat16's bytes, at a perplexity of at most 1 % more."""
    return row["ratio"] >= 2 and row["change_percent"] <= 1


def newest_run(results: Path = RESULTS) -> list[Row]:
    """Return the rows of the newest run of the benchmark, in its order."""
    rows = read_all(results / "cache_formats.jsonl")
    newest = max((row["date"] for row in rows), default="")
    return [row for row in rows if row["date"] == newest]


def table(part: str, rows: Iterable[Row]) -> str:
    """Return the table of one part of the page."""
    work, heading = PARTS[part]
    rows = [row for row in rows if row["work"] == work]
    last = " half the bytes at 1 % |" if part == "cache" else " next token right |"
    lines = [f"| format | bits a value | {heading} | perplexity | change |{last}", "|---" * 6 + "|"]
    for row in rows:
        verdict = "–" if row["ratio"] == 1 else "met" if meets_claim(row) else "**missed**"
        shown = verdict if part == "cache" else f"{row['accuracy']:.2%}".replace("%", " %")
        lines.append(
            f"| {row['format']} | {row['bits_per_value']:.3f} | {row['ratio']:.3f} | {row['perplexity']:.3f} | "
            f"{row['change_percent']:+.2f} % | {shown} |"
        )
    first = rows[0]
    lines += ["", f"{first['date'][:10]}, commit {first['commit'][:7]}, {first['device']}, `{first['command']}`."]
    return "\n".join(lines)


def make_page(page: str, rows: list[Row]) -> str:
    """Return the page with its made parts replaced."""
    return fill_page(page, {part: functools.partial(table, part, rows) for part in PARTS})


if __name__ == "__main__":
    PAGE.write_text(make_page(PAGE.read_text(encoding="utf-8"), newest_run()), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
