"""Calibrate the planner's efficiencies on measured rows, and compare its forecasts with them.

    python benchmarks/planning/calibrate_planner.py                 # print forecasts beside measured rows
    python benchmarks/planning/calibrate_planner.py --write         # fit, and write jaxstack/cost_model/efficiency.json
    python benchmarks/planning/calibrate_planner.py --also planner  # use the rows of benchmarks/planning/planner.py too

It touches no device. Rates of matmuls, attention and copies come from `device.jsonl` and from the traces in
`step_profile.jsonl`; what remains (elementwise passes, scans, transfers) is fitted to whole steps in `train_step.jsonl`
and `ablation.jsonl`, one parameter at a time, to the smallest mean relative error. Rows of `planner.jsonl` are left
out unless asked for, so that they can serve as a test of the forecasts.
"""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.rows import RESULTS, print_table
from jaxstack.cost_model.cluster import EFFICIENCY_FILE, Efficiency, cluster_of_devices, parse_cluster
from jaxstack.cost_model.forecast import LayoutModel
from jaxstack.cost_model.layouts import LayoutTable, layout_table_of
from jaxstack.cost_model.model_shape import model_shape
from jaxstack.cost_model.step_time import LOGIT_PASSES, SMALL_DIM
from jaxstack.run.setting import with_training_layout
from jaxstack.run_config import load_config

Row = dict[str, Any]

GIVEN = {
    "link": (0.68, "NCCL through jax on four H200s, 512 MiB per GPU: 289 to 322 of 450 GB/s"),
    "network": (0.85, "assumed; not measured"),
    "tick_seconds": (3e-4, "1F1B and interleaved pipelines of 16 layers of width 4096 on four H200s"),
}
"""Values that no row of the results has, with their sources."""
FITTED = {
    "matmul": np.linspace(0.70, 0.85, 31),
    "elementwise": np.linspace(0.3, 1.2, 46),
    "transfers": np.linspace(0, 4, 81),
    "transfers_scanned": np.linspace(0, 4, 81),
}
"""Parameters that are fitted to whole steps, in this order, with the values that are tried. The rate of matmuls is
between that of a lone GEMM, under which the clock falls most, and that of the traces."""


def read(script: str) -> list[Row]:
    """Return the rows of a script's results; none if it has no file."""
    path = RESULTS / f"{script}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def source(script: str, row: Row) -> str:
    """Return how a row is named among the sources: script, work, variant, commit."""
    parts = [row["work"], row.get("variant"), str(row["commit"])[:7]]
    return f"{script}: {', '.join(filter(None, parts))}"


def newest(rows: Sequence[Row]) -> list[Row]:
    """Return the last row of each work, variant and implementation."""
    return list({(row["work"], row.get("variant"), row["implementation"]): row for row in rows}.values())


def measured_steps(scripts: Sequence[str]) -> list[tuple[str, Row]]:
    """Return our rows of whole training steps, with their script: those that train all weights and can be rebuilt."""
    found = []
    for script in scripts:
        ours = [row for row in read(script) if row["implementation"] == "jaxstack" and "NVIDIA" in row["device"]]
        complete = [row for row in ours if any("model.preset=" in o for o in row.get("overrides", ()))]
        unusual = ("blockwise", "adapters.rules")
        usual = [row for row in newest(complete) if not any(word in str(row["overrides"]) for word in unusual)]
        found += [(script, row) for row in usual if not any(o.startswith("xla_") for o in row["overrides"])]
    return found


def open_row(row: Row) -> tuple[LayoutModel, LayoutTable]:
    """Return the planner's model of the run that a row measured, and its layout."""
    overrides = [o for o in row["overrides"] if not o.startswith("xla_") and "simulate_devices" not in o]
    cluster = cluster_of_devices(row["device"], row["devices"], one_host=True)
    assert cluster is not None
    config = with_training_layout(load_config(None, overrides, report=lambda _: None), row["devices"], cluster)
    return LayoutModel(config, cluster), layout_table_of(config)


def predict(opened: tuple[LayoutModel, LayoutTable], efficiency: Efficiency) -> float:
    """Return the predicted seconds of a step."""
    model, layouts = opened
    return float(sum(dataclasses.replace(model.time, efficiency=efficiency).parts(layouts).values())[0])


def attention_rates(rows: Sequence[Row], peak: float) -> dict[str, float]:
    """Return the rates at long sequences by head_dim, and the sequence length of half the rate, by a search."""
    points = []
    for row in rows:
        name = re.fullmatch(r"attention forward\+backward \d+, (\d+), \d+/\d+, (\d+) causal bf16", row["work"])
        if name and row["implementation"] == "jaxstack mosaic":
            points.append((int(name[1]), int(name[2]), row["tflops_per_device"] / peak))

    def fit(half: float) -> tuple[float, dict[int, float]]:
        rates = {w: median(r * (t + half) / t for t, width, r in points if width == w) for w in (64, 128)}
        errors = [abs(rates[w] * t / (t + half) / r - 1) for t, w, r in points]
        return float(np.mean(errors)), rates

    half = min(range(0, 4000, 10), key=lambda h: fit(h)[0])
    rates = fit(half)[1]
    return {"attention_64": rates[64], "attention_128": rates[128], "attention_half_length": float(half)}


def profile_rates(rows: Sequence[Row], peaks: Mapping[str, float], head: float) -> dict[str, float]:
    """Return the efficiencies of layers' matmuls and the gaps between kernels, from traces of steps.

    Args:
        rows: of `step_profile`.
        peaks: TFLOP/s by dtype.
        head: efficiency of the output head's matmuls.
    """
    rates: dict[str, list[float]] = {"bf16": [], "delayed": [], "blockwise": []}
    gaps = []
    for row in rows:
        model = model_shape(load_config(None, [f"model.preset={row['work'].split()[0]}"]).model)
        tokens = row["tokens_per_second_per_device"] * row["milliseconds"] / 1e3
        table = 6 * model.vocabulary * model.hidden * tokens
        layers = 6 * model.matmul * tokens - table
        gaps.append(row["idle"] / 1e3 / model.layers)
        wide = model.hidden / (model.hidden + SMALL_DIM)
        seconds = row["matmuls"] / 1e3 - table / (head * peaks["bfloat16"] * wide * 1e12)
        if row["work"].endswith("bf16"):
            rates["bf16"].append(layers / seconds / 1e12 / peaks["bfloat16"] / wide)
        for recipe in ("delayed", "blockwise"):
            if recipe in row["variant"]:
                rates[recipe].append(layers / seconds / 1e12 / peaks["float8"] / wide)
    return {
        "matmul": median(rates["bf16"]),
        "matmul_fp8": median(rates["delayed"]),
        "matmul_blockwise": median(rates["blockwise"]),
        "layer_seconds": median(gaps),
    }


def head_rate(rows: Sequence[Row], peak: float, copy_rate: float, bandwidth: float) -> float:
    """Return the efficiency of the matmuls of head and loss, from rows of the loss by itself, forward and backward."""
    found = []
    for row in rows:
        size = re.fullmatch(r"linear cross-entropy (\d+) x (\d+) x (\d+) bf16", row["work"])
        if size and row["implementation"] == "jaxstack sum":
            tokens, hidden, vocabulary = map(int, size.groups())
            passes = 2 * LOGIT_PASSES * tokens * vocabulary / (copy_rate * bandwidth)
            rate = 6 * tokens * hidden * vocabulary / (row["milliseconds"] / 1e3 - passes) / 1e12 / peak
            found.append(rate * (hidden + SMALL_DIM) / hidden)
    return median(found)


def scan_passes(rows: Sequence[Row], copy_rate: float, bandwidth: float) -> float:
    """Return the passes over saved activations that a scan adds: the ablation's scanned against its unrolled step.

    The stacks of weights and gradients, whose bytes are known, are taken off.
    """
    scanned = next(row for row in rows if row["variant"].split()[0] == "7")
    unrolled = next(row for row in rows if row["variant"].split()[0] == "6" and row["work"] == scanned["work"])
    model = model_shape(load_config(None, ["model.preset=llama3-1b", "model.num_layers=8"]).model)
    saved = 4 * model.hidden + 2 * model.query + 2 * model.key + 3 * model.feed_forward
    seconds = (scanned["milliseconds"] - unrolled["milliseconds"]) / 1e3
    weights = 24 * model.layer_parameters
    return (seconds * copy_rate * bandwidth - weights) / (2 * saved * 8 * 2048 * 8)


def fit(values: dict[str, float], rows: Sequence[tuple[str, Row]]) -> dict[str, float]:
    """Return the values with the fitted parameters changed one at a time to the smallest mean absolute error."""

    opened = [(open_row(row), row["milliseconds"] / 1e3) for _, row in rows]

    def loss(changed: Mapping[str, float]) -> float:
        efficiency = Efficiency(**changed)
        return float(np.mean([abs(predict(model, efficiency) / seconds - 1) for model, seconds in opened]))

    for _ in range(2):
        for name, grid in FITTED.items():
            # A parameter on which no row depends keeps its value.
            scores = {float(value): loss({**values, name: float(value)}) for value in (values[name], *grid)}
            best = min(scores, key=lambda value: scores[value])
            values = {**values, name: best} if scores[best] < loss(values) - 1e-9 else values
    return values


def calibrate(rows: Sequence[tuple[str, Row]]) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Return the efficiencies, and for each the rows that it comes from."""
    cluster = parse_cluster("1 h200")
    peaks = cluster.peak_tflops.model_dump()
    device = newest(read("device"))
    profile = newest(read("step_profile"))
    ablation = newest(read("ablation"))
    losses = newest(read("linear_cross_entropy"))
    copy = next(row for row in device if row["work"].startswith("copy"))
    copy_rate = copy["gigabytes_per_second"] * 1e9 / cluster.memory_bandwidth
    head = head_rate(losses, peaks["bfloat16"], copy_rate, cluster.memory_bandwidth)
    values = {
        **profile_rates(profile, peaks, head), **attention_rates(device, peaks["bfloat16"]), "copy_rate": copy_rate,
        "head": head,
        "scan_passes": scan_passes(ablation, copy_rate, cluster.memory_bandwidth),
        "elementwise": 0.6, "transfers": 0.5, "transfers_scanned": 0.5,
        **{name: value for name, (value, _) in GIVEN.items()},
    }  # fmt: skip
    values = fit(values, rows)
    if not any(model.time.scanned and row["devices"] > 1 for model, row in ((open_row(r)[0], r) for _, r in rows)):
        values["transfers_scanned"] = values["transfers"]
    attention = [source("device", row) for row in device if row["work"].startswith("attention")]
    traces = [source("step_profile", row) for row in profile]
    sources = {
        **dict.fromkeys(("matmul", "matmul_fp8", "matmul_blockwise", "layer_seconds"), traces),
        **dict.fromkeys(("attention_64", "attention_128", "attention_half_length"), attention),
        "copy_rate": [source("device", copy)],
        "head": [source("linear_cross_entropy", row) for row in losses if row["implementation"] == "jaxstack sum"],
        "scan_passes": [source("ablation", row) for row in ablation if row["variant"][0] in "67"],
        **dict.fromkeys(FITTED, [source(script, row) for script, row in rows]),
        **{name: [text] for name, (_, text) in GIVEN.items()},
    }
    return {name: float(f"{value:.4g}") for name, value in values.items()}, sources


def compare(rows: Sequence[tuple[str, Row]], efficiency: Efficiency) -> None:
    """Print predicted beside measured time and memory of each row."""
    table = []
    for _, row in rows:
        model, layouts = opened = open_row(row)
        measured = row["milliseconds"]
        predicted = 1e3 * predict(opened, efficiency)
        table.append(
            {
                "work": row["work"],
                "variant": row.get("variant"),
                "measured ms": measured,
                "predicted ms": predicted,
                "error %": 100 * (predicted / measured - 1),
                "measured GB": row["peak_memory_bytes"] / 1e9 if "peak_memory_bytes" in row else None,
                "predicted GB": float(sum(model.memory(layouts).values())[0]) / 1e9,
            }  # fmt: skip
        )
    print_table(table, table[0])
    print(f"median absolute error of the time: {median(abs(row['error %']) for row in table):.1f} %")


def main() -> None:
    """Calibrate, or only compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="fit, and write jaxstack/cost_model/efficiency.json")
    parser.add_argument("--also", nargs="+", default=[], metavar="SCRIPT", help="results whose rows are used too")
    args = parser.parse_args()
    rows = measured_steps(["train_step", "parallel", *args.also])
    if args.write:
        values, sources = calibrate([(script, row) for script, row in rows if script != "parallel"])
        Efficiency(**values)
        EFFICIENCY_FILE.write_text(json.dumps({"values": values, "sources": sources}, indent=1) + "\n")
        print(json.dumps(values, indent=1))
    compare(rows, Efficiency(**json.loads(EFFICIENCY_FILE.read_text())["values"]))


if __name__ == "__main__":
    main()
