"""Parallel layouts of whole training steps on the GPUs of one machine, and their parts.

    python benchmarks/distributed/parallel.py         # everything, about 20 minutes on four H200s
    python benchmarks/distributed/parallel.py --only tensor context pipeline
    python benchmarks/distributed/parallel.py --only weak strong --devices 2
    python benchmarks/distributed/parallel.py --only tensor weak strong --devices 2 --together
    python benchmarks/distributed/parallel.py --tiny  # tiny sizes on simulated CPU devices

With `--together` all steps compile at the same time and are measured one by one (benchmarks/turns.py). The names of the
works contain the number of GPUs, with which they grow. Parts:
    tensor     llama3-8b, 4096 tokens a device, tensor and sequence parallel, with and without overlap
    context    llama3-8b, one sequence over all devices, 16,384 tokens on each
    long       the same with 262,144 tokens on each: 1,048,576 on four; a step of all layers takes minutes (--layers)
    pipeline   the measured and simulated bubble of each schedule (benchmarks/distributed/pipeline.py)
    matmul     the MLP of llama3-8b with its communication inside the matmuls (collective_matmul.py)
    weak       llama3-1b, 4 x 8192 tokens a device, on one device and on all
    strong     llama3-1b, the same 4 x 8192 tokens on one device and divided over all

Rows of `pipeline` and `matmul` are appended to the results of their own scripts, all others to
benchmarks/results/parallel.jsonl, each as soon as it is measured. `efficiency` is tokens/s per device relative to one
device in the same run.
"""

import argparse
import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.rows import append_rows, print_table
from benchmarks.steps import COLUMNS, TINY, first_gpus, run_worker
from benchmarks.sustained import SECONDS
from benchmarks.training.train_step import VARIANTS, WORKS, context_work, tensor_work
from benchmarks.turns import run_together, turns
from jaxstack.launch.supervisor import count_gpus

TENSOR = ("unrolled", "unrolled, no overlap")

LONG_TOKENS = 262144
"""Tokens per device of the longest sequences: a million over four devices."""
LONG = {name: [f"model.remat={name}"] for name in ("save_attention_offload", "offload", "full")}
"""Rematerialisation policies for such long sequences."""

Row = dict[str, Any]


def context_variants(devices: int) -> dict[str, list[str]]:
    """Return ways to shard one long sequence over `devices` devices."""
    found = {
        f"context {devices}, {name}": [f"parallel.context={devices}", f"model.remat={remat}"]
        for name, remat in (("full remat", "full"), ("save_attention", "save_attention"), ("no remat", "none"))
    }
    found[f"context {devices}, unrolled, no remat"] = [f"parallel.context={devices}", "model.scan_layers=false"]
    if half := devices // 2 * (devices % 2 == 0 and devices > 2):
        found[f"context {half}, tensor 2, save_attention"] = [
            f"parallel.context={half}", "parallel.tensor=2", "parallel.sequence=true", "model.remat=save_attention",
        ]  # fmt: skip
    return found


def measure(args: argparse.Namespace, work: str, variant: str, overrides: list[str], devices: int) -> Row | None:
    """Return a row of our step on `devices` devices; a step on one device is measured once for all works."""
    if devices == 1:
        with args.lock:
            key = tuple(overrides)
            if key not in args.alone:
                args.alone[key] = run_step(args, work, variant, overrides, 1)
            row = args.alone[key]
            return row and {**row, "work": work}
    return run_step(args, work, variant, overrides, devices)


def run_step(args: argparse.Namespace, work: str, variant: str, overrides: list[str], devices: int) -> Row | None:
    """Run the process that measures a step on `devices` devices; return its row."""
    settings = dict(args.environment)
    if args.tiny:
        length = f"train.sequence_length={64 * devices}"
        overrides = [*overrides, *TINY, length, f"parallel.simulate_devices={devices}"]
    elif devices < count_gpus():
        settings |= first_gpus(devices)
    title = f"{work}, {variant}"
    chosen = [*overrides, *args.set]
    row = run_worker(title, "jaxstack", chosen, args.timeout, settings, args.seconds)
    return row and {"work": work, "variant": ", ".join([variant, *args.set]), **row}


def measure_each(args: argparse.Namespace, work: str, steps: dict[str, tuple[list[str], int]]) -> Iterator[Row | None]:
    """Yield a row of each step (variant -> overrides and number of devices); with `--together` all compile at once."""
    calls = [functools.partial(measure, args, work, name, *step) for name, step in steps.items()]
    if args.together:
        yield from (row for _, row in run_together(calls))
    else:
        yield from (call() for call in calls)


def measure_tensor(args: argparse.Namespace) -> Iterator[Row | None]:
    """Tensor and sequence parallelism, with and without overlap."""
    name, overrides = tensor_work(args.devices)
    steps = {variant: ([*overrides, *VARIANTS[variant]], args.devices) for variant in args.variants or TENSOR}
    return measure_each(args, name, steps)


def measure_context(args: argparse.Namespace) -> Iterator[Row | None]:
    """One sequence over all devices."""
    (name, overrides), variants = context_work(args.devices, layers=args.layers), context_variants(args.devices)
    steps = {variant: ([*overrides, *variants[variant]], args.devices) for variant in args.variants or variants}
    return measure_each(args, name, steps)


def measure_long(args: argparse.Namespace) -> Iterator[Row | None]:
    """One very long sequence over all devices."""
    name, overrides = context_work(args.devices, LONG_TOKENS, args.layers)
    steps = {variant: ([*overrides, *LONG[variant]], args.devices) for variant in args.variants or LONG}
    return measure_each(args, name, steps)


SCALING = {
    "1 device": (),
    "data": ("parallel.data={}",),
    "data, zero 1": ("parallel.data={}", "parallel.zero=1"),
    "fsdp": ("parallel.fsdp={}",),
}
"""Layout of weak and strong scaling -> its overrides, with a place for the number of devices; one device has none."""


def measure_scaling(args: argparse.Namespace, work: str, rows: Callable[[int], int]) -> Iterator[Row | None]:
    """One work on one device and on all, with the batch, the optimizer's state or all state sharded.

    Args:
        args: the command's arguments.
        work: its name.
        rows: number of devices -> sequences of a step.
    """
    single = WORKS["llama3-1b bf16"]
    steps = {}
    for variant, layout in SCALING.items():
        if not args.variants or variant in args.variants:
            devices = args.devices if layout else 1
            sizes = [f"train.global_batch_size={rows(devices)}", *(key.format(devices) for key in layout)]
            steps[variant] = ([*single, *sizes, *VARIANTS["unrolled"]], devices)
    if "1 device" not in steps:
        yield from measure_each(args, work, steps)
        return
    waiting: list[Row] = []
    alone = None
    for row in measure_each(args, work, steps):
        if row is None:
            continue
        waiting.append(row)
        if row["devices"] == 1:
            alone = row["tokens_per_second_per_device"]
        while waiting and alone:
            done = waiting.pop(0)
            yield {**done, "efficiency": done["tokens_per_second_per_device"] / alone}
    yield from waiting


def measure_weak(args: argparse.Namespace) -> Iterator[Row | None]:
    """Weak scaling: the same work per device on one device and on all."""
    return measure_scaling(args, "llama3-1b 4 x 8192 tokens a device bf16", lambda devices: 4 * devices)


def measure_strong(args: argparse.Namespace) -> Iterator[Row | None]:
    """Strong scaling: the same work in all on one device and on all."""
    rows = max(4, args.devices)
    return measure_scaling(args, f"llama3-1b {rows} x 8192 tokens in all bf16", lambda devices: rows)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row | None]]] = {
    "tensor": measure_tensor,
    "context": measure_context,
    "long": measure_long,
    "weak": measure_weak,
    "strong": measure_strong,
}
SCRIPTS = {
    "pipeline": ["pipeline.py", "--stages"],
    "matmul": ["collective_matmul.py", "--quick", "--devices"],
}
"""Parts that are scripts of their own, the number of devices their last argument."""


def run_script(args: argparse.Namespace, name: str) -> None:
    """Runs a part that prints and keeps its own rows."""
    script, *options = SCRIPTS[name]
    command = [str(Path(__file__).with_name(script)), *options, str(args.devices), *(["--tiny"] if args.tiny else [])]
    try:
        done = subprocess.run([sys.executable, *command], timeout=args.script_timeout, check=False)
    except subprocess.TimeoutExpired:
        print(f"{name}: ended after {args.script_timeout:.0f} s; the rows that it had are kept", flush=True)
        return
    if done.returncode:
        print(f"{name}: exit code {done.returncode}", flush=True)


def main() -> None:
    """Measures the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("tensor", "context", "pipeline", "matmul", "weak", "strong", "long")
    parser.add_argument("--only", nargs="+", default=list(names[:-1]), choices=names, metavar="PART")
    parser.add_argument("--variants", nargs="+", help="of the part named by --only")
    parser.add_argument("--devices", type=int, help="the first so many GPUs; left out: all (four with --tiny)")
    parser.add_argument("--layers", type=int, help="of context and long: how many of the model's layers, to save time")
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="for every whole step")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a whole step's measurement may take")
    parser.add_argument("--script-timeout", type=float, default=500, help="seconds that pipeline or matmul may take")
    parser.add_argument("--seconds", type=positive(float), default=SECONDS, help="length of a measurement of a step")
    parser.add_argument("--together", action="store_true", help="compile all steps at the same time")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on simulated CPU devices; rows go to tiny/")
    args = parser.parse_args()
    args.devices = args.devices or (4 if args.tiny else count_gpus())
    if args.devices < 2:
        parser.error(f"needs two or more GPUs, found {args.devices}; or --tiny, on simulated CPU devices")
    known = {
        "tensor": list(VARIANTS), "context": list(context_variants(args.devices)), "long": list(LONG),
        **dict.fromkeys(("weak", "strong"), list(SCALING)),
    }  # fmt: skip
    if args.variants:
        wrong = [v for v in args.variants if len(args.only) != 1 or v not in known.get(args.only[0], [])]
        if wrong:
            parser.error(f"--variants {wrong} needs --only with the one part that has them; known: {known}")
    args.alone = {}
    args.lock = threading.Lock()
    args.environment = {}
    rows: list[Row] = []

    def run_part(part: str) -> None:
        for row in PARTS[part](args):
            if row:
                rows.append(row)
                append_rows("tiny/parallel" if args.tiny else "parallel", [row])

    for part in [part for part in args.only if part in SCRIPTS]:
        run_script(args, part)
    steps = [part for part in args.only if part in PARTS]
    if args.together:
        with turns() as args.environment:
            list(run_together([functools.partial(run_part, part) for part in steps]))
    else:
        for part in steps:
            run_part(part)
    if rows:
        print_table(rows, [*COLUMNS, "efficiency"])


if __name__ == "__main__":
    main()
