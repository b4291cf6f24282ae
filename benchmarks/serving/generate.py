"""Generation with random weights: tokens/s of the first pass over the prompts, and of the steps after it.

    python benchmarks/serving/generate.py                                   # llama3-1b on a GPU, tiny on a CPU
    python benchmarks/serving/generate.py --batch 1 16 64 --variants unrolled --peers torch
    python benchmarks/serving/generate.py llama3-8b parallel.tensor=4 --batch 1 64 --prompt 2048
    python benchmarks/serving/generate.py llama3-8b parallel.tensor=2 --filled --batch 1 16 64 256 --prompt 16 \\
        --variants unrolled --all-reduce nccl xla mosaic             # steps of two GPUs, by the way they sum
    python benchmarks/serving/generate.py qwen3-next-8l qwen3-next-8l-attention --filled --batch 1 16 64 \\
        --prompt 1024 65536 --tokens 64 --variants unrolled               # a hybrid beside its Transformer

Greedy. A measurement is a call of `Decoder.generate`, as a user's, host and all: up to the first token it is the
prefill, from there on the steps. GB/s counts what a step must read at least: all weights in the compute dtype, and the
filled part of the cache, on average; "share" is its part of what the GPU's memory gives. The fastest of three calls
counts. With `--peers torch` a compiled PyTorch Llama with a static cache decodes the same shapes on one device
(benchmarks/peers/torch_decode.py), in a process of its own.

`--filled` measures the steps alone: prompts are not computed, but the cache is full of random keys, values and states
from the start, so that long contexts cost no time. Sizes that do not fit the device are named and left out. Of mixtures
no GB/s are given: which experts a step reads depends on its tokens. Rows are appended to
benchmarks/results/generate.jsonl.
"""

import argparse
import functools
import importlib.util
import itertools
import json
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

from benchmarks.distributed.all_reduce import ALL_REDUCES, AllReduce
from benchmarks.rows import append_rows, print_table
from jaxstack.compress.config import choose_methods, load_recipe
from jaxstack.compress.matrix import compressible_weights, other_parameters
from jaxstack.decoding.decode import Params
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.engine import Engine
from jaxstack.decoding.rows import Pages
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.step import Programs
from jaxstack.decoding.step_shapes import ChunkShape
from jaxstack.distributed.device_setup import cache_compilations, start_devices
from jaxstack.distributed.xla_options import translate_options
from jaxstack.errors import ConfigError
from jaxstack.models import Transformer, with_kv_cache
from jaxstack.models.layer import CacheRoom
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.observe.throughput import peak_memory_bytes
from jaxstack.parallel import StepLayout
from jaxstack.run.compress_at_load import compress_in_place
from jaxstack.run.setting import Purpose, Setting
from jaxstack.run_config import RunConfig, load_config
from jaxstack.stored.model import abstract_parameters

CALLS = 3
VARIANTS = {"unrolled": False, "scanned": True}
MODELS = {
    "qwen3-next-8l": ["model.preset=qwen3-next-80b-a3b", "model.num_layers=8", "model.moe.num_experts=128"],
    "qwen3-next-8l-attention": [
        "model.preset=qwen3-next-80b-a3b", "model.num_layers=8", "model.moe.num_experts=128",
        "model.layer_types=[full_attention]",
    ],
    "tiny-hybrid": [
        "model.preset=tiny", "model.num_layers=4", "model.layer_types=[delta, delta, delta, full_attention]",
        "model.delta={num_heads: 4, head_dim: 16, num_key_heads: 2, key_head_dim: 16}",
    ],
}  # fmt: skip
"""Name -> configuration, of models that are no preset. The Qwen3-Next shapes have 4.1 billion parameters, in six of the
first's eight layers gated DeltaNet; the second, all attention, has 1 % fewer."""
VOCABULARY = 4096
"""Of presets that leave it to the tokenizer."""
SUMS: dict[str, Any] = {"xla": "never", "mosaic": "auto"}
"""Backend of `pallas_kernels.all_reduce` -> `StepLayout.peer_sums`."""
READ_SPEED = {"NVIDIA H200": 4300.0}
"""GB/s at which a device's memory is read at most, as measured."""


class FilledPrograms(Programs):
    """Programs that compute no prompts: the cache has random contents, and the first tokens are random."""

    def make_cache(self, room: CacheRoom, params: Params, non_params: Params) -> Pages:
        leaves, tree = jax.tree.flatten(super().make_cache(room, params, non_params))

        @functools.cache
        def noise(shape: tuple[int, ...]) -> jax.Array:
            # Equal for all layers, as XLA takes seconds to compile random numbers; without a barrier it repeats them.
            return jax.lax.optimization_barrier(jax.random.normal(jax.random.key(0), shape, jnp.bfloat16))

        def filled(x: jax.Array) -> jax.Array:
            return x + noise(x.shape).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

        return tree.unflatten(map(filled, leaves))

    def forward(self, rows: Any, chunks: Any, tokens: Any, drafted: Any, recent: Any = None) -> jax.Array:
        if chunks is None:
            return super().forward(rows, chunks, tokens, drafted, recent)
        shape = (len(rows) + len(chunks), self.model.config.vocab_size or 0)
        whole = self.model.rules.sharding(jax.P())
        return jax.device_put(jax.random.normal(jax.random.key(0), shape, jnp.float32), whole)


class FilledDecoder(Decoder):
    """A decoder whose prompts are not computed: they are there after one step, so that all answers start together."""

    make_programs = FilledPrograms

    def _open_engine(self, prompts: int, longest: int, max_tokens: int) -> Engine:
        engine = super()._open_engine(prompts, longest, max_tokens)
        engine.scheduler.shapes = (ChunkShape(engine.scheduler.shapes[0].rows, longest),)
        return engine


def make_decoder(
    config: RunConfig,
    given: bool,
    kind: type[Decoder] = Decoder,
    all_reduce: AllReduce | None = None,
    recipe: str | None = None,
    purpose: Purpose = "decode",
) -> Decoder:
    """The model with random weights on its mesh.

    Args:
      all_reduce: the way to sum over `tensor`; None: the default.
      recipe: name of the recipe by which the weights are compressed; None: they are not.
      purpose: decides how the layout follows from the degrees, see `Setting.of`.
    """
    model = config.model.model_copy(update={"vocab_size": config.model.vocab_size or VOCABULARY, "remat": "none"})
    setting = Setting.of(config, purpose, chosen=given)
    rules = setting.rules
    dtype = jnp.dtype(config.precision.compute_dtype(jax.devices()[0].platform))
    cache = config.precision.kv_cache
    module = ModuleArrays(lambda rngs: with_kv_cache(Transformer(model, rngs, dtype=dtype), cache))
    shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules))
    params, non_params = jax.jit(module.init, out_shardings=(shardings, None))(jax.random.key(0))
    if recipe is not None:
        methods = choose_methods(load_recipe(recipe), compressible_weights(model), other_parameters(model))
        compress_in_place(params, methods, model, abstract_parameters(module, rules))
    sums = config.parallel.overlap if all_reduce is None else SUMS[all_reduce.implementation]
    decoder = kind(module, params, non_params, rules, layout=StepLayout(peer_sums=sums, axis_rules=setting.axis_rules))
    if all_reduce is not None:
        decoder.compiler_options = {**(decoder.compiler_options or {}), **translate_options(all_reduce.options)[0]}
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


def rows_of(
    decoder: Decoder, name: str, variant: str, batch: int, prompt: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for the prefill, unless the cache is filled without it, and one for the steps."""
    try:
        first, further = measure(decoder, batch, prompt, args.tokens)
    except (ConfigError, jax.errors.JaxRuntimeError) as error:
        print(f"no row of {name}, batch {batch}, prompt {prompt}: {str(error)[:300]}", flush=True)
        return []
    devices = decoder.rules.mesh.size
    layout = {axis: degree for axis, degree in decoder.rules.mesh.shape.items() if degree > 1}
    words = " ".join(f"{axis}{degree}" for axis, degree in layout.items())
    work = f"generate {name}{' ' * bool(words)}{words} batch {batch} prompt {prompt} {decoder.module.dtype}"
    common = {
        "implementation": "jaxstack", "variant": variant, "device": jax.devices()[0].device_kind, "devices": devices,
        "peak_memory_bytes": peak_memory_bytes(),
    }  # fmt: skip
    read = bytes_read(decoder, batch, prompt, args.tokens)
    speed = {} if decoder.config.moe else bandwidth(read / further / devices)
    prefill = {
        "work": f"{work}: prefill", **common, "milliseconds": 1e3 * first,
        "tokens_per_second_per_device": batch * prompt / first / devices,
    }  # fmt: skip
    steps = {
        "work": f"{work}: steps{', filled' * args.filled}", **common, "milliseconds": 1e3 * further,
        "tokens_per_second_per_device": batch / further / devices, **speed,
    }  # fmt: skip
    print(f"{steps['work']}: {1e3 * further:.3f} ms, {batch / further:.0f} tokens/s", flush=True)
    return [steps] if args.filled else [prefill, steps]


def bandwidth(bytes_per_second: float) -> dict[str, float]:
    """GB/s of a device, and their share of what its memory gives, where that is known."""
    limit = READ_SPEED.get(jax.devices()[0].device_kind)
    shown = {"gigabytes_per_second": bytes_per_second / 1e9}
    return shown if limit is None else {**shown, "share": bytes_per_second / 1e9 / limit}


def rows_of_torch(
    decoder: Decoder, name: str, overrides: list[str], prompt: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for the steps of compiled PyTorch at each batch; prints the end of its errors if it fails."""
    if importlib.util.find_spec("torch") is None:
        print("no rows of torch, which is not installed", flush=True)
        return []
    model = [f"model.preset={name}", f"model.vocab_size={decoder.config.vocab_size}", *overrides]
    sizes = ["--batch", *args.batch, "--prompt", prompt, "--tokens", args.tokens]
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
            "work": f"generate {name} batch {batch} prompt {prompt} bfloat16: steps",
            "implementation": found["implementation"], "variant": "torch, compiled",
            "device": jax.devices()[0].device_kind, "devices": 1, "milliseconds": 1e3 * seconds,
            "tokens_per_second_per_device": batch / seconds,
            **bandwidth(bytes_read(decoder, batch, prompt, args.tokens) / seconds),
        })  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="PRESET | section.key=value",
        help=f"models, presets or {', '.join(MODELS)}; settings of the model, parallel, precision")  # fmt: skip
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16], help="texts at a time")
    parser.add_argument("--prompt", type=int, nargs="+", default=[512], help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="ways to run")
    parser.add_argument("--peers", nargs="*", default=[], choices=["torch"], help="peers measured in the same run")
    parser.add_argument("--all-reduce", nargs="+", choices=ALL_REDUCES,
        help="ways to sum over the devices of parallel.tensor; left out: the default")  # fmt: skip
    parser.add_argument("--filled", action="store_true", help="steps alone, from a cache of random contents")
    args = parser.parse_intermixed_args()
    overrides = [word for word in args.words if "=" in word]
    simulated = load_config(None, [word for word in overrides if word.startswith("parallel.simulate")])
    start_devices(simulated.parallel.simulate_devices)
    cache_compilations()
    presets = [word for word in args.words if "=" not in word]
    rows = []
    for name in presets or ["tiny" if jax.default_backend() == "cpu" else "llama3-1b"]:
        for variant in args.variants:
            shape = [f"model.scan_layers={VARIANTS[variant]}", "train.global_batch_size=4096"]
            model = MODELS.get(name, [f"model.preset={name}"])
            config = load_config(None, [*model, *shape, *overrides])
            given = any(degree != 1 for degree in config.parallel.degrees.values())
            for way in args.all_reduce or (None,):
                summing = None if way is None else ALL_REDUCES[way]
                decoder = make_decoder(config, given, FilledDecoder if args.filled else Decoder, summing)
                shown = variant if way is None else f"{variant}, {way}"
                for prompt, batch in itertools.product(args.prompt, args.batch):
                    found = rows_of(decoder, name, shown, batch, prompt, args)
                    append_rows("generate", found)
                    rows += found
                if "torch" in args.peers and variant == args.variants[-1]:
                    found = [r for prompt in args.prompt for r in rows_of_torch(decoder, name, overrides, prompt, args)]
                    append_rows("generate", found)
                    rows += found
                decoder.unload()
    speeds = ("milliseconds", "tokens_per_second_per_device", "gigabytes_per_second", "share", "devices")
    print_table(rows, ("work", "variant", *speeds))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
