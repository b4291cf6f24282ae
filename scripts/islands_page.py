"""Makes the tables of docs/local-sgd.md from benchmarks/results/islands.jsonl and slow_link.jsonl.

python benchmarks/islands.py && python benchmarks/slow_link.py && python scripts/islands_page.py
"""

import functools
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.page_parts import fill_page
from scripts.result_rows import RESULTS, ROOT, Row, read_all

PAGE = ROOT / "docs" / "local-sgd.md"
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
    """Return held-out loss and bytes between workers of each method, relative to data parallelism."""
    newest = {row["method"]: row for row in rows if row["work"] == work}
    if not newest:
        return f"Not measured yet; `python benchmarks/islands.py --work {work}` measures it."
    lines = ["| | held-out loss | relative to data parallelism | bytes between workers |", "|---|---|---|---|"]
    for method in (name for name in NAMES if name in newest):
        row = newest[method]
        bytes_sent = f"{row['relative_bytes']:.3f}"
        lines.append(f"| {NAMES[method]} | {row['eval_loss']:.3f} | {row['relative_loss']:.3f} | {bytes_sent} |")
    last = max(newest.values(), key=lambda row: row["date"])
    about = f"{last['steps']:,} steps, {last['islands']} workers, {last['device']}, {last['date'][:10]}"
    return "\n".join([*lines, "", f"{about}, commit {last['commit'][:7]}."])


def speed_table(rows: Iterable[Row]) -> str:
    """Return the speed of each method over a limited link, relative to data parallelism."""
    newest = {row["method"]: row for row in rows}
    if not newest:
        return "Not measured yet; `python benchmarks/slow_link.py` measures it."
    lines = ["| | ms a step | tokens/s | relative speed | bytes sent a step |", "|---|---|---|---|---|"]
    for method in (name for name in NAMES if name in newest):
        row = newest[method]
        lines.append(
            f"| {NAMES[method]} | {row['milliseconds']:.0f} | {row['tokens_per_second']:,.0f} | "
            f"{row['relative_speed']:.1f} | {row['bytes_per_step']:,.0f} |"
        )
    last = max(newest.values(), key=lambda row: row["date"])
    link = f"two processes, {last['limit_megabytes']:g} MB/s on each connection"
    about = f"{link}, {last['steps']} steps, {last['device']}, {last['date'][:10]}"
    return "\n".join([*lines, "", f"{about[0].upper()}{about[1:]}, commit {last['commit'][:7]}."])


def make_page(page: str, rows: Iterable[Row], speeds: Iterable[Row]) -> str:
    """Return the page with its made parts replaced, from rows of benchmarks/islands.py and benchmarks/slow_link.py."""
    rows = list(rows)
    tables = {work: functools.partial(table, work, rows) for work in WORKS}
    return fill_page(page, {**tables, "slow link": functools.partial(speed_table, speeds)})


if __name__ == "__main__":
    found = [read_all(RESULTS / f"{name}.jsonl") for name in ("islands", "slow_link")]
    text = make_page(PAGE.read_text(encoding="utf-8"), *found)
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
