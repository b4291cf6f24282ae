"""MaxText's training step on synthetic tokens, at the sizes of a `jaxstack.models.ModelConfig` that is a Llama 3.

MaxText runs in a process of its own, layers unrolled, without rematerialisation unless that is asked for, attention by
cuDNN; the times are those that it prints.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.clocks import GpuClocks
from benchmarks.sustained import SECONDS, SETTLED_FRACTION, Block, summarize_blocks

WARMUP = 5
FASTEST_FLOPS = 800e12
"""Model FLOP/s of one device that MaxText does not exceed; chooses a number of steps that lasts long enough."""
LINE = re.compile(r"completed step: (\d+), seconds: ([\d.]+),.*?loss: ([\d.]+)")
NO_REMAT = 1.5e9
"""Layers x width x tokens a device up to which MaxText's activations fit an H200."""
RECIPE = (
    "latency_hiding_scheduler=true", "triton_gemm=false", "command_buffer=", "highest_priority_async_stream=true",
    "while_loop_double_buffering=true",
)  # fmt: skip
"""Of XLA's options `xla_gpu_enable_...`, those of MaxText's recipe for one host of H100s, configs/gpu/a3."""
COMBINED = {"all_reduce": 134217728, "all_gather": 134217728, "reduce_scatter": 67108864}
"""That recipe's bytes up to which a kind of collective is combined; it pipelines each of them too."""


def arguments_of(config: Any, folder: str, steps: int) -> list[str]:
    """Return MaxText's settings for a run's configuration.

    Raises:
        SystemExit: This peer does not cover the layout or the model.
    """
    model = config.model
    train = config.train
    parallel = config.parallel
    degrees = {axis: degree for axis, degree in parallel.degrees.items() if degree > 1}
    llama = model.moe is None and model.mlp == "gated" and not model.tie_word_embeddings and model.positions == "rope"
    if not llama or not set(degrees) <= {"fsdp", "data"}:
        raise SystemExit("the MaxText peer covers Llama 3 on one device, or with data or fsdp.")
    rows = train.global_batch_size / (parallel.fsdp * parallel.data)
    few = model.num_layers * model.hidden_size * rows * train.sequence_length <= NO_REMAT
    transformer_engine = importlib.util.find_spec("transformer_engine") is not None
    settings = {
        "run_name": "peer", "base_output_directory": folder, "hardware": "gpu", "dataset_type": "synthetic",
        "enable_checkpointing": False, "enable_tensorboard": False, "steps": steps, "decoder_block": "llama2",
        "base_emb_dim": model.hidden_size, "base_num_decoder_layers": model.num_layers,
        "base_num_query_heads": model.num_heads, "base_num_kv_heads": model.kv_heads, "head_dim": model.width_per_head,
        "base_mlp_dim": model.intermediate_size, "vocab_size": model.vocab_size, "logits_via_embedding": False,
        "rope_max_timescale": int(model.rope_theta), "per_device_batch_size": rows,
        "max_target_length": train.sequence_length, "ici_fsdp_parallelism": parallel.fsdp,
        "ici_data_parallelism": parallel.data, "scan_layers": not few, "remat_policy": "none" if few else "minimal",
        "attention": "cudnn_flash_te" if transformer_engine else "cudnn_flash_jax",
        "quantization": "fp8" if config.precision.fp8 != "none" else "",
    }  # fmt: skip
    return [f"{name}={value}" for name, value in settings.items()]


def steps_of(config: Any, seconds: float) -> int:
    """Return a number of steps that lasts at least `seconds`, as MaxText needs it in advance."""
    from jaxstack.models import model_flops_per_token

    train = config.train
    devices = math.prod(config.parallel.degrees.values())
    flops = model_flops_per_token(config.model, train.sequence_length) * train.global_batch_size * train.sequence_length
    return WARMUP + max(15, math.ceil(seconds * FASTEST_FLOPS * devices / flops))


def read_log(text: str) -> dict[str, Any]:
    """Return the sustained time of a step and the losses, from what MaxText printed.

    Raises:
        SystemExit: The log has no more steps than the warm-up.
    """
    steps = [(float(seconds), float(loss)) for _, seconds, loss in LINE.findall(text)]
    if len(steps) <= WARMUP:
        raise SystemExit(f"MaxText printed {len(steps)} steps; more than {WARMUP} are needed:\n{text[-2000:]}")
    ends = itertools.accumulate(seconds for seconds, _ in steps[WARMUP:])
    blocks = [Block(end, seconds) for end, (seconds, _) in zip(ends, steps[WARMUP:], strict=True)]
    return {**summarize_blocks(blocks), "first_loss": steps[0][1], "last_loss": steps[-1][1]}


def environment() -> dict[str, str]:
    """Return MaxText's environment: its recipe's XLA options unless XLA_FLAGS is set, no Google Cloud services."""
    flags = [f"--xla_gpu_enable_{option}" for option in RECIPE]
    flags += [f"--xla_gpu_{kind}_combine_threshold_bytes={size}" for kind, size in COMBINED.items()]
    flags += [f"--xla_gpu_pipeline_{kind}=on" for kind in COMBINED]
    return {"XLA_FLAGS": " ".join(flags), "DECOUPLE_GCLOUD": "TRUE", **os.environ}


def run_with_clocks(command: Sequence[str], variables: Mapping[str, str], steps: int) -> tuple[str, dict[str, float]]:
    """Run MaxText; return what it printed, and the GPUs' clock and power in the settled part of its steps.

    Raises:
        SystemExit: MaxText failed.
    """
    lines = []
    done = 0
    clocks = None
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=dict(variables)) as process:
        for line in process.stdout or ():
            lines.append(line)
            done += bool(LINE.search(line))
            if clocks is None and done >= WARMUP + SETTLED_FRACTION * (steps - WARMUP):
                clocks = GpuClocks()
                clocks.__enter__()
            elif clocks is not None and done == steps:
                clocks.__exit__(None, None, None)
                done += 1  # the clocks are read once
    text = "".join(lines)
    if process.returncode:
        raise SystemExit(f"MaxText failed:\n{text[-3000:]}")
    return text, clocks.row if clocks else {}


def measure(config: Any, seconds: float = SECONDS) -> dict[str, Any]:
    """Measure the sustained time of a step in a process of its own; return it with losses, XLA flags and title."""
    spec = importlib.util.find_spec("maxtext")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("MaxText is not installed as the package `maxtext`.")
    base = Path(spec.submodule_search_locations[0]) / "configs" / "base.yml"
    variables = environment()
    steps = steps_of(config, seconds)
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_of(config, folder, steps)
        command = [sys.executable, "-m", "maxtext.trainers.pre_train.train", str(base), *arguments]
        text, clocks = run_with_clocks(command, variables, steps)
    chosen = dict(argument.split("=", 1) for argument in arguments)
    layers = "scanned" if chosen["scan_layers"] == "True" else "unrolled"
    title = f"MaxText {importlib.metadata.version('maxtext')}, {layers}, remat {chosen['remat_policy']}"
    found = {"implementation": f"{title}, {chosen['attention']}", **read_log(text), **clocks}
    return {**found, "environment": {"XLA_FLAGS": variables["XLA_FLAGS"]}}
