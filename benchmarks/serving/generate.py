"""Generation with random weights: tokens/s of the first pass over the prompts, and of the steps after it.

    python benchmarks/serving/generate.py                                   # llama3-1b on a GPU, tiny on a CPU
    python benchmarks/serving/generate.py --batch 1 16 64 --variants unrolled --peers torch
    python benchmarks/serving/generate.py llama3-8b --batch 1 64 --prompt 2048 parallel.tensor=4

Greedy. A measurement is a call of `Decoder.generate`, as a user's, host and all: up to the first token it is the
prefill, from there on the steps. GB/s counts what a step must read at least: all weights in the compute dtype, and the
filled part of the cache, on average; "share" is its part of what the GPU's memory gives. The fastest of three calls
counts. With `--peers torch` a compiled PyTorch Llama with a static cache decodes the same shapes on one device
(benchmarks/peers/torch_decode.py), in a process of its own. Rows are appended to benchmarks/results/generate.jsonl.
"""

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rows import append_rows, print_table
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.sampling import Sampling
from jaxstack.distributed.device_setup import cache_compilations, start_devices
from jaxstack.models import Transformer
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.observe.throughput import peak_memory_bytes
from jaxstack.parallel import make_mesh, make_rules
from jaxstack.run.setting import decoding_layout
from jaxstack.run_config import RunConfig, load_config

CALLS = 3
VARIANTS = {"unrolled": False, "scanned": True}
VOCABULARY = 4096
"""Of presets that leave it to the tokenizer."""
READ_SPEED = {"NVIDIA H200": 4300.0}
"""GB/s at which a device's memory is read at most, as measured."""


def make_decoder(config: RunConfig, given: bool) -> Decoder:
    """The model with random weights on its mesh."""
    model = config.model.model_copy(update={"vocab_size": config.model.vocab_size or VOCABULARY, "remat": "none"})
    parallel = decoding_layout(config, jax.device_count(), chosen=given)
    mesh = make_mesh(parallel, jax.devices()[: math.prod(parallel.degrees.values())])
    rules = make_rules(mesh)
    dtype = jnp.dtype(config.precision.compute_dtype(jax.devices()[0].platform))
    module = ModuleArrays(lambda rngs: Transformer(model, rngs, dtype=dtype))
    shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules))
    params, non_params = jax.jit(module.init, out_shardings=(shardings, None))(jax.random.key(0))
    decoder = Decoder(module, params, non_params, rules)
    del params  # The decoder frees those that it joins.
    decoder.join_projections()
    return decoder


def bytes_read(decoder: Decoder, batch: int, prompt: int, tokens: int) -> int:
    """Return the bytes that a step must read on all devices, on average.

    They are those of the weights without the input embedding, and of the keys and values of the tokens so far.
    """
    model = decoder.module.merge(decoder.params, decoder.non_params)
    cache = jax.eval_shape(lambda: model.make_cache(batch, prompt + tokens // 2).layers)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((decoder.params, cache)))
    table = decoder.params["embedding"]["table"]
    return size - (0 if decoder.config.tie_word_embeddings else table.size * table.dtype.itemsize)


def measure(decoder: Decoder, batch: int, prompt: int, tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and of each further step; the fastest of a few calls."""
    prompts = np.random.default_rng(0).integers(0, decoder.config.vocab_size, (batch, prompt)).tolist()
    samples = []
    for _ in range(1 + CALLS):
        began = time.perf_counter()
        steps = decoder.generate(prompts, tokens, Sampling(temperature=0.0))
        next(steps)
        shown = time.perf_counter()
        for _ in steps:
            pass
        samples.append((shown - began, (time.perf_counter() - shown) / (tokens - 1)))
    first, further = zip(*samples[1:], strict=True)  # the first call compiles
    return min(first), min(further)


def rows_of(decoder: Decoder, name: str, variant: str, batch: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for the prefill and one for the steps."""
    first, further = measure(decoder, batch, args.prompt, args.tokens)
    devices = decoder.rules.mesh.size
    layout = {axis: degree for axis, degree in decoder.rules.mesh.shape.items() if degree > 1}
    words = " ".join(f"{axis}{degree}" for axis, degree in layout.items())
    work = f"generate {name}{' ' * bool(words)}{words} batch {batch} prompt {args.prompt} {decoder.module.dtype}"
    common = {
        "implementation": "jaxstack", "variant": variant, "device": jax.devices()[0].device_kind, "devices": devices,
        "peak_memory_bytes": peak_memory_bytes(),
    }  # fmt: skip
    read = bytes_read(decoder, batch, args.prompt, args.tokens)
    return [
        {
            "work": f"{work}: prefill", **common, "milliseconds": 1e3 * first,
            "tokens_per_second_per_device": batch * args.prompt / first / devices,
        },
        {
            "work": f"{work}: steps", **common, "milliseconds": 1e3 * further,
            "tokens_per_second_per_device": batch / further / devices,
            **bandwidth(read / further / devices),
        },
    ]  # fmt: skip


def bandwidth(bytes_per_second: float) -> dict[str, float]:
    """GB/s of a device, and their share of what its memory gives, where that is known."""
    limit = READ_SPEED.get(jax.devices()[0].device_kind)
    shown = {"gigabytes_per_second": bytes_per_second / 1e9}
    return shown if limit is None else {**shown, "share": bytes_per_second / 1e9 / limit}


def rows_of_torch(decoder: Decoder, name: str, overrides: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for the steps of compiled PyTorch at each batch; prints the end of its errors if it fails."""
    if importlib.util.find_spec("torch") is None:
        print("no rows of torch, which is not installed", flush=True)
        return []
    model = [f"model.preset={name}", f"model.vocab_size={decoder.config.vocab_size}", *overrides]
    sizes = ["--batch", *args.batch, "--prompt", args.prompt, "--tokens", args.tokens]
    command = [sys.executable, "-m", "benchmarks.peers.torch_decode", *model, *map(str, sizes)]
    root = str(Path(__file__).resolve().parents[2])
    # The peer's configuration needs no device of JAX. With PYTHONSAFEPATH the working directory is not on the path.
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root, env=environment)
    if done.returncode:
        print(f"torch ended with {done.returncode}:", *done.stderr.strip().splitlines()[-20:], sep="\n", flush=True)
    rows = []
    for found in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")):
        batch = found["batch"]
        seconds = found["seconds"]
        rows.append({
            "work": f"generate {name} batch {batch} prompt {args.prompt} bfloat16: steps",
            "implementation": found["implementation"], "variant": "torch, compiled",
            "device": jax.devices()[0].device_kind, "devices": 1, "milliseconds": 1e3 * seconds,
            "tokens_per_second_per_device": batch / seconds,
            **bandwidth(bytes_read(decoder, batch, args.prompt, args.tokens) / seconds),
        })  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="PRESET | section.key=value", help="models; parallel, precision")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="texts at a time")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="ways to run")
    parser.add_argument("--peers", nargs="*", default=[], choices=["torch"], help="peers measured in the same run")
    args = parser.parse_intermixed_args()
    overrides = [word for word in args.words if "=" in word]
    simulated = load_config(None, [word for word in overrides if word.startswith("parallel.simulate")])
    start_devices(simulated.parallel.simulate_devices)
    cache_compilations()
    presets = [word for word in args.words if "=" not in word]
    rows = []
    for name in presets or ["tiny" if jax.default_backend() == "cpu" else "llama3-1b"]:
        for variant in args.variants:
            shape = [f"model.preset={name}", f"model.scan_layers={VARIANTS[variant]}", "train.global_batch_size=4096"]
            config = load_config(None, [*shape, *overrides])
            given = any(degree != 1 for degree in config.parallel.degrees.values())
            decoder = make_decoder(config, given)
            for batch in args.batch:
                rows += rows_of(decoder, name, variant, batch, args)
            if "torch" in args.peers and variant == args.variants[-1]:
                rows += rows_of_torch(decoder, name, overrides, args)
    append_rows("generate", rows)
    speeds = ("milliseconds", "tokens_per_second_per_device", "gigabytes_per_second", "share", "devices")
    print_table(rows, ("work", "variant", *speeds))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
