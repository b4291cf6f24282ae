"""Whole training steps, each measured in a process of its own, so that no framework holds memory while another runs.

train_step.py and parallel.py call `run_worker`, which starts this file as a program. ablation.py and convergence.py,
which train on real text, use `open_run` and `run_process`.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.arguments import positive
from benchmarks.sustained import SECONDS, block_steps, energy_fields, measure_blocks
from benchmarks.turns import Turn

WARMUP = 3
"""Steps before the measurement; the last one is timed, to choose the number of steps in a block."""
SYNTHETIC = ("data.sources=[{path: synthetic}]", "data.packing=false")
COLUMNS = (
    "work", "implementation", "variant", "tokens_per_second_per_device", "start_tokens_per_second_per_device",
    "tflops_per_device", "mfu", "milliseconds", "sm_mhz", "watts", "joules_per_step", "peak_memory_bytes",
    "compile_seconds", "last_loss",
)  # fmt: skip
PACKED = "packed_base="
"""Prefix of the word that asks `open_trainer` for a packed base."""
TINY = ("model.preset=tiny", "model.num_heads=4", "model.vocab_size=512", "model.rope_scaling=null")
"""Overrides that make any work's model small enough for simulated CPU devices."""


def run_worker(
    title: str,
    implementation: str,
    overrides: Sequence[str],
    timeout: float,
    environment: Mapping[str, str] | None = None,
    seconds: float = SECONDS,
) -> dict[str, Any] | None:
    """Return a row without `work` and `variant`, or None if the measurement fails. See `run_process`.

    Args:
        title: Name of the measurement, for messages.
        implementation: A name of `IMPLEMENTATIONS`.
        overrides: The run's configuration, `section.key=value`.
        timeout: Seconds after which the process is killed.
        environment: Variables that are set for the process.
        seconds: Length of the measurement, without compilation.
    """
    command = [__file__, f"--seconds={seconds}", implementation, *overrides]
    return run_process(title, command, timeout, environment)


def run_process(
    title: str, arguments: Sequence[str], timeout: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """Return the row that a Python program prints last; print the reason and return None if the program fails."""
    # JAX's default of three quarters of a GPU's memory is too little for the largest works.
    variables = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", **os.environ, **(environment or {})}
    command = [sys.executable, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=variables)
    except subprocess.TimeoutExpired:
        print(f"{title}: no result within {timeout:.0f} s", flush=True)
        return None
    if done.returncode:
        print(f"{title} failed: {done.stderr[-1500:].strip()}", flush=True)
        return None
    row = json.loads(done.stdout.splitlines()[-1])
    print(f"{title}: {row['tokens_per_second_per_device']:,.0f} tokens/s/device", flush=True)
    return row


def first_gpus(count: int) -> dict[str, str]:
    """Return the environment variable that restricts a process to the first `count` GPUs that are visible here."""
    known = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = known.split(",") if known else map(str, range(count))
    return {"CUDA_VISIBLE_DEVICES": ",".join([*names][:count])}


def time_steps(step: Callable[[], Any], seconds: float = SECONDS) -> dict[str, Any]:
    """Measure the sustained time of a step, see `measure_blocks`.

    Args:
        step: Starts one step; `float(step())` waits for it and is its loss.
        seconds: Length of the measurement.

    Returns:
        The fields of `measure_blocks`, and the first and last loss.
    """
    losses = [float(step()) for _ in range(WARMUP - 1)]
    began = time.perf_counter()
    losses.append(float(step()))
    count = block_steps(time.perf_counter() - began, seconds)

    def run_steps(steps: int) -> None:
        for _ in range(steps - 1):
            step()
        losses.append(float(step()))

    measured = measure_blocks(run_steps, count, seconds)
    return {**measured, "first_loss": losses[0], "last_loss": losses[-1]}


def rates(config: Any, milliseconds: float, devices: int, device: str, saved: float = 0.0) -> dict[str, Any]:
    """Return the fields of a row that follow from the time of a step: tokens/s, TFLOP/s and MFU of one device.

    Args:
        config: The run's configuration.
        milliseconds: Time of a step.
        devices: Number of devices.
        device: Their kind.
        saved: FLOPs per token that frozen parameters save, see `flops_saved_per_token`.
    """
    from jaxstack.models import model_flops_per_token
    from jaxstack.observe.throughput import throughput

    train = config.train
    flops = model_flops_per_token(config.model, train.sequence_length) - saved
    tokens = train.global_batch_size * train.sequence_length
    found = throughput(tokens, milliseconds / 1e3, devices, flops, device)
    return {
        "device": device, "devices": devices, "tokens_per_second_per_device": found["tokens_per_second_per_device"],
        "tflops_per_device": found["model_tflops_per_device"], "mfu": found["mfu"],
    }  # fmt: skip


def sustained_rates(
    config: Any, times: Mapping[str, Any], devices: int, device: str, saved: float = 0.0
) -> dict[str, Any]:
    """Return `rates` of a sustained measurement, tokens/s at its start, and joules per step."""
    start = rates(config, times["start_milliseconds"], devices, device)["tokens_per_second_per_device"]
    settled = rates(config, times["milliseconds"], devices, device, saved)
    return {**settled, "start_tokens_per_second_per_device": start, **energy_fields(times, devices)}


def open_run(overrides: Sequence[str]) -> tuple[Any, Any]:
    """Return the resolved configuration of a run, and its data."""
    from jaxstack.data.build_shards import available_cores
    from jaxstack.data.loader import open_data
    from jaxstack.distributed.device_setup import cache_compilations
    from jaxstack.run.build import resolve_model
    from jaxstack.run.setting import Setting
    from jaxstack.run_config import load_config

    config = load_config(None, list(overrides))
    config = Setting.of(config, "train").config
    cache_compilations()
    length = config.train.sequence_length
    workers = available_cores()
    data = open_data(config.data, sequence_length=length, seed=config.run.seed, workers=workers)
    return config.model_copy(update={"model": resolve_model(config.model, data.tokenizer.vocab_size)}), data


def open_trainer(overrides: Sequence[str]) -> tuple[Any, Any]:
    """Return the resolved configuration of a run on synthetic tokens, and its trainer.

    Args:
        overrides: The configuration; `packed_base=RECIPE` packs random weights beside adapters, see `random_base`.
    """
    from benchmarks.packed_base import random_base
    from jaxstack.module_arrays.packed_base import packed_arrays
    from jaxstack.run.build import make_trainer
    from jaxstack.run_config import load_config

    recipe = next((word.removeprefix(PACKED) for word in overrides if word.startswith(PACKED)), None)
    overrides = [word for word in overrides if not word.startswith(PACKED)]
    vocabulary = load_config(None, [*SYNTHETIC, *overrides]).model.vocab_size
    config, data = open_run([*SYNTHETIC, f"data.tokenizer.vocab_size={vocabulary}", *overrides])
    if recipe is None:
        return config, make_trainer(config, data)
    base = random_base(config.model, recipe)
    trainer = make_trainer(config, data, base=base)
    trainer.load_unsaved(packed_arrays(base.weights))
    return config, trainer


def split_options(overrides: Sequence[str]) -> tuple[dict[str, str | bool], list[str]]:
    """Separate XLA's options (`xla_...=value`) from the overrides of the configuration; return both."""
    options = dict(override.split("=", 1) for override in overrides if override.startswith("xla_"))
    values = {name: {"true": True, "false": False}.get(value, value) for name, value in options.items()}
    return values, [override for override in overrides if not override.startswith("xla_")]


def tiny(overrides: Sequence[str]) -> list[str]:
    """Return a work's overrides with a tiny model, which simulated CPU devices run in the work's own layout."""
    from jaxstack.run_config import load_config

    small = [*overrides, *TINY, "train.sequence_length=64"]
    devices = math.prod(load_config(None, small).parallel.degrees.values())
    return [*small, f"parallel.simulate_devices={devices}"]


def set_variables() -> dict[str, str]:
    """Return the environment variables that configure XLA and NCCL."""
    return {name: value for name, value in os.environ.items() if name.startswith(("XLA_", "NCCL_", "JAX_ENABLE"))}


def measure_jaxstack(overrides: Sequence[str], seconds: float = SECONDS) -> dict[str, Any]:
    """Return a row of our step; overrides that begin with `xla_` are compiler options of XLA."""
    import jax

    from jaxstack.models.count import flops_saved_per_token
    from jaxstack.observe.throughput import peak_memory_bytes

    turn = Turn()
    options, settings = split_options(overrides)
    config, trainer = open_trainer(settings)
    trainer.compiler_options.update(options)
    began = time.perf_counter()
    trainer.compile(trainer.peek_batch())
    compile_seconds = time.perf_counter() - began
    ran = trainer.describe()
    turn.wait()
    batches = trainer.batches(0)
    times = time_steps(lambda: trainer.train_step(next(batches)[0])["loss"], seconds)
    batches.close()
    saved = flops_saved_per_token(config.model, trainer.frozen_parameters())
    return {
        "implementation": "jaxstack",
        **sustained_rates(config, times, jax.device_count(), jax.devices()[0].device_kind, saved),
        **times, "peak_memory_bytes": peak_memory_bytes(), "compile_seconds": compile_seconds,
        "backends": {kernel["operation"]: kernel["backend"] for kernel in ran["kernels"]},
        "matmuls": ran.get("matmuls"), "overrides": list(overrides), "environment": set_variables(),
    }  # fmt: skip


def measure_torch(overrides: Sequence[str], seconds: float = SECONDS) -> dict[str, Any]:
    """Return a row of a compiled PyTorch model of the same shape, on one device."""
    import torch

    from benchmarks.peers.torch_step import TorchStep, make_module
    from jaxstack.run_config import load_config

    turn = Turn()
    config = load_config(None, list(overrides))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    module = make_module(config.model, config.train.sequence_length)
    step = TorchStep(module, compiled=True, device=device, autocast=torch.bfloat16)
    generator = torch.Generator(device=device).manual_seed(0)
    size = (config.train.global_batch_size, config.train.sequence_length)

    def one() -> Any:
        ids = [torch.randint(0, config.model.vocab_size, size, device=device, generator=generator) for _ in range(2)]
        return step(*ids)

    if turn.shared:
        float(one())  # compiles
    turn.wait()
    times = time_steps(one, seconds)
    name = torch.cuda.get_device_name(0) if device == "cuda" else "cpu"
    return {
        "implementation": f"PyTorch {torch.__version__} {type(module).__name__.removeprefix('Torch')}, torch.compile",
        **sustained_rates(config, times, 1, name), **times,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }  # fmt: skip


def measure_torchtitan(overrides: Sequence[str], seconds: float = SECONDS) -> dict[str, Any]:
    """Return a row of torchtitan's step."""
    from benchmarks.peers import torchtitan_step
    from jaxstack.run_config import load_config

    turn = Turn()
    config = load_config(None, list(overrides))
    found = torchtitan_step.measure(config, turn, seconds)
    devices = math.prod(config.parallel.degrees.values())
    return {**found, **sustained_rates(config, found, devices, found["device"])}


def measure_maxtext(overrides: Sequence[str], seconds: float = SECONDS) -> dict[str, Any]:
    """Return a row of MaxText's step."""
    import jax

    from benchmarks.peers import maxtext_step
    from jaxstack.run_config import load_config

    config = load_config(None, list(overrides))
    found = maxtext_step.measure(config, seconds)
    devices = math.prod(config.parallel.degrees.values())
    # JAX is started only now, because it takes GPU memory that the peer's process needs.
    return {**found, **sustained_rates(config, found, devices, jax.devices()[0].device_kind)}


IMPLEMENTATIONS: dict[str, Callable[[Sequence[str], float], dict[str, Any]]] = {
    "jaxstack": measure_jaxstack,
    "torch": measure_torch,
    "torchtitan": measure_torchtitan,
    "maxtext": measure_maxtext,
}


def main() -> None:
    """Measure one implementation; the last line printed is its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("implementation", choices=IMPLEMENTATIONS)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="overrides of the configuration")
    parser.add_argument("--seconds", type=positive(float), default=SECONDS, help="length of the measurement")
    args = parser.parse_args()
    measure = IMPLEMENTATIONS[args.implementation]
    run_as_command("steps.py", lambda: print(json.dumps(measure(args.overrides, args.seconds))))


def run_as_command(name: str, body: Callable[[], None]) -> NoReturn:
    """Run `body` and end the process as jaxstack's commands do: one message for an invalid configuration."""
    from jaxstack.cli import run_command

    sys.exit(run_command(name, body))


if __name__ == "__main__":
    main()
