"""Products with weights in few bits, beside bfloat16's, at the numbers of rows that decoding has.

   python benchmarks/kernels/packed_products.py                       # on a GPU
   python benchmarks/kernels/packed_products.py --models llama3-8b --rows 1 16
   python benchmarks/kernels/packed_products.py --tiny                # tiny sizes; rows go to tiny/
   python benchmarks/kernels/packed_products.py --sweep tiles.json --rows 1 16 --turns 3   # times of all tiles, no rows

One pass multiplies activations [rows, D] by the joined gate and up projections [D, 2F] and by the down projection
[F, D] of `--pairs` layers in turn, as decoding does; between them stands the larger of both halves. Each layer has
weights of its own, so that they are read from memory and not from the cache of the GPU. A program makes `--passes`
passes in a loop, as decoding makes a pass for each token: a single pass takes less time than starting a program. The
formats are measured in turns, `--turns` times `--seconds` each; a row has the median turn. Rows are appended to
benchmarks/results/packed_products.jsonl:

    milliseconds   of one pass
    speedup        time of bfloat16 over that of the format
    bandwidth      bytes of the stored weights over the time, in GB/s
    implementation backend of `packed_matmul`; of bfloat16 XLA's matmul
    weight_share   bytes of the stored weights over those of bfloat16: 1 / `weight_share` bounds `speedup`
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.arguments import positive
from benchmarks.kernels.packed_tiles import sweep
from benchmarks.rows import SCRATCH, append_rows, print_table, require_commit
from jaxstack.compress.formats.sparse import Pattern
from jaxstack.distributed.xla_options import packed_weight_options
from jaxstack.models import ModelConfig, preset_config
from pallas_kernels import PackedWeight, packed_matmul
from pallas_kernels.dispatch import NotSupported
from pallas_kernels.weight_only import float8_products
from pallas_kernels.weight_only.formats import (
    Float8Format,
    LookupFormat,
    RoundedInputFloat8Format,
    TwoOfFourFormat,
)
from pallas_kernels.weight_only.packed import pack_float8, pack_lookup, pack_nearest, pack_two_of_four
from pallas_kernels.weight_only.rounding_grid import Grid
from pallas_kernels.weight_only.xla import FLOAT8_OPTIONS

SWEPT: Mapping[str, Grid | TwoOfFourFormat] = {
    "int8, a scale for each output": Grid(8),
    "int4, groups of 128": Grid(4, 128),
    "2:4, values in bfloat16": TwoOfFourFormat(),
}
"""Formats whose tiles `--sweep` times."""
FORMATS: Mapping[str, Grid | LookupFormat | Float8Format | TwoOfFourFormat | None] = {
    "bf16": None,
    **SWEPT,
    "4 bits, a table of 16 values": LookupFormat(4),
    "3 bits, a table of 8 values": LookupFormat(3),
    "fp8, a scale for each output": Float8Format(),
    "fp8, inputs rounded too": RoundedInputFloat8Format(),
}
COLUMNS = ("work", "variant", "implementation", "milliseconds", "speedup", "bandwidth", "weight_share", "device")

Row = dict[str, Any]
Weight = jax.Array | PackedWeight


def make_weights(
    format: Grid | LookupFormat | Float8Format | TwoOfFourFormat | None, width: int, inner: int, pairs: int
) -> list[Weight]:
    """Return random weights [in, out], of alternating sizes (width, 2 inner) and (inner, width)."""

    def make(key: jax.Array, inputs: int, outputs: int) -> Weight:
        w = jax.random.normal(key, (outputs, inputs)) / inputs**0.5
        if format is None:
            return w.T.astype(jnp.bfloat16)
        if isinstance(format, Grid):
            return pack_nearest(format, w)
        if isinstance(format, TwoOfFourFormat):
            return pack_two_of_four(Pattern(keep_of=(2, 4)).prune(w, jnp.abs(w)).astype(jnp.bfloat16))
        if isinstance(format, Float8Format):
            scales = jnp.full((outputs, 1), 2.0**-6 / inputs**0.5, jnp.bfloat16)
            return pack_float8(w / scales, scales, round_inputs=isinstance(format, RoundedInputFloat8Format))
        # A table of equally frequent values.
        borders = jax.scipy.stats.norm.ppf(jnp.arange(1, 2**format.bits) / 2**format.bits) / inputs**0.5
        middles = jax.scipy.stats.norm.ppf((jnp.arange(2**format.bits) + 0.5) / 2**format.bits) / inputs**0.5
        return pack_lookup(format.bits, jnp.searchsorted(borders, w), middles[None])

    made = jax.jit(make, static_argnums=(1, 2))
    keys = jax.random.split(jax.random.key(0), 2 * pairs)
    return [made(key, *((inner, width) if n % 2 else (width, 2 * inner))) for n, key in enumerate(keys)]


def compile_chain(weights: Sequence[Weight], x: jax.Array, passes: int, backend: str | None) -> Callable[[], jax.Array]:
    """Return a function that multiplies x by each weight in turn, `passes` times."""

    rounded = isinstance(weights[0], PackedWeight) and isinstance(weights[0].format, RoundedInputFloat8Format)

    def multiply(x: jax.Array, w: Weight) -> jax.Array:
        if not isinstance(w, PackedWeight):
            return x @ w
        if rounded:  # at few rows too, which `packed_matmul` multiplies as they are
            return float8_products.scaled_product(x, w.arrays["q"], w.arrays["scales"]).astype(x.dtype)
        return packed_matmul(x, w, implementation=backend)

    def chain(x: jax.Array, weights: Sequence[Weight]) -> jax.Array:
        def one_pass(_: jax.Array | int, x: jax.Array) -> jax.Array:
            # Weights that depend on x: none can be converted to bfloat16 once, before the loop.
            x, stored = jax.lax.optimization_barrier((x, weights))
            for gate_up, down in zip(stored[::2], stored[1::2], strict=True):
                # The larger of two normal numbers has a mean square of 1: activations neither grow nor vanish.
                x = multiply(jnp.maximum(*jnp.split(multiply(x, gate_up), 2, axis=1)), down)
            return x

        return jax.lax.fori_loop(0, passes, one_pass, x)

    options = packed_weight_options() if jax.default_backend() == "gpu" else None
    if options is not None and rounded:
        options |= FLOAT8_OPTIONS
    compiled = jax.jit(chain, compiler_options=options).lower(x, weights).compile()
    return lambda: compiled(x, weights)


def time_turn(run: Callable[[], jax.Array], seconds: float) -> float:
    """Return the seconds of one call, from calls that are enqueued together for about `seconds`."""
    began = time.perf_counter()
    jax.block_until_ready(run())
    calls = max(3, int(seconds / max(time.perf_counter() - began, 1e-5)))
    began = time.perf_counter()
    for _ in range(calls):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter() - began) / calls


def stored_bytes(weights: Sequence[Weight]) -> int:
    """Return the bytes in memory, where indices of 3 bits take 4."""
    return sum(x.size * jax.dtypes.itemsize_bits(x.dtype) // 8 for x in jax.tree.leaves(weights))


def measure(work: str, width: int, inner: int, rows: int, arguments: argparse.Namespace) -> list[Row]:
    """Return one row for bfloat16, and for each format and backend."""
    x = jax.random.normal(jax.random.key(1), (rows, width), jnp.bfloat16)
    formats = {name: FORMATS[name] for name in ("bf16", *arguments.formats)}
    weights = {name: make_weights(format, width, inner, arguments.pairs) for name, format in formats.items()}

    def ways(format: object) -> Sequence[str | None]:
        if format is None:
            return [None]
        return ["xla"] if isinstance(format, RoundedInputFloat8Format) else arguments.backends

    variants = [(name, way) for name, format in formats.items() for way in ways(format)]
    runs = {}
    for name, way in variants:
        try:
            runs[name, way] = compile_chain(weights[name], x, arguments.passes, way)
        except NotSupported as error:  # such as our kernel at many rows
            print(f"{name}, {rows} rows: not measured, {str(error).splitlines()[0]}", flush=True)
    for run in runs.values():
        jax.block_until_ready(run())
    times: dict[tuple[str, str | None], list[float]] = {key: [] for key in runs}
    for _ in range(arguments.turns):
        for key, run in runs.items():
            times[key].append(time_turn(run, arguments.seconds))
    found = []
    baseline = statistics.median(times["bf16", None])
    for (name, backend), taken in times.items():
        seconds = statistics.median(taken) / arguments.passes
        size = stored_bytes(weights[name])
        found.append({
            "work": f"{work}, {rows} row" + "s" * (rows > 1), "variant": name, "implementation": backend or "xla",
            "rows": rows, "pairs": arguments.pairs,
            "passes": arguments.passes, "milliseconds": 1e3 * seconds, "bandwidth": size / seconds / 1e9,
            "speedup": baseline / statistics.median(taken),
            "weight_share": size / stored_bytes(weights["bf16"]), "device": jax.devices()[0].device_kind,
        })  # fmt: skip
    return found


def joined_matrices(config: ModelConfig) -> list[tuple[int, int]]:
    """Return the shapes [out, in] of the matrices of a layer, with projections of one input joined as in decoding."""
    width = config.hidden_size
    inner = config.feed_forward_size
    head = config.width_per_head
    queries = config.num_heads * head
    together = (config.num_heads + 2 * config.kv_heads) * head
    return [(2 * inner, width), (width, inner), (together, width), (width, queries)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama3-1b", "llama3-8b"], metavar="PRESET",
                        help="presets whose MLP gives the sizes (default: %(default)s)")  # fmt: skip
    parser.add_argument("--rows", nargs="+", type=positive(int), default=[1, 4, 16], metavar="N",
                        help="of activations (default: %(default)s)")  # fmt: skip
    parser.add_argument("--pairs", type=positive(int), default=8, metavar="N", help="layers (default: %(default)s)")
    parser.add_argument("--passes", type=positive(int), default=16, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--turns", type=positive(int), default=5, metavar="N", help="of each format (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn (default: %(default)s)")
    parser.add_argument("--backends", nargs="+", default=["xla", "triton", "mosaic", "widened"], metavar="NAME",
                        help="of packed_matmul (default: %(default)s)")  # fmt: skip
    parser.add_argument("--formats", nargs="+", default=[name for name in FORMATS if name != "bf16"], choices=FORMATS,
                        metavar="NAME", help="beside bf16 (default: all)")  # fmt: skip
    parser.add_argument("--sweep", metavar="FILE", help="only time each tile of the kernel, and write the times there")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    arguments = parser.parse_args()
    script = SCRATCH + "packed_products" if arguments.tiny else "packed_products"
    if not arguments.sweep:
        require_commit(script)
    shapes: list[tuple[int, int]] = [(256, 512)]
    if arguments.tiny:
        sizes = {"tiny": (256, 512)}
        arguments.pairs = 1
        arguments.turns = 1
        arguments.seconds = 0.01
        arguments.passes = 2
        arguments.backends = ["xla"]
    else:
        configs = {name: preset_config(name) for name in arguments.models}
        sizes = {name: (config.hidden_size, config.feed_forward_size) for name, config in configs.items()}
        shapes = [shape for config in configs.values() for shape in joined_matrices(config)]
    if arguments.sweep:
        sweep(shapes, {name: SWEPT[name] for name in arguments.formats if name in SWEPT}, arguments)
        return
    for rows in arguments.rows:
        for name, (width, inner) in sizes.items():
            found = measure(f"MLP projections of {name}", width, inner, rows, arguments)
            append_rows(script, found)
            print_table(found, COLUMNS)


if __name__ == "__main__":
    main()
