"""Every layout that fits one or two GPUs, measured, beside what the planner predicts.

    python benchmarks/planner.py                      # all GPUs of this machine, at most four minutes
    python benchmarks/planner.py gpt2-124m --devices 1 --limit 500     # one model, longer: more of its layouts
    python benchmarks/planner.py --tiny --limit 40                     # a tiny model on simulated CPU devices

Each model has a process of its own and its share of the time. It measures the planner's choice, then the fastest layout
of each kind (axes, ZeRO stage, schedule, rematerialisation, with microbatches or without), then all others, until the
time is used up. A layout that fails, for example for lack of memory, gives a row with `failed` and no time.
Rows: `milliseconds`, `predicted_milliseconds`, `error` (predicted by measured, minus 1), `compiled_bytes` (memory by
the compiler), `predicted_bytes`, `rank` (by the predicted time). The last lines give, for each model, the time of the
planner's choice relative to the best measured one, and the median absolute error.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rows import append_rows, print_table, require_commit
from benchmarks.steps import SYNTHETIC, first_gpus, open_trainer, rates, time_steps
from jaxstack.distributed.device_setup import start_devices
from jaxstack.launch.supervisor import count_gpus
from jaxstack.plan.cluster import cluster_of_devices, parse_cluster
from jaxstack.plan.forecast import Forecast, LayoutModel
from jaxstack.plan.layouts import enumerate_layouts
from jaxstack.plan.search import describe_degrees, search_layouts
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


def kind_of(forecast: Forecast) -> tuple[Any, ...]:
    """Return what makes a layout another kind: axes, ZeRO stage, policy, schedule, and if there are microbatches."""
    config, parallel = forecast.config, forecast.config.parallel
    several = (parallel.microbatches or config.train.gradient_accumulation) > 1
    return (*(d > 1 for d in parallel.degrees.values()), parallel.zero, config.model.remat, parallel.schedule, several)


def candidates(config: RunConfig, devices: int, device_kind: str) -> list[tuple[int, Forecast]]:
    """Return (rank by predicted time, forecast) of all layouts that fit, in the order in which to measure them.

    The planner's choice is the first, then the fastest layout of each kind, then all others.
    """
    cluster = cluster_of_devices(device_kind, devices, one_host=True) or parse_cluster(f"{devices} h200")
    layouts, _ = enumerate_layouts(config, devices)
    model = LayoutModel(config, cluster)
    fitting = layouts.select(model.fits(layouts))
    best = search_layouts(config, cluster, top=1).best
    ranked = sorted(model.forecasts(fitting), key=lambda one: (one.config != best.config, one.step_seconds))
    numbered = list(enumerate(ranked, start=1))
    first = {kind_of(one): (rank, one) for rank, one in reversed(numbered)}
    chosen = sorted(first.values(), key=lambda pair: pair[0])
    taken = {rank for rank, _ in chosen}
    return [*chosen, *((rank, one) for rank, one in numbered if rank not in taken)]


def measure(forecast: Forecast, overrides: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return the measured fields of one layout, or the reason why it failed."""
    import jax

    from jaxstack.observe.what_ran import compiler_memory_estimate

    try:
        config, trainer = open_trainer(overrides)
        began = time.perf_counter()
        compiled = trainer.compile(trainer.peek_batch())
        compile_seconds = time.perf_counter() - began
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


def work_on(model: str, args: argparse.Namespace) -> None:
    """Measure the layouts of one model in this process until its time is used up; print a row a line."""
    began = time.monotonic()
    settings = [*(TINY_MODEL[model] if args.tiny else MODELS[model]), *args.set]
    simulated = [f"parallel.simulate_devices={args.devices}"] if args.tiny else []
    start_devices(args.devices if args.tiny else None)
    config = load_config(None, [*SYNTHETIC, *settings], report=lambda _: None)
    for rank, forecast in candidates(config, args.devices, args.device_kind):
        if time.monotonic() - began > args.limit:
            break
        overrides = [*settings, *overrides_of(forecast.config), *simulated]
        row = {
            "work": f"{model}, {args.devices} GPU{'s' * (args.devices > 1)}", "implementation": "jaxstack",
            "variant": describe_degrees(forecast.config), "rank": rank, "device": args.device_kind,
            "devices": args.devices, "predicted_milliseconds": 1e3 * forecast.step_seconds,
            "predicted_bytes": forecast.memory_bytes, "overrides": overrides,
            **measure(forecast, overrides, args.seconds),
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        gc.collect()


def run_model(model: str, limit: float, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows that a process of its own prints about one model; it is ended some time after its limit."""
    command = [sys.executable, __file__, model, "--worker", f"--limit={limit}", f"--devices={args.devices}"]
    command += [f"--seconds={args.seconds}", f"--device-kind={args.device_kind}", *(["--tiny"] if args.tiny else [])]
    command += ["--set", *args.set] if args.set else []
    variables = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",
        **os.environ,
        **({} if args.tiny else first_gpus(args.devices)),
    }
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        timer = threading.Timer(limit + args.grace, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        timer.cancel()


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
    script, names = "tiny/planner" if args.tiny else "planner", args.models or list(known)
    require_commit(script)
    began, rows = time.monotonic(), []
    for done, name in enumerate(names):
        left = args.limit - (time.monotonic() - began)
        for row in run_model(name, left / (len(names) - done), args):
            rows.append(row)
            append_rows(script, [row])
            print(f"{row['work']}, {row['variant']}: {row.get('milliseconds') or row['failed']}", flush=True)
    print_table(rows, COLUMNS)
    summarise(rows)
    if not rows:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
