"""Generation with a few layers in memory at a time, or on several devices, against the whole model on one.

    python benchmarks/serving/layer_window.py                    # 9 GB on disk and in memory
    python benchmarks/serving/layer_window.py --layers 8 --tokens 4 --no-rows
    python benchmarks/serving/layer_window.py --devices 2 --rows 16 --layers 32 --hidden 4096 --tokens 32   # two GPUs
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python benchmarks/serving/layer_window.py --devices 2 --rows 4 \\
        --layers 8 --hidden 512 --no-rows

A checkpoint with random weights is written in Hugging Face's format, and text is generated with the whole model and
with --resident layers of it in memory at a time (TPI-LLM, Li et al. 2024, arXiv:2410.00531), each in a process of its
own. With several --devices the other layers are also in host memory and on the other devices, and the model is split
into as many stages (EnergonAI, Du et al. 2022, arXiv:2209.02341): a pipeline once with all rows of the batch in one
group, so that one stage computes at a time, and once with a group for each stage.

`milliseconds` is the time of a token of all rows. `peak_live_bytes` is the largest sum of the bytes of JAX's arrays on
the first device (taken when a layer has been loaded), `bound_bytes` the sum of the window, the cache and the input of a
layer, `bytes_on` what all arrays take in each memory at the end, `resident_megabytes` the growth of the peak memory
from before the weights are read: on a CPU that of the process's resident set (ru_maxrss of getrusage, which Linux shows
as VmHWM), which has the programs, their temporary arrays and mapped pages of files too; on GPUs of the fullest one.
`less` and `less_resident` are the shares of the whole model's that are saved. Rows are appended to
benchmarks/results/layer_window.jsonl.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np

from benchmarks.arguments import positive
from benchmarks.rows import append_rows, print_table, require_commit
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.layer_window import WindowDecoder
from jaxstack.decoding.pipeline import PipelineDecoder, split_stages, stage_shapes
from jaxstack.decoding.sampling import Sampling
from jaxstack.models import ModelConfig, Transformer, count_parameters
from jaxstack.models.huggingface import save
from jaxstack.models.huggingface.families import read_model_config
from jaxstack.models.huggingface.load import ModelParts, read_parameters
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.observe.throughput import peak_memory_bytes
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules
from jaxstack.stored.model import initial_variables

VOCABULARY = 4096
COLUMNS = ("variant", "peak_live_bytes", "bound_bytes", "less", "resident_megabytes", "less_resident", "milliseconds",
           "bytes_on", "same_text")  # fmt: skip


class MeasuredWindow(WindowDecoder):
    """A `WindowDecoder` that records the live bytes whenever a layer has been brought into memory."""

    peak_live_bytes = 0
    """Largest number of bytes of the arrays on the first device so far."""

    def _load(self, paths: Any, homes: Any, number: int) -> Any:
        weights = super()._load(paths, homes, number)
        self.peak_live_bytes = max(self.peak_live_bytes, bytes_on()["device 0"])
        return weights


def bytes_on() -> Counter[str]:
    """Return the bytes of all JAX arrays of this process in each memory: `device 0`, ..., and `host`."""
    found = Counter[str]()
    for x in jax.live_arrays():
        in_host = x.sharding.memory_kind == "pinned_host"
        for device in x.sharding.device_set:
            place = "host" if in_host else f"device {device.id}"
            found[place] += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return found


def write_checkpoint(args: argparse.Namespace, directory: Path) -> int:
    """Write a checkpoint with random weights; return its number of parameters."""
    config = ModelConfig(
        vocab_size=VOCABULARY, hidden_size=args.hidden, num_layers=args.layers, num_heads=args.hidden // 64,
        num_kv_heads=max(1, args.hidden // 256), intermediate_size=3 * args.hidden, scan_layers=False,
    )  # fmt: skip
    shapes = {
        jax.tree_util.keystr(path, simple=True, separator="/"): x.shape
        for path, x in jax.tree.leaves_with_path(ModuleArrays(lambda rngs: Transformer(config, rngs)).abstract_params)
    }
    rng = np.random.default_rng(0)

    def draw(path: str) -> np.ndarray:
        shape = shapes[path]
        return np.ones(shape, np.float32) if len(shape) == 1 else 0.02 * rng.standard_normal(shape, np.float32)

    save.write_checkpoint(draw, config, directory, max_shard_bytes=2**30)
    return count_parameters(config).total


def open_decoder(directory: Path, args: argparse.Namespace) -> Decoder:
    """Open a checkpoint as the variant of a child's arguments."""
    config = read_model_config(directory).model_copy(update={"scan_layers": False})
    module = ModuleArrays(lambda rngs: Transformer(config, rngs))
    non_params = initial_variables(module)
    devices = args.devices if args.groups else 1
    rules = make_rules(make_mesh(ParallelConfig(pipeline=devices), jax.devices()[:devices]))
    if args.place:
        options = {"resident": args.resident, "place": args.place}
        return MeasuredWindow(module, ModelParts(directory, config), non_params, rules, **options)
    stages = split_stages(rules)
    shardings = jax.tree.map(lambda like: like.sharding, stage_shapes(module, stages))
    params = read_parameters(directory, config, shardings)
    if not args.groups:
        return Decoder(module, params, non_params, rules)
    decoder = PipelineDecoder(module, params, non_params, stages)
    decoder.groups = args.groups
    return decoder


def measure(directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Generate greedily in this process; return the tokens, the time of one and the memory."""
    count = args.tokens
    prompts = np.random.default_rng(0).integers(0, VOCABULARY, (args.rows, args.prompt)).tolist()
    jax.block_until_ready(jax.numpy.zeros(1))
    before = peak_memory_bytes()
    decoder = open_decoder(directory, args)
    steps = decoder.generate(prompts, count, Sampling(temperature=0.0))
    tokens = [next(steps).tolist() for _ in range(2)]  # compiles the prefill and the step
    began = time.perf_counter()
    tokens += [token.tolist() for token in steps]
    seconds = (time.perf_counter() - began) / (count - 2)
    peak = peak_memory_bytes()
    found = {"tokens": tokens, "milliseconds": 1e3 * seconds, "peak_live_bytes": bytes_on()["device 0"],
             "bytes_on": bytes_on(), "resident_megabytes": (peak - before) / 1e6, "devices": args.devices,
             "device": jax.devices()[0].device_kind}  # fmt: skip
    if isinstance(decoder, MeasuredWindow):
        cache = decoder.cache_bytes([args.prompt] * args.rows, count)
        itemsize = jax.numpy.dtype(decoder.module.dtype).itemsize
        layer_input = args.rows * decoder.padded_length(args.prompt) * decoder.config.hidden_size * itemsize
        found |= {"peak_live_bytes": decoder.peak_live_bytes, "window_bytes": decoder.window_bytes,
                  "pool_bytes": decoder.pool_bytes, "cache_bytes": cache, "layer_input_bytes": layer_input,
                  "bound_bytes": decoder.window_bytes + cache + layer_input}  # fmt: skip
    decoder.unload()
    return found


def variants(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the names of what is measured, each with the arguments of its child."""
    window = f"{args.resident} of {args.layers} layers"
    found = {"whole": [], window: ["--place", "files"]}
    if args.devices > 1:
        found |= {
            f"{window}, the others in host memory": ["--place", "host"],
            f"{window}, the others on other devices": ["--place", "peers"],
            f"{args.devices} stages, one group of rows": ["--groups", "1"],
            f"{args.devices} stages, {args.devices} groups of rows": ["--groups", str(args.devices)],
        }
    return found


def run_in_process(directory: Path, args: argparse.Namespace, *words: str) -> Any:
    """Return what this script prints in a process of its own, so that its peak memory is that of one variant."""
    sizes = ("layers", "hidden", "resident", "rows", "prompt", "tokens", "devices")
    command = [sys.executable, __file__, "--child", str(directory), *words]
    command += [word for name in sizes for word in (f"--{name}", str(getattr(args, name)))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=positive(int), default=80, help="layers")
    parser.add_argument("--hidden", type=positive(int), default=1536, help="width, a multiple of 64")
    parser.add_argument("--resident", type=positive(int), default=2, help="layers in memory at a time")
    parser.add_argument("--devices", type=positive(int), default=1, help="devices, of which the first ones are used")
    parser.add_argument("--rows", type=positive(int), default=1, help="texts of the batch")
    parser.add_argument("--prompt", type=positive(int), default=32, help="tokens of the prompt")
    parser.add_argument("--tokens", type=positive(int), default=6, help="tokens of the answer, at least 3")
    parser.add_argument("--no-rows", action="store_true", help="print the rows only")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("--groups", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(write_checkpoint(args, args.child) if args.write else measure(args.child, args)))
        return 0
    if not args.no_rows:
        require_commit("layer_window")
    with tempfile.TemporaryDirectory() as directory:
        parameters = run_in_process(Path(directory), args, "--write")
        found = {name: run_in_process(Path(directory), args, *words) for name, words in variants(args).items()}
    tokens = {name: result.pop("tokens") for name, result in found.items()}
    work = f"layer window {parameters / 1e6:,.0f}M parameters {args.layers} layers prompt {args.prompt} float32"
    if args.rows > 1:
        work += f" {args.rows} rows"
    live = found["whole"]["peak_live_bytes"]
    resident_megabytes = found["whole"]["resident_megabytes"]
    rows = [
        {"work": work, "implementation": "jaxstack", "variant": name, **result,
         "same_text": tokens[name] == tokens["whole"], "less": 1 - result["peak_live_bytes"] / live,
         "less_resident": 1 - result["resident_megabytes"] / resident_megabytes,
         "cpu_cores": os.cpu_count()}
        for name, result in found.items()
    ]  # fmt: skip
    if not args.no_rows:
        append_rows("layer_window", rows)
    print_table(rows, COLUMNS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
