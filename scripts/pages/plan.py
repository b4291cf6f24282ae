"""The tables of docs/plan.md: worked examples, and predicted and measured times and compiled memory.

The examples are searches of the planner. Measured rows come from train_step.jsonl, planner.jsonl
and parallel.jsonl of benchmarks/results, and compiled memory from tests/cost_model/data/compiled_memory.jsonl.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from jaxstack.cost_model.cluster import EFFICIENCY_FILE, cluster_of_devices, parse_cluster
from jaxstack.cost_model.forecast import forecast, training_budget
from jaxstack.cost_model.search import describe_degrees
from jaxstack.plan.cluster_search import SearchOptions, search_cluster
from jaxstack.run_config import load_config
from scripts.pages.page import Page, table_of
from scripts.pages.page import spaced_table as table
from scripts.pages.rows import RESULTS, ROOT, read_all, read_newest_run

COMPILED = ROOT / "tests" / "cost_model" / "data" / "compiled_memory.jsonl"
EXAMPLES = {
    "1b": (["model.preset=llama3-1b", "model.scan_layers=false", "train.global_batch_size=4"], "1 x 1 h200"),
    "8b": (["model.preset=llama3-8b", "model.scan_layers=false", "train.global_batch_size=64"], "1 x 8 h200"),
    "70b": (["model.preset=llama3-70b", "train.global_batch_size=1024"], "64 x 8 h200"),
}
"""Example -> (configuration, cluster); sequences of 8192 tokens."""
MEASURED = {"1b": ("llama3-1b bf16", "unrolled")}
"""Example -> work and variant of the row that measured its first layout."""
BLIND_SINCE = "2026-11-24"
"""First day of the rows whose stored forecasts are a blind test: no formula had been changed because of them."""
TIMES = {"matmul": "matmul", "attention": "attention", "elementwise": "elementwise",
         "exposed_communication": "communication", "bubble": "bubble"}  # fmt: skip


def example(name: str) -> str:
    """Return the table of one worked example: the five fastest layouts, and the budget of a Chinchilla run."""
    overrides, cluster = EXAMPLES[name]
    config = load_config(None, [*overrides, "train.sequence_length=8192"], report=lambda _: None)
    result = search_cluster(config, SearchOptions(cluster=cluster, tokens="chinchilla", top=5))
    rows = []
    for one in result.found.forecasts:
        parts = [f"{1e3 * one.seconds[part]:,.0f}" for part in TIMES]
        speed = f"{one.tokens_per_second / one.devices:,.0f}"
        rows.append([describe_degrees(one.config), f"{one.memory_bytes / 2**30:.0f}", f"{1e3 * one.step_seconds:,.0f}",
                     *parts, speed, f"{100 * one.mfu:.1f}"])  # fmt: skip
    titles = ["layout", "GiB", "step ms", *TIMES.values(), "tokens/s/GPU", "MFU %"]
    assert result.tokens is not None
    budget = training_budget(result.found.best, result.tokens)
    counts = f"{result.found.fitting:,} of {result.found.tried:,} possible layouts fit."
    cost = f" {budget.cost:,.0f} at the file's price," if budget.cost is not None else ""
    line = (
        f"{counts} {budget.tokens / 1e9:,.0f} billion tokens (20 per parameter) with the first: "
        f"{budget.days:,.1f} days, {budget.gpu_hours:,.0f} GPU-hours,{cost} {budget.kilowatt_hours / 1000:,.1f} MWh."
    )
    measured = [row for row in usual_rows("train_step") if (row["work"], row.get("variant")) == MEASURED.get(name)]
    for row in measured:
        speed = f"{row['tokens_per_second_per_device']:,.0f} tokens/s/GPU"
        line += f" Measured with the first: {row['milliseconds']:,.0f} ms, {speed} (commit {row['commit'][:7]})."
    return f"{table(titles, rows)}\n\n{line}"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; none if it does not exist."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def predict(row: dict[str, Any]) -> float | None:
    """Return the predicted milliseconds of a measured step; None if its device is unknown to the planner."""
    config = load_config(None, row["overrides"], report=lambda _: None)
    cluster = cluster_of_devices(row["device"], row["devices"], one_host=True)
    return None if cluster is None else 1e3 * forecast(config, cluster).step_seconds


def usual_rows(script: str) -> list[dict[str, Any]]:
    """Return the newest rows of ours with complete overrides in a file of `benchmarks/results`.

    Rows of what the planner does not predict are left out: blockwise FP8, a packed base, other XLA options than ours,
    and tensor parallelism or fsdp whose overlap is off.
    """
    ours = [row for row in read(RESULTS / f"{script}.jsonl") if row["implementation"] == "jaxstack"]
    whole = [row for row in ours if any("model.preset=" in o for o in row.get("overrides", ()))]
    usual = [row for row in whole if not re.search(r"blockwise|packed_base|'xla_|=never", str(row["overrides"]))]
    timed = [row for row in usual if "milliseconds" in row]
    return list({(row["work"], row.get("variant"), row["devices"]): row for row in timed}.values())


def calibrates(row: dict[str, Any]) -> bool:
    """Return True if the current calibration was fitted to this row."""
    sources = {source for found in load_sources().values() for source in found}
    parts = (row["work"], row.get("variant"), str(row["commit"])[:7])
    return f"train_step: {', '.join(filter(None, parts))}" in sources


@functools.cache
def load_sources() -> dict[str, list[str]]:
    """Return the names of the rows to which each value of the calibration was fitted."""
    return json.loads(EFFICIENCY_FILE.read_text(encoding="utf-8"))["sources"]


def measured(rows: Iterable[dict[str, Any]], stored: bool = False) -> str:
    """Return a table of predicted and measured step times.

    Args:
      rows: of `benchmarks/results`.
      stored: take the forecast that the benchmark stored before it measured, not today's.
    """
    lines = []
    errors = []
    for row in rows:
        predicted = row["predicted_milliseconds"] if stored else predict(row)
        real = row["milliseconds"]
        if predicted is None:
            continue
        errors.append(predicted / real - 1)
        named = [row["work"], row.get("variant") or "", f"{predicted:,.0f}", f"{real:,.0f}"]
        lines.append([*named, f"{100 * errors[-1]:+.1f}", str(row["commit"])[:7]])
    if not errors:
        return "Not measured yet."
    titles = ["work", "variant", "predicted ms", "measured ms", "difference %", "commit"]
    middle = 100 * median(abs(error) for error in errors)
    return f"{table(titles, lines)}\n\nMedian of the absolute differences: {middle:.1f} %, over {len(errors)} rows."


def other_steps() -> list[dict[str, Any]]:
    """Return the rows of whole steps to which the calibration was not fitted: parallel layouts, and newer works."""
    newer = [row for row in usual_rows("train_step") if not calibrates(row)]
    # The single device is a row of both weak and strong scaling.
    parallel = [row for row in usual_rows("parallel") if row["devices"] > 1]
    return [*parallel, *newer]


def choices() -> str:
    """Return the measured time of the planner's choice beside the best measured one, for each work of planner.jsonl.

    The choice is the measured layout that is fastest by today's forecasts.
    """
    rows = [row for row in read(RESULTS / "planner.jsonl") if "milliseconds" in row]
    lines = []
    for work in dict.fromkeys(row["work"] for row in rows):
        found = [row for row in rows if row["work"] == work]
        chosen = min(found, key=lambda row: predict(row) or math.inf)
        best = min(found, key=lambda row: row["milliseconds"])
        times = [chosen["milliseconds"], best["milliseconds"]]
        lines.append([work, str(len(found)), chosen["variant"], f"{times[0]:,.1f}", best["variant"], f"{times[1]:,.1f}",
                      f"{times[0] / times[1]:.3f}"])  # fmt: skip
    titles = ["work", "layouts measured", "planner's choice", "ms", "best measured", "ms", "ratio"]
    return table(titles, lines)


def compiled() -> str:
    """Return the planner's memory beside the compiler's."""
    lines = []
    errors = []
    for row in read(COMPILED):
        config = load_config(None, row["overrides"], report=lambda _: None)
        found = forecast(config, parse_cluster(f"1 x {row['devices']} h200")).memory_bytes
        errors.append(found / row["predicted_bytes"] - 1)
        layers = f" of {config.model.num_layers} layers" if any("num_layers" in o for o in row["overrides"]) else ""
        shape = f"{config.train.global_batch_size} x {config.train.sequence_length}"
        scanned = "" if config.model.scan_layers else ", unrolled"
        kinds = ", ".join(dict.fromkeys(config.model.layer_types))
        model = config.model.preset or f"layers {kinds}, width {config.model.hidden_size}"
        named = [f"{model}{layers}, {shape}", describe_degrees(config) + scanned]
        sizes = [f"{size / 2**30:.1f}" for size in (found, row["predicted_bytes"])]
        lines.append([*named, *sizes, f"{100 * errors[-1]:+.1f}"])
    titles = ["work", "layout", "planner GiB", "compiler GiB", "difference %"]
    middle = 100 * median(abs(error) for error in errors)
    return f"{table(titles, lines)}\n\nMedian of the absolute differences: {middle:.1f} %."


def learned_errors() -> str:
    """Return the errors of the roofline and of its learned correction by family, of the newest run on each device."""
    path = RESULTS / "learned_cost_errors.jsonl"
    devices = sorted({row["device"] for row in read_all(path)})
    if not devices:
        return "Not measured yet; `python benchmarks/planning/learned_cost.py` measures it."
    columns = {"programs": "{family}", "number": "{programs}", "roofline's error": "{roofline_error:.1%}",
               "learned": "{learned_error:.1%}", "roofline's τ": "{roofline_tau:.2f}",
               "learned τ": "{learned_tau:.2f}"}  # fmt: skip
    parts = []
    for device in devices:
        rows = read_newest_run(path, device)
        place = "{device}, `{command}`, {date:.10}, commit {commit:.7}".format_map(rows[0])
        stored = f"; programs measured on {rows[0]['programs_of']:.10}" if "programs_of" in rows[0] else ""
        parts.append(f"{table_of(columns, rows)}\n\n{place}{stored}.")
    return "\n\n".join(parts)


PARTS: dict[str, Callable[[], str]] = {
    **{f"example {name}": lambda name=name: example(name) for name in EXAMPLES},
    "measured": lambda: measured(filter(calibrates, usual_rows("train_step"))),
    "blind": lambda: measured((row for row in usual_rows("planner") if row["date"] >= BLIND_SINCE), stored=True),
    "independent": lambda: measured(usual_rows("planner")),
    "other steps": lambda: measured(other_steps()),
    "choices": choices,
    "compiled": compiled,
    "learned": learned_errors,
}
"""Name of a part of the page -> the function that makes it."""

PAGES = (Page("plan.md", PARTS),)
