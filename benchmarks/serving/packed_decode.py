"""Decoding of a whole model with packed weights: time of a step beside bfloat16, and the bound that its bytes set.

    python benchmarks/serving/packed_decode.py                       # llama3-8b, 1 to 64 rows; one GPU with 40 GB
    python benchmarks/serving/packed_decode.py --preset llama3-1b --batch 1 --variants bf16 int4
    python benchmarks/serving/packed_decode.py --batch 1 --prompt 512 2048 8192 --variants bf16 fp8-dynamic   # prefill
    python benchmarks/serving/packed_decode.py --tiny                # tiny sizes; rows go to tiny/

Greedy, by `Decoder.generate`, host and all; the fastest of three calls counts. Variants:

    bf16    every weight in the compute dtype
    int4    layers in 4 bits with a scale for each 128 inputs, the head in 8 bits
    others  the recipe of that name: random weights, rounded to the nearest values of its formats

Matrices of one shape have the same values, which changes no time. A step reads all weights but the input embedding, and
the filled part of the cache. `bound` is the bytes of bf16 divided by those of the variant: the speedup at equal
bandwidth. The prefill is the time to the first token of each text. The head of a tied model is never packed here. Rows
are appended to benchmarks/results/packed_decode.jsonl.
"""

import argparse
import functools
import itertools
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.arguments import positive
from benchmarks.packed_base import random_weights
from benchmarks.rows import SCRATCH, append_rows, print_table, require_commit
from benchmarks.serving.generate import VOCABULARY, bandwidth, measure
from jaxstack.checkpoint.compressed import named_leaves
from jaxstack.compress.config import Recipe, load_recipe
from jaxstack.compress.formats.integer_grid import Rtn
from jaxstack.decoding.decoder import Decoder
from jaxstack.distributed.device_setup import cache_compilations
from jaxstack.models import ModelConfig, Transformer
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.observe.throughput import peak_memory_bytes
from jaxstack.parallel import make_mesh, make_rules
from jaxstack.parameter_paths import nest
from jaxstack.run.setting import decoding_layout
from jaxstack.run_config import RunConfig, load_config
from pallas_kernels import PackedWeight, record_choices

SCRIPT = "packed_decode"
COLUMNS = ("work", "variant", "milliseconds", "speedup", "bound", "gigabytes_per_second", "share",
           "prefill_milliseconds", "prefill_speedup", "backends")  # fmt: skip
RECIPE_OF: Mapping[str, Recipe | str | None] = {
    "bf16": None,
    "int8": "int8",
    "int4": Recipe(
        layers=(Rtn(path="^decoder/", bits=4, group_size=128), Rtn(path=".*", bits=8))
    ),
    **{name: name for name in ("w8a8", "int4-gptq", "fp8", "fp8-dynamic", "bfp8", "nf4", "mxfp4", "2of4", "cluster3",
                               "bct", "lowrank")},
}  # fmt: skip
"""Name -> recipe of the weights; None: none is packed."""
TINY = {"vocab_size": 512, "hidden_size": 128, "num_layers": 2, "num_heads": 2, "intermediate_size": 256}

Row = dict[str, Any]


@functools.partial(jax.jit, static_argnums=(1, 2))
def random_array(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return ones for a vector, otherwise normal numbers; the first dim is taken for the inputs."""
    return jnp.ones(shape, dtype) if len(shape) < 2 else jax.random.normal(key, shape, dtype) / math.sqrt(shape[0])


def make_decoder(config: RunConfig, model: ModelConfig, recipe: Recipe | str | None) -> Decoder:
    """Return a model with random weights on one device; no plain weight is made of a packed one."""
    mesh = make_mesh(decoding_layout(config, 1, chosen=False), jax.devices()[:1])
    rules = make_rules(mesh)
    dtype = jnp.dtype(config.precision.compute_dtype(jax.devices()[0].platform))
    module = ModuleArrays(lambda rngs: Transformer(model, rngs, dtype=dtype))
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    packed = {} if recipe is None else random_weights(model, recipe)
    packed = {path: weight.with_numbers(dtype) for path, weight in packed.items() if path != "embedding/table"}
    leaves = dict[str, Any]()
    for number, (path, leaf) in enumerate(named_leaves(module.abstract_params).items()):
        shape, form = leaf.shape, dtype if leaf.ndim > 1 else leaf.dtype
        leaves[path] = packed.pop(path) if path in packed else random_array(jax.random.key(number), shape, form)
    non_params = jax.jit(lambda key: module.init(key)[1])(jax.random.key(0))
    decoder = Decoder(module, nest(leaves.items()), non_params, rules)
    leaves.clear()  # The decoder frees those that it joins.
    decoder.join_projections()
    return decoder


def step_bytes(decoder: Decoder, batch: int, tokens: int) -> dict[str, int]:
    """Return the bytes that a step reads of the layers, the head, and a cache of so many tokens."""
    sizes = {
        path: leaf.stored_bytes if isinstance(leaf, PackedWeight) else leaf.nbytes
        for path, leaf in named_leaves(decoder.params).items()
    }
    model = decoder.module.merge(decoder.params, decoder.non_params)
    cache = jax.eval_shape(lambda: model.make_cache(batch, tokens).layers)
    return {
        "layer_bytes": sum(size for path, size in sizes.items() if path.startswith("decoder/")),
        "head_bytes": sizes.get("head", sizes["embedding/table"]),
        "cache_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)),
    }


def measure_variant(variant: str, config: RunConfig, model: ModelConfig, args: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each number of texts and length of prompts as soon as it is measured."""
    decoder = make_decoder(config, model, RECIPE_OF[variant])
    for batch, prompt in itertools.product(args.batch, args.prompt):
        with record_choices() as choices:
            first, further = measure(decoder, batch, prompt, args.tokens)
        parts = step_bytes(decoder, batch, prompt + args.tokens // 2)
        yield {
            "work": f"decode {args.preset} batch {batch} prompt {prompt}", "variant": variant,
            "implementation": "jaxstack",
            "device": jax.devices()[0].device_kind, "devices": 1, "batch": batch, "milliseconds": 1e3 * further,
            "prefill_milliseconds": 1e3 * first, "tokens_per_second_per_device": batch / further, **parts,
            **bandwidth(sum(parts.values()) / further), "peak_memory_bytes": peak_memory_bytes(),
            "backends": sorted({choice.backend for choice in choices if choice.operation == "packed_matmul"}),
        }  # fmt: skip


def compare(rows: list[Row]) -> None:
    """Add the speedups beside bf16 at the same sizes, and the bound by bytes of that of a step."""

    def size(row: Row) -> int:
        return row["layer_bytes"] + row["head_bytes"] + row["cache_bytes"]

    plain = {row["work"]: row for row in rows if row["variant"] == "bf16"}
    for row in rows:
        if base := plain.get(row["work"]):
            row |= {"speedup": base["milliseconds"] / row["milliseconds"], "bound": size(base) / size(row)}
            row["prefill_speedup"] = base["prefill_milliseconds"] / row["prefill_milliseconds"]


def main() -> int:
    """Measure the variants, and append their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama3-8b", help="shape of the model (default: %(default)s)")
    parser.add_argument("--batch", type=positive(int), nargs="+", default=[1, 16, 64], metavar="N", help="rows")
    parser.add_argument(
        "--prompt", type=positive(int), nargs="+", default=[512], metavar="N", help="tokens of each prompt"
    )
    parser.add_argument("--tokens", type=positive(int), default=128, metavar="N", help="tokens to generate")
    parser.add_argument("--variants", nargs="+", default=list(RECIPE_OF), choices=RECIPE_OF, metavar="NAME")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; rows go to tiny/")
    args = parser.parse_args()
    script = SCRATCH + SCRIPT if args.tiny else SCRIPT
    require_commit(script)
    if args.tiny:
        args.preset = "tiny"
        args.batch = [1, 2]
        args.prompt = [8]
        args.tokens = 10
    config = load_config(None, [f"model.preset={args.preset}", "model.scan_layers=false"])
    fixed = {"vocab_size": config.model.vocab_size or VOCABULARY, "remat": "none"}
    model = config.model.model_copy(update=fixed | (TINY if args.tiny else {}))
    cache_compilations()
    rows = []
    for row in itertools.chain.from_iterable(measure_variant(name, config, model, args) for name in args.variants):
        rows.append(row)
        compare(rows)
        append_rows(script, [row])
        print(row, flush=True)
    print_table(rows, COLUMNS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
