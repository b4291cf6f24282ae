"""MaxText's training step on synthetic tokens, at the sizes of a `jaxstack.models.ModelConfig` that is a Llama 3.

MaxText runs in a process of its own, layers unrolled, without rematerialisation unless that is asked for, attention by
cuDNN; the times are those that it prints.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

WARMUP, STEPS = 5, 15
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


def arguments_of(config: Any, folder: str) -> list[str]:
    """MaxText's settings for a run's configuration.

    Raises:
        SystemExit: a layout or model that this peer does not cover.
    """
    model, train, parallel = config.model, config.train, config.parallel
    degrees = {axis: degree for axis, degree in parallel.degrees.items() if degree > 1}
    llama = model.moe is None and model.mlp == "gated" and not model.tie_word_embeddings and model.positions == "rope"
    if not llama or not set(degrees) <= {"fsdp", "data"}:
        raise SystemExit("the MaxText peer covers Llama 3 on one device, or with data or fsdp.")
    rows = train.global_batch_size / (parallel.fsdp * parallel.data)
    few = model.num_layers * model.hidden_size * rows * train.sequence_length <= NO_REMAT
    transformer_engine = importlib.util.find_spec("transformer_engine") is not None
    settings = {
        "run_name": "peer", "base_output_directory": folder, "hardware": "gpu", "dataset_type": "synthetic",
        "enable_checkpointing": False, "enable_tensorboard": False, "steps": WARMUP + STEPS, "decoder_block": "llama2",
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


def read_log(text: str) -> dict[str, Any]:
    """Milliseconds of a step and the losses, from what MaxText printed.

    Raises:
        SystemExit: it has fewer steps than are left out as warm-up.
    """
    steps = [(float(seconds), float(loss)) for _, seconds, loss in LINE.findall(text)]
    if len(steps) <= WARMUP:
        raise SystemExit(f"MaxText printed {len(steps)} steps; more than {WARMUP} are needed:\n{text[-2000:]}")
    times = median(seconds for seconds, _ in steps[WARMUP:])
    return {"milliseconds": 1e3 * times, "first_loss": steps[0][1], "last_loss": steps[-1][1]}


def environment() -> dict[str, str]:
    """Variables for MaxText: XLA's options as in its recipe unless some are set, no services of Google's cloud."""
    flags = [f"--xla_gpu_enable_{option}" for option in RECIPE]
    flags += [f"--xla_gpu_{kind}_combine_threshold_bytes={size}" for kind, size in COMBINED.items()]
    flags += [f"--xla_gpu_pipeline_{kind}=on" for kind in COMBINED]
    return {"XLA_FLAGS": " ".join(flags), "DECOUPLE_GCLOUD": "TRUE", **os.environ}


def measure(config: Any) -> dict[str, Any]:
    """Milliseconds of a step, the losses, XLA's options and the title, from a process of its own."""
    spec = importlib.util.find_spec("maxtext")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("MaxText is not installed as the package `maxtext`.")
    base = Path(spec.submodule_search_locations[0]) / "configs" / "base.yml"
    variables = environment()
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_of(config, folder)
        command = [sys.executable, "-m", "maxtext.trainers.pre_train.train", str(base), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    if done.returncode:
        raise SystemExit(f"MaxText failed:\n{(done.stderr or done.stdout)[-3000:]}")
    chosen = dict(argument.split("=", 1) for argument in arguments)
    layers = "scanned" if chosen["scan_layers"] == "True" else "unrolled"
    title = f"MaxText {importlib.metadata.version('maxtext')}, {layers}, remat {chosen['remat_policy']}"
    found = {"implementation": f"{title}, {chosen['attention']}", **read_log(done.stdout + done.stderr)}
    return {**found, "environment": {"XLA_FLAGS": variables["XLA_FLAGS"]}}
