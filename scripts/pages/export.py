"""The tables of docs/export.md: the page in the browser beside ONNX Runtime Web, and what vLLM reads."""

from collections.abc import Sequence

from scripts.pages.page import Page, table
from scripts.pages.rows import RESULTS, Row, read_all, read_rows


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


def vllm_table() -> str:
    """Return the differences of log-probabilities of each model and format, by vLLM and by jaxstack."""
    rows = [row for row in read_rows(RESULTS / "vllm_reads.jsonl") if "difference" in row]
    if not rows:
        return "Not measured yet; `python benchmarks/compression/vllm_reads.py --vllm PYTHON` measures it."
    lines = [
        [row["work"], row["variant"], row["implementation"], f"{row['difference']:.4f}", f"{row['largest']:.4f}"]
        for row in rows
    ]
    about = "{date:.10}, commit {commit:.7}, {device}, {tokens} tokens, `{command}`"
    runs = dict.fromkeys(about.format_map(row) for row in rows)
    return f"{table(['model', 'format', 'read by', 'mean difference', 'largest'], lines)}\n\n{'; '.join(runs)}."


PARTS = {"browser": lambda: "\n\n".join(map(run_table, newest_runs())), "vllm": vllm_table}
PAGES = (Page("export.md", PARTS),)
