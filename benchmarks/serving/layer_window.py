"""Generation with a few layers in memory at a time against the whole model: memory, time of a token, and the text.

    python benchmarks/serving/layer_window.py                    # 9 GB on disk and in memory
    python benchmarks/serving/layer_window.py --layers 8 --tokens 4 --no-rows

A checkpoint with random weights is written in Hugging Face's format, and text is generated with --resident layers of it
in memory at a time (TPI-LLM, Li et al. 2024, arXiv:2410.00531) and with the whole model, each in a process of its own.
`peak_live_bytes` is the largest sum of the bytes of JAX's arrays (taken when a layer has been read), `bound_bytes` the
sum of the window, the cache and the input of a layer, `resident_megabytes` the growth of the process's peak resident
set (ru_maxrss of getrusage, which Linux shows as VmHWM) from before the weights are read, which has the programs, their
temporary arrays and mapped pages of files too; `less` and `less_resident` are the shares of the whole model's that are
saved. Rows are appended to benchmarks/results/layer_window.jsonl.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
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
from jaxstack.decoding.sampling import Sampling
from jaxstack.models import ModelConfig, Transformer, count_parameters
from jaxstack.models.huggingface import save
from jaxstack.models.huggingface.families import read_model_config
from jaxstack.models.huggingface.load import ModelParts, read_parameters
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.observe.throughput import peak_memory_bytes
from jaxstack.parallel import ParallelConfig, make_mesh, make_rules

VOCABULARY = 4096
COLUMNS = ("variant", "peak_live_bytes", "bound_bytes", "less", "resident_megabytes", "less_resident", "milliseconds",
           "same_text")  # fmt: skip


class MeasuredWindow(WindowDecoder):
    """A `WindowDecoder` that records the live bytes whenever a layer has been read into memory."""

    peak_live_bytes = 0
    """Largest number of bytes of all JAX arrays so far."""

    def _read(self, path: str) -> Any:
        weights = super()._read(path)
        self.peak_live_bytes = max(self.peak_live_bytes, live_bytes())
        return weights


def live_bytes() -> int:
    """Return the bytes of all JAX arrays of this process."""
    return sum(x.nbytes for x in jax.live_arrays())


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


def open_decoder(directory: Path, resident: int | None) -> Decoder:
    """Open a checkpoint on the first device, with `resident` layers in memory at a time; None: all of it."""
    config = read_model_config(directory).model_copy(update={"scan_layers": False})
    module = ModuleArrays(lambda rngs: Transformer(config, rngs))
    rules = make_rules(make_mesh(ParallelConfig(), jax.devices()[:1]))
    non_params = jax.jit(lambda key: module.init(key)[1])(jax.random.key(0))
    if resident is not None:
        return MeasuredWindow(module, ModelParts(directory, config), non_params, rules, resident=resident)
    shardings = jax.tree.map(rules.sharding, module.parameter_specs(rules))
    return Decoder(module, read_parameters(directory, config, shardings), non_params, rules)


def measure(directory: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Generate greedily in this process; return the tokens, the time of one and the memory."""
    prompt = args.prompt
    count = args.tokens
    ids = np.random.default_rng(0).integers(0, VOCABULARY, prompt).tolist()
    jax.block_until_ready(jax.numpy.zeros(1))
    before = peak_memory_bytes()
    decoder = open_decoder(directory, args.resident)
    steps = decoder.generate([ids], count, Sampling(temperature=0.0))
    tokens = [int(next(steps)[0]) for _ in range(2)]  # compiles the prefill and the step
    began = time.perf_counter()
    live = live_bytes()
    tokens += [int(token[0]) for token in steps]
    seconds = (time.perf_counter() - began) / (count - 2)
    peak = peak_memory_bytes()
    if isinstance(decoder, MeasuredWindow):
        live = decoder.peak_live_bytes
    found = {"tokens": tokens, "milliseconds": 1e3 * seconds, "peak_live_bytes": live,
             "resident_megabytes": (peak - before) / 1e6, "device": jax.devices()[0].device_kind}  # fmt: skip
    if isinstance(decoder, MeasuredWindow):
        cache = decoder.cache_bytes([prompt], count)
        itemsize = jax.numpy.dtype(decoder.module.dtype).itemsize
        layer_input = decoder.padded_length(prompt) * decoder.config.hidden_size * itemsize
        found |= {"window_bytes": decoder.window_bytes, "cache_bytes": cache, "layer_input_bytes": layer_input,
                  "bound_bytes": decoder.window_bytes + cache + layer_input}  # fmt: skip
        decoder.unload()
    return found


def run_in_process(directory: Path, args: argparse.Namespace, *words: str) -> Any:
    """Return what this script prints in a process of its own, so that its peak memory is that of one variant."""
    sizes = ("layers", "hidden", "prompt", "tokens")
    command = [sys.executable, __file__, "--child", str(directory), *words]
    command += [word for name in sizes for word in (f"--{name}", str(getattr(args, name)))]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=positive(int), default=80, help="layers")
    parser.add_argument("--hidden", type=positive(int), default=1536, help="width, a multiple of 64")
    parser.add_argument("--resident", type=positive(int), help="layers in memory at a time (default: 2)")
    parser.add_argument("--prompt", type=positive(int), default=32, help="tokens of the prompt")
    parser.add_argument("--tokens", type=positive(int), default=6, help="tokens of the answer, at least 3")
    parser.add_argument("--no-rows", action="store_true", help="print the rows only")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(write_checkpoint(args, args.child) if args.write else measure(args.child, args)))
        return 0
    if not args.no_rows:
        require_commit("layer_window")
    resident = args.resident or 2  # No default of the argument: a child without it has the whole model in memory.
    with tempfile.TemporaryDirectory() as directory:
        parameters = run_in_process(Path(directory), args, "--write")
        found = {
            "whole": run_in_process(Path(directory), args),
            f"{resident} of {args.layers} layers": run_in_process(Path(directory), args, "--resident", str(resident)),
        }
    tokens = {name: result.pop("tokens") for name, result in found.items()}
    work = f"layer window {parameters / 1e6:,.0f}M parameters {args.layers} layers prompt {args.prompt} float32"
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
