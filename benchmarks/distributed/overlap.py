"""Share of a step's communication that overlaps with computation, from a trace of jax's profiler.

    python benchmarks/distributed/overlap.py                          # tensor, data and fsdp on two GPUs
    python benchmarks/distributed/overlap.py --layouts tensor --layers 8
    python benchmarks/distributed/overlap.py --layouts tensor --devices 4

Each layout is traced with overlap and without, in processes that compile at the same time (`benchmarks/turns.py`).
`tensor` is llama3-8b with tensor and sequence parallelism; without overlap it uses XLA's matmuls and collectives in
turn. `data` and `fsdp` are llama3-1b with 4 x 8192 tokens a device; without overlap XLA's latency-hiding scheduler is
off and the copy engines are not used.

Milliseconds are of device 0 and one step. `communication` is the time in which a collective's kernel or a copy between
GPUs runs, `computation` that of all other kernels, `overlapped` that of both at once; `overlap` = overlapped /
communication. Our kernels that communicate while they multiply show as computation only, so the row with overlap also
has `hidden`, a comparison of the two traces: of the communication without overlap, the share by which the time of
kernels fell short of computation and communication in turn. 1 means that the step's kernels take no longer than
computation alone did; waiting inside our kernels counts against it. The goal is 0.8.
"""

import argparse
import functools
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.rows import append_rows, print_table
from benchmarks.steps import first_gpus, run_as_command, run_process
from benchmarks.training.step_profile import STEPS, busy_nanoseconds, classify, trace_steps
from benchmarks.training.train_step import UNROLLED, WORKS, tensor_work
from benchmarks.turns import run_together, turns

Event = tuple[int, int, str, dict[str, str]]
"""(start, end, kernel, facts), times in nanoseconds."""
NO_SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler=false"
SERIAL = {
    "tensor": ("parallel.overlap=never",),
    "data": ("parallel.copy_engines=never", NO_SCHEDULER),
    "fsdp": ("parallel.copy_engines=never", NO_SCHEDULER),
}
"""Layout -> what turns its overlap off."""
PEER_COPY = r"memcpy\s*p2p|memcpyp2p|memcpy.*peer"
COLUMNS = (
    "work", "variant", "devices", "milliseconds", "computation", "communication", "overlapped", "overlap", "hidden",
    "tokens_per_second_per_device",
)  # fmt: skip


def layout_work(layout: str, devices: int, layers: int | None) -> tuple[str, list[str]]:
    """Return name and configuration of the work of a layout on `devices` GPUs."""
    cut = [] if layers is None else [f"model.num_layers={layers}"]
    of = f" of {layers} layers" if cut else ""
    if layout == "tensor":
        name, overrides = tensor_work(devices)
        return name.replace(" tensor", f"{of} tensor"), [*overrides, UNROLLED, *cut]
    sizes = [f"train.global_batch_size={4 * devices}", f"parallel.{layout}={devices}"]
    return f"llama3-1b{of} {layout}{devices} bf16", [*WORKS["llama3-1b bf16"], *sizes, UNROLLED, *cut]


def communicates(kernel: str, facts: Mapping[str, str]) -> bool:
    """Return True for a collective's kernel and for a copy between GPUs."""
    operation = " ".join((facts.get("hlo_op", ""), facts.get("tf_op", "") or facts.get("name", "")))
    return bool(re.search(PEER_COPY, kernel.lower())) or classify(kernel, operation) == "collectives"


def overlap_of(events: Iterable[Event], steps: int) -> dict[str, float]:
    """Return milliseconds a step of communication, computation and both at once, and `overlap`, if there is any."""
    ordered = sorted(events, key=lambda event: event[:2])
    sent = [event for event in ordered if communicates(event[2], event[3])]
    computed = [event for event in ordered if not communicates(event[2], event[3])]

    def milliseconds(events):
        return busy_nanoseconds(events) / 1e6 / steps

    communication = milliseconds(sent)
    computation = milliseconds(computed)
    busy = milliseconds(ordered)
    both = communication + computation - busy
    found = {"communication": communication, "computation": computation, "overlapped": both, "busy": busy}
    return found | ({"overlap": both / communication} if communication else {})


def hidden_share(row: Mapping[str, float], serial: Mapping[str, float]) -> float | None:
    """Return the share of the serial trace's communication that adds no time to the kernels of the other trace."""
    if not serial["communication"]:
        return None
    return 1 - (row["busy"] - serial["computation"]) / serial["communication"]


def measure(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the row of one traced work."""
    import jax

    config, events = trace_steps(overrides)
    devices = jax.devices()
    milliseconds = (max(event[1] for event in events) - events[0][0]) / 1e6 / STEPS
    tokens = config.train.global_batch_size * config.train.sequence_length
    return {
        "implementation": "jaxstack", "device": devices[0].device_kind, "devices": len(devices),
        "milliseconds": milliseconds, **overlap_of(events, STEPS),
        "tokens_per_second_per_device": 1e3 * tokens / milliseconds / len(devices),
    }  # fmt: skip


def trace_layout(layout: str, args: argparse.Namespace, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the rows of a layout without overlap and with it, as far as they could be traced."""
    work, overrides = layout_work(layout, args.devices, args.layers)
    names = {"no overlap": SERIAL[layout], "overlap": ()}
    variables = {**first_gpus(args.devices), **environment}

    def trace(variant: str) -> dict[str, Any] | None:
        command = [__file__, "--worker", *overrides, *names[variant], *args.set]
        row = run_process(f"{work}, {variant}", command, args.timeout, variables)
        return row and {"work": work, "variant": ", ".join([variant, *args.set]), **row}

    found = dict(run_together([functools.partial(trace, variant) for variant in names]))
    serial = found[0]
    row = found[1]
    if serial and row:
        row["hidden"] = hidden_share(row, serial)
    return [one for one in (serial, row) if one]


def main() -> None:
    """Trace every layout with and without overlap; its rows are appended as soon as both are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=list(SERIAL), choices=SERIAL, help="layouts to trace")
    parser.add_argument("--devices", type=positive(int), default=2, help="number of GPUs, the first that are visible")
    parser.add_argument("--layers", type=positive(int), help="number of layers, to save time; default: all")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value",
        help="of the configuration (section.key=value) or an option of XLA (xla_...=value)")  # fmt: skip
    parser.add_argument("--timeout", type=positive(float), default=400, help="seconds a trace may take")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        run_as_command("overlap.py", lambda: print(json.dumps(measure(args.worker))))
    rows: list[dict[str, Any]] = []
    with turns() as environment:
        calls = [functools.partial(trace_layout, layout, args, environment) for layout in args.layouts]
        for _, found in run_together(calls):
            rows += found
            append_rows("overlap", found)
    if not rows:
        raise SystemExit(1)
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
