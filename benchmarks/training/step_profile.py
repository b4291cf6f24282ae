"""Kernel time of a traced training step by kind of kernel, in milliseconds.

    python benchmarks/training/step_profile.py "llama3-1b bf16" --variants unrolled

Works and variants are those of train_step.py, each in a process of its own. A trace of jax's profiler over three steps
gives each kernel's time on device 0; concurrent kernels (NCCL's) count in full, `idle` is the part of the
step in which no kernel runs. XLA uses no command buffers under the profiler, so `idle` is an upper bound: the step of
train_step.py is the one to compare with. `--kernels DIR` also writes every kernel's row there.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.rows import append_rows, print_table
from benchmarks.steps import open_trainer, run_as_command, run_process, split_options
from benchmarks.training.train_step import VARIANTS, WORKS, parse_works
from benchmarks.turns import Turn

STEPS = 3
CLASSES = (
    ("collectives", r"nccl|all_reduce_kernel|allreduce"),
    ("attention", r"attention|flash|fmha|cudnn.*sdpa"),
    ("matmuls", r"gemm|nvjet|cutlass|xmma|cublas|splitk|block_product"),
    ("copies", r"^memcpy|^memset|copy"),
)
"""Class -> what a kernel's name or operation holds, the first that fits; the others are `fusions`."""
COLUMNS = (
    "work", "variant", "milliseconds", "matmuls", "attention", "fusions", "copies", "collectives", "idle", "kernels",
)  # fmt: skip


def classify(kernel: str, operation: str) -> str:
    """The class of a kernel, by its own name and that of the operation in the program."""
    text = f"{kernel} {operation}".lower()
    return next((name for name, pattern in CLASSES if re.search(pattern, text)), "fusions")


def device_events(directory: Path) -> list[tuple[int, int, str, dict[str, str]]]:
    """(start, end, kernel, facts) of all kernels and copies on device 0, times in nanoseconds.

    Raises:
        ValueError: where the trace has no kernels of a GPU.
    """
    from jax.profiler import ProfileData

    (path,) = directory.rglob("*.xplane.pb")
    found = []
    for plane in ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU:0"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                facts = {key: str(value) for key, value in event.stats if key in ("hlo_op", "tf_op", "name")}
                found.append((int(event.start_ns), int(event.start_ns + event.duration_ns), event.name, facts))
    if not found:
        raise ValueError(f"the trace in {directory} has no kernels of a GPU: this script needs one")
    return sorted(found, key=lambda event: event[:2])


def busy_nanoseconds(events: Iterable[tuple[int, int, str, dict[str, str]]]) -> int:
    """Time in which at least one kernel runs."""
    total = reached = 0
    for start, end, *_ in events:
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summarise(events: Sequence[tuple[int, int, str, dict[str, str]]], steps: int) -> tuple[dict[str, Any], list]:
    """Milliseconds a step by class, and each kernel's count and milliseconds a step, longest first."""
    classes: dict[str, float] = defaultdict(float)
    kernels: dict[tuple[str, str, str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for start, end, kernel, facts in events:
        operation = facts.get("hlo_op", "")
        framework = facts.get("tf_op", "") or facts.get("name", "")
        found = classify(kernel, f"{operation} {framework}")
        milliseconds = (end - start) / 1e6 / steps
        classes[found] += milliseconds
        entry = kernels[found, kernel, operation, framework]
        entry[0] += 1 / steps
        entry[1] += milliseconds
    whole = (max(event[1] for event in events) - events[0][0]) / 1e6 / steps
    row = {
        "milliseconds": whole, **{name: classes.get(name, 0.0) for name in (*(c[0] for c in CLASSES), "fusions")},
        "idle": whole - busy_nanoseconds(events) / 1e6 / steps, "kernels": round(len(events) / steps),
    }  # fmt: skip
    ordered = sorted(([*key, *value] for key, value in kernels.items()), key=lambda entry: -entry[-1])
    return row, ordered


def trace_steps(overrides: Sequence[str]) -> tuple[Any, list[tuple[int, int, str, dict[str, str]]]]:
    """Return the configuration of a run, and `device_events` of `STEPS` of its steps.

    Args:
        overrides: The configuration; those that begin with `xla_` are compiler options of XLA.
    """
    import jax

    turn = Turn()
    options, settings = split_options(overrides)
    config, trainer = open_trainer(settings)
    trainer.compiler_options.update(options)
    trainer.compile(trainer.peek_batch())
    turn.wait()
    batches = trainer.batches(0)
    for _ in range(2):
        float(trainer.train_step(next(batches)[0])["loss"])
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(STEPS):
                loss = trainer.train_step(next(batches)[0])["loss"]
            float(loss)
        events = device_events(Path(directory))
    batches.close()
    return config, events


def measure(overrides: Sequence[str]) -> dict[str, Any]:
    """The row of one work, with all its kernels in `all`."""
    import jax

    config, events = trace_steps(overrides)
    row, kernels = summarise(events, STEPS)
    devices = jax.devices()
    tokens = config.train.global_batch_size * config.train.sequence_length
    return {
        "implementation": "jaxstack", "device": devices[0].device_kind, "devices": len(devices), **row,
        "tokens_per_second_per_device": 1e3 * tokens / row["milliseconds"] / len(devices), "all": kernels,
    }  # fmt: skip


def main() -> None:
    """Traces each work; a row is kept as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="+", help=f"of: {', '.join(WORKS)}")
    parser.add_argument("--variants", nargs="+", default=["unrolled"], choices=VARIANTS, metavar="VARIANT",
        help=f"ways to run, of: {'; '.join(VARIANTS)}")  # fmt: skip
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value",
        help="of the configuration (section.key=value) or an option of XLA (xla_...=value)")  # fmt: skip
    parser.add_argument("--kernels", type=Path, help="folder for every kernel's row")
    parser.add_argument("--timeout", type=float, default=400, help="seconds a measurement may take")
    args = parse_works(parser)
    rows = []
    for work in args.works:
        for variant in args.variants:
            named = ", ".join([variant, *args.set])
            overrides = [*WORKS[work], *VARIANTS[variant], *args.set]
            found = run_process(f"{work}, {named}", [__file__, "--worker", *overrides], args.timeout)
            if not found:
                continue
            kernels = found.pop("all")
            rows.append({"work": work, "variant": named, **found})
            append_rows("step_profile", rows[-1:])
            if args.kernels:
                args.kernels.mkdir(parents=True, exist_ok=True)
                path = args.kernels / (re.sub(r"[^\w.-]+", "_", f"{work}_{named}") + ".json")
                path.write_text("\n".join(json.dumps(kernel) for kernel in kernels), encoding="utf-8")
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_as_command("step_profile.py", lambda: print(json.dumps(measure(sys.argv[2:]))))
    else:
        main()
