"""Every layout that fits one or two GPUs, measured, beside what the planner predicts.

    python benchmarks/planning/planner.py                     # all GPUs of this machine, at most four minutes
    python benchmarks/planning/planner.py gpt2-124m --devices 1 --limit 500    # one model, longer: more of its layouts
    python benchmarks/planning/planner.py --together 4 --new  # four layouts of each model without a row, together
    python benchmarks/planning/planner.py --tiny --limit 40                    # a tiny model on simulated CPU devices

Each model has a process of its own and its share of the time. It measures the planner's choice, then the fastest layout
of each set of axes, then that of each kind (axes, ZeRO stage, schedule, rematerialisation, with microbatches or
without), then all others, until the time is used up. `--together N` measures the first N of these for each model, each
in a process of its own; all compile at the same time and are measured one by one (benchmarks/turns.py). A forecast is
made before its layout is measured. A layout that fails, for example for lack of memory, gives a row with `failed` and
no time.
Rows: `milliseconds`, `predicted_milliseconds`, `error` (predicted by measured, minus 1), `compiled_bytes` (memory by
the compiler), `predicted_bytes`, `rank` (by the predicted time). The last lines give, for each model, the time of the
planner's choice relative to the best measured one, and the median absolute error.
"""

import argparse
import functools
import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.rows import RESULTS, append_rows, print_table, require_commit
from benchmarks.steps import SYNTHETIC, first_gpus, open_trainer, rates, time_steps
from benchmarks.turns import Turn, run_together, turns
from jaxstack.cost_model.cluster import cluster_of_devices, parse_cluster
from jaxstack.cost_model.forecast import Forecast, LayoutModel
from jaxstack.cost_model.layouts import enumerate_layouts
from jaxstack.cost_model.search import describe_degrees, search_layouts
from jaxstack.distributed.device_setup import start_devices
from jaxstack.distributed.parent_death import die_with_parent
from jaxstack.launch.supervisor import count_gpus
from jaxstack.run_config import RunConfig, load_config

MODELS = {
    "gpt2-124m": ["model.preset=gpt2-124m", "train.global_batch_size=64", "train.sequence_length=1024"],
    "llama3-1b of 8 layers": [
        "model.preset=llama3-1b", "model.num_layers=8", "train.global_batch_size=4", "train.sequence_length=8192",
    ],
    "qwen3-30b-a3b of 2 layers": [
        "model.preset=qwen3-30b-a3b", "model.num_layers=2", "train.global_batch_size=4", "train.sequence_length=4096",
    ],
}  # fmt: skip
"""Three models that compile within seconds: head_dim 64 and 128, dense and with experts."""
TINY_MODEL = {
    "tiny": ["model.preset=tiny", "model.vocab_size=512", "train.global_batch_size=4", "train.sequence_length=64"]
}
COLUMNS = (
    "work",
    "variant",
    "rank",
    "milliseconds",
    "predicted_milliseconds",
    "error",
    "compiled_bytes",
    "predicted_bytes",
)


def overrides_of(config: RunConfig) -> list[str]:
    """Return the overrides that give a layout."""
    parallel = config.parallel
    chosen = {f"parallel.{axis}": degree for axis, degree in parallel.degrees.items() if degree > 1}
    chosen |= {"parallel.zero": parallel.zero, "parallel.sequence": str(parallel.sequence).lower()}
    if parallel.pipeline > 1:
        chosen |= {"parallel.microbatches": parallel.microbatches, "parallel.pipeline_schedule": parallel.schedule}
    chosen |= {"train.gradient_accumulation": config.train.gradient_accumulation, "model.remat": config.model.remat}
    return [f"{name}={value}" for name, value in chosen.items()]


def axes_of(forecast: Forecast) -> tuple[bool, ...]:
    """Return for each mesh axis whether a layout uses it."""
    return tuple(degree > 1 for degree in forecast.config.parallel.degrees.values())


def kind_of(forecast: Forecast) -> tuple[Any, ...]:
    """Return what makes a layout another kind: axes, ZeRO stage, policy, schedule, and if there are microbatches."""
    config = forecast.config
    parallel = forecast.config.parallel
    several = (parallel.microbatches or config.train.gradient_accumulation) > 1
    return (*axes_of(forecast), parallel.zero, config.model.remat, parallel.schedule, several)


def candidates(config: RunConfig, devices: int, device_kind: str) -> list[tuple[int, Forecast]]:
    """Return (rank by predicted time, forecast) of all layouts that fit, in the order in which to measure them.

    The planner's choice is the first, then the fastest layout of each set of axes and of each kind, then all others.
    """
    cluster = cluster_of_devices(device_kind, devices, one_host=True) or parse_cluster(f"{devices} h200")
    layouts, _ = enumerate_layouts(config, devices)
    model = LayoutModel(config, cluster)
    fitting = layouts.select(model.fits(layouts))
    best = search_layouts(config, cluster, top=1).best
    ranked = sorted(model.forecasts(fitting), key=lambda one: (one.config != best.config, one.step_seconds))
    numbered = list(enumerate(ranked, start=1))
    ordered: dict[int, tuple[int, Forecast]] = {}
    for key in (axes_of, kind_of, id):
        first = {key(one): (rank, one) for rank, one in reversed(numbered)}
        for pair in sorted(first.values(), key=lambda pair: pair[0]):
            ordered.setdefault(pair[0], pair)
    return list(ordered.values())


def measured_before(work: str) -> set[tuple[str, ...]]:
    """Return the overrides of all layouts of a work that have a row."""
    path = RESULTS / "planner.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return {tuple(row["overrides"]) for row in rows if row["work"] == work}


def measure(forecast: Forecast, overrides: Sequence[str], seconds: float, turn: Turn) -> dict[str, Any]:
    """Return the measured fields of one layout, or the reason why it failed."""
    import jax

    from jaxstack.observe.what_ran import compiler_memory_estimate

    try:
        config, trainer = open_trainer(overrides)
        began = time.perf_counter()
        compiled = trainer.compile(trainer.peek_batch())
        compile_seconds = time.perf_counter() - began
        turn.wait()
        batches = trainer.batches(0)
        times = time_steps(lambda: trainer.train_step(next(batches)[0])["loss"], seconds)
        batches.close()
        memory = compiler_memory_estimate(compiled)
    except Exception as error:  # one layout that fails, for lack of memory or by a bug, must not end the others
        return {"failed": str(error).splitlines()[0][:300] if str(error) else type(error).__name__}
    rate = rates(config, times["milliseconds"], jax.device_count(), jax.devices()[0].device_kind)
    error = 1e3 * forecast.step_seconds / times["milliseconds"] - 1
    return {
        **rate,
        **times,
        "compile_seconds": compile_seconds,
        "compiled_bytes": memory.get("predicted_bytes"),
        "error": error,
    }


def chosen_layouts(model: str, args: argparse.Namespace) -> Iterator[tuple[int, Forecast, list[str]]]:
    """Yield (rank, forecast, overrides) of the layouts of a model that this process measures, in their order."""
    settings = [*(TINY_MODEL[model] if args.tiny else MODELS[model]), *args.set]
    config = load_config(None, [*SYNTHETIC, *settings], report=lambda _: None)
    before = measured_before(work_name(model, args)) if args.new else set()
    found = ((rank, one, [*settings, *overrides_of(one.config)]) for rank, one in
             candidates(config, args.devices, args.device_kind))  # fmt: skip
    wanted = (layout for layout in found if tuple(layout[2]) not in before)
    yield from wanted if args.nth is None else itertools.islice(wanted, args.nth, args.nth + 1)


def work_name(model: str, args: argparse.Namespace) -> str:
    """Return the name of a model's rows, which has the number of GPUs."""
    return f"{model}, {args.devices} GPU{'s' * (args.devices > 1)}"


def work_on(model: str, args: argparse.Namespace) -> None:
    """Measure the layouts of one model in this process until its time is used up; print a row a line."""
    began = time.monotonic()
    turn = Turn()
    simulated = [f"parallel.simulate_devices={args.devices}"] if args.tiny else []
    start_devices(args.devices if args.tiny else None)
    for rank, forecast, overrides in chosen_layouts(model, args):
        if time.monotonic() - began > args.limit:
            break
        row = {
            "work": work_name(model, args), "implementation": "jaxstack",
            "variant": describe_degrees(forecast.config), "rank": rank, "device": args.device_kind,
            "devices": args.devices, "predicted_milliseconds": 1e3 * forecast.step_seconds,
            "predicted_bytes": forecast.memory_bytes, "overrides": [*overrides, *simulated],
            **measure(forecast, [*overrides, *simulated], args.seconds, turn),
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        gc.collect()


def run_model(
    model: str,
    limit: float,
    args: argparse.Namespace,
    environment: Mapping[str, str] | None = None,
    nth: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the rows that a process of its own prints about one model; it is ended some time after its limit.

    Args:
        model: a name of `MODELS`.
        limit: seconds after which no further layout is started.
        args: the command's arguments.
        environment: variables of the process.
        nth: place of the only layout to measure; None: all.
    """
    command = [sys.executable, __file__, model, "--worker", f"--limit={limit}", f"--devices={args.devices}"]
    command += [f"--seconds={args.seconds}", f"--device-kind={args.device_kind}", *(["--tiny"] if args.tiny else [])]
    command += [*(["--new"] if args.new else []), *([] if nth is None else [f"--nth={nth}"])]
    command += ["--set", *args.set] if args.set else []
    variables = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        **os.environ,
        **({} if args.tiny else first_gpus(args.devices)),
        **(environment or {}),
    }
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=variables, preexec_fn=die_with_parent
    ) as process:
        timer = threading.Timer(limit + args.grace, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        timer.cancel()


def run_models(models: Sequence[str], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of all models, each as soon as it is measured."""
    if args.together:
        with turns() as environment:

            def run_one(name: str, nth: int) -> list[dict[str, Any]]:
                return list(run_model(name, args.limit, args, environment, nth))

            chosen = itertools.product(range(args.together), models)
            for _, found in run_together([functools.partial(run_one, name, nth) for nth, name in chosen]):
                yield from found
        return
    began = time.monotonic()
    for done, name in enumerate(models):
        left = args.limit - (time.monotonic() - began)
        yield from run_model(name, left / (len(models) - done), args)


def summarise(rows: Sequence[dict[str, Any]]) -> None:
    """Print for each model how good the planner's choice is, and the error of the predicted times."""
    for work in dict.fromkeys(row["work"] for row in rows):
        done = [row for row in rows if row["work"] == work and "failed" not in row]
        if not done:
            print(f"{work}: no layout ran", flush=True)
            continue
        best = min(row["milliseconds"] for row in done)
        error = median(abs(row["error"]) for row in done)
        choice = next((row for row in done if row["rank"] == 1), None)
        shown = "the planner's choice failed" if choice is None else (
            f"the planner's choice takes {choice['milliseconds'] / best:.3f} of the best of {len(done)} layouts"
        )  # fmt: skip
        print(f"{work}: {shown}; median error of the predicted times {100 * error:.1f} %", flush=True)


def main() -> None:
    """Measure layouts until the time is used up; a row is appended as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"models (default: all): {', '.join(MODELS)}")
    parser.add_argument("--devices", type=int, help="the first so many GPUs; left out: all (two with --tiny)")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of each measurement after compilation")
    parser.add_argument("--limit", type=float, default=210, help="seconds for all models, after which none is started")
    parser.add_argument("--grace", type=float, default=25, help="seconds after a model's limit until it is ended")
    parser.add_argument("--together", type=int, default=0, metavar="N", help="layouts of each model, compiled together")
    parser.add_argument("--new", action="store_true", help="leave out layouts that have a row")
    parser.add_argument("--nth", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--set", nargs="*", default=[], metavar="section.key=value", help="for every layout")
    parser.add_argument("--device-kind", default="NVIDIA H200", help="jax's name of the GPU, for the prediction")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on simulated CPU devices; rows go to tiny/")
    parser.add_argument("--worker", action="store_true", help="measure one model in this process and print its rows")
    args = parser.parse_args()
    known = TINY_MODEL if args.tiny else MODELS
    unknown = [name for name in args.models if name not in known]
    if unknown:
        parser.error(f"unknown models: {', '.join(unknown)}; known: {', '.join(known)}")
    if args.worker:
        work_on(args.models[0], args)
        return
    args.devices = args.devices or (2 if args.tiny else count_gpus())
    if args.devices < 1:
        parser.error("no GPU was found; --tiny runs on simulated CPU devices")
    script = "tiny/planner" if args.tiny else "planner"
    require_commit(script)
    rows: list[dict[str, Any]] = []
    for row in run_models(args.models or list(known), args):
        rows.append(row)
        append_rows(script, [row])
        print(f"{row['work']}, {row['variant']}: {row.get('milliseconds') or row['failed']}", flush=True)
    print_table(rows, COLUMNS)
    summarise(rows)
    if not rows:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
