"""Makes the tables of docs/islands.md from benchmarks/results/islands.jsonl.

python benchmarks/islands.py && python scripts/islands_page.py
"""

import functools
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.page_parts import fill_page
from scripts.result_rows import RESULTS, ROOT, Row, read_all

PAGE = ROOT / "docs" / "islands.md"
NAMES = {
    "data_parallel": "data parallelism",
    "local_sgd": "`local_sgd`",
    "local_sgd_synchronous": "`local_sgd`, `synchronous_steps: 200`",
    "diloco": "`diloco`, defaults",
    "diloco_calm": "`diloco`, `outer_learning_rate: 0.9`, `momentum: 0.3`",
    "diloco_int8": "`diloco`, `compression: int8`",
    "diloco_powersgd": "`diloco`, `compression: powersgd`, `rank: 4`",
    "streaming": "`streaming`, `fragments: 2`",
    "gossip": "`gossip`",
}
"""Method of a row -> what the page calls it."""
WORKS = ("bytes", "quickstart")


def table(work: str, rows: Iterable[Row]) -> str:
    """Return held-out loss and bytes between islands of each method, relative to data parallelism."""
    newest = {row["method"]: row for row in rows if row["work"] == work}
    if not newest:
        return f"Not measured yet; `python benchmarks/islands.py --work {work}` measures it."
    lines = ["| | held-out loss | relative to data parallelism | bytes between islands |", "|---|---|---|---|"]
    for method in (name for name in NAMES if name in newest):
        row = newest[method]
        bytes_sent = f"{row['relative_bytes']:.3f}"
        lines.append(f"| {NAMES[method]} | {row['eval_loss']:.3f} | {row['relative_loss']:.3f} | {bytes_sent} |")
    last = max(newest.values(), key=lambda row: row["date"])
    about = f"{last['steps']:,} steps, {last['islands']} islands, {last['device']}, {last['date'][:10]}"
    return "\n".join([*lines, "", f"{about}, commit {last['commit'][:7]}."])


def make_page(page: str, rows: Iterable[Row]) -> str:
    """Return the page with its made parts replaced."""
    rows = list(rows)
    return fill_page(page, {work: functools.partial(table, work, rows) for work in WORKS})


if __name__ == "__main__":
    text = make_page(PAGE.read_text(encoding="utf-8"), read_all(RESULTS / "islands.jsonl"))
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
