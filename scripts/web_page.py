"""Makes the table of docs/export.md from benchmarks/results/web.jsonl.

python benchmarks/web.py --run runs/quickstart && python benchmarks/web.py --run runs/quickstart --threads 2
python scripts/web_page.py
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.page_parts import fill_page
from scripts.result_rows import RESULTS, ROOT, Row, read_all

PAGE = ROOT / "docs" / "export.md"


def newest_runs(results: Path = RESULTS) -> list[list[Row]]:
    """Return the rows of the newest run with each number of threads, in the benchmark's order."""
    rows = read_all(results / "web.jsonl")
    newest = {row["threads"]: row["date"] for row in sorted(rows, key=lambda row: row["date"])}
    return [[row for row in rows if row["date"] == newest[threads]] for threads in sorted(newest)]


def shown(row: Row) -> str:
    """Return the speed of a product, or the time of anything else."""
    if "gflops" in row:
        return f"{row['gflops']:.1f} GFLOP/s"
    ms = row["milliseconds"]
    return f"{ms / 1000:.1f} s" if ms >= 1000 else f"{ms:.3g} ms"


def table(rows: Sequence[Row]) -> str:
    """Return the table of one run: a line for each work, ONNX Runtime Web and the page in columns."""
    first = rows[0]
    threads = f"{first['threads']} thread" + "s" * (first["threads"] > 1)
    lines = [
        f"| {threads} | ONNX Runtime Web {first['onnxruntime']} | this page | times as fast |",
        "|---|---|---|---|",
    ]
    sides = {side: [row for row in rows if row["side"] == side] for side in ("page", "graph")}
    for ours, theirs in zip(sides["page"], sides["graph"], strict=True):
        ratio = theirs["milliseconds"] / ours["milliseconds"]
        lines.append(f"| {ours['work']} | {shown(theirs)} | {shown(ours)} | {ratio:.1f} |")
    difference = max(row["difference"] for row in rows if row["work"].startswith("one token"))
    machine = f"{first['cores']} cores at a load of {first['load']:.1f}"
    lines += [
        "",
        f"{first['date'][:10]}, commit {first['commit'][:7]}, headless Chromium {first['chromium']}, {machine}, "
        f"{first['parameters']:,} parameters, `{first['command']}`. The same tokens; their logits differ by at most "
        f"{difference:.0e}.",
    ]
    return "\n".join(lines)


def make_page(page: str, runs: Sequence[Sequence[Row]]) -> str:
    """Return the page with its made parts replaced."""
    return fill_page(page, {"browser": lambda: "\n\n".join(map(table, runs))})


if __name__ == "__main__":
    PAGE.write_text(make_page(PAGE.read_text(encoding="utf-8"), newest_runs()), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
