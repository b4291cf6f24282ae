"""The table of docs/export.md: the page in the browser and ONNX Runtime Web, for each number of threads."""

from collections.abc import Sequence

from scripts.pages.page import Page, table
from scripts.pages.rows import RESULTS, Row, read_all


def newest_runs() -> list[list[Row]]:
    """Return the rows of the newest run with each number of threads, in the benchmark's order."""
    rows = read_all(RESULTS / "web.jsonl")
    newest = {row["threads"]: row["date"] for row in rows}
    return [[row for row in rows if row["date"] == newest[threads]] for threads in sorted(newest)]


def shown(row: Row) -> str:
    """Return the speed of a product, or the time of anything else."""
    if "gflops" in row:
        return f"{row['gflops']:.1f} GFLOP/s"
    ms = row["milliseconds"]
    return f"{ms / 1000:.1f} s" if ms >= 1000 else f"{ms:.3g} ms"


def run_table(rows: Sequence[Row]) -> str:
    """Return the table of one run: a line for each work, ONNX Runtime Web and the page in columns."""
    first = rows[0]
    threads = f"{first['threads']} thread" + "s" * (first["threads"] > 1)
    ours, theirs = ([row for row in rows if row["side"] == side] for side in ("page", "graph"))
    lines = [
        [one["work"], shown(other), shown(one), f"{other['milliseconds'] / one['milliseconds']:.1f}"]
        for one, other in zip(ours, theirs, strict=True)
    ]
    difference = max(row["difference"] for row in rows if row["work"].startswith("one token"))
    about = (
        "{date:.10}, commit {commit:.7}, headless Chromium {chromium}, {cores} cores at a load of {load:.1f}, "
        "{parameters:,} parameters, `{command}`. The same tokens; their logits differ by at most "
    ).format_map(first)
    titles = [threads, f"ONNX Runtime Web {first['onnxruntime']}", "this page", "times as fast"]
    return f"{table(titles, lines)}\n\n{about}{difference:.0e}."


PAGES = (Page("export.md", {"browser": lambda: "\n\n".join(map(run_table, newest_runs()))}),)
