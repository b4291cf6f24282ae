"""MLPs of FP8 weights whose inputs are rounded to FP8 (W8A8): our kernel between the two products beside XLA's fusions.

    python benchmarks/kernels/float8_mlp.py                     # on a GPU
    python benchmarks/kernels/float8_mlp.py --rows 64 --models llama3-8b
    python benchmarks/kernels/float8_mlp.py --tiny              # tiny sizes; rows go to tiny/

A pass is a norm and an MLP for each of `--pairs` layers in turn; each layer has weights of its own, which are read from
memory. A program makes `--passes` passes in a loop. Both implementations of `float8_mlp` are measured in turns,
`--turns` times `--seconds` each; a row has the median turn. Rows are appended to benchmarks/results/float8_mlp.jsonl:

    milliseconds   of one layer
    speedup        time of XLA's form over that of the implementation
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.arguments import positive
from benchmarks.kernels.packed_products import make_weights, time_turn
from benchmarks.rows import SCRATCH, append_rows, print_table, require_commit
from jaxstack.distributed.xla_options import packed_weight_options
from jaxstack.models import preset_config
from pallas_kernels import PackedWeight
from pallas_kernels.weight_only.float8_mlp import BACKENDS, float8_mlp
from pallas_kernels.weight_only.formats import RoundedInputFloat8Format
from pallas_kernels.weight_only.xla import FLOAT8_OPTIONS

COLUMNS = ("work", "implementation", "milliseconds", "speedup", "device")


def compile_passes(weights: Sequence[Any], x: jax.Array, passes: int, implementation: str) -> Callable[[], jax.Array]:
    """Return a function that makes the passes."""

    def make_passes(x: jax.Array, weights: Sequence[PackedWeight]) -> jax.Array:
        def one_pass(_: jax.Array | int, x: jax.Array) -> jax.Array:
            for gate_up, down in zip(weights[::2], weights[1::2], strict=True):
                wide = x.astype(jnp.float32)
                normed = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5)
                x = x + float8_mlp(normed.astype(x.dtype), gate_up, down, implementation=implementation)
            return x

        return jax.lax.fori_loop(0, passes, one_pass, x)

    on_gpu = jax.default_backend() == "gpu"
    options = packed_weight_options() | FLOAT8_OPTIONS if on_gpu else None
    compiled = jax.jit(make_passes, compiler_options=options).lower(x, weights).compile()
    return lambda: compiled(x, weights)


def measure(work: str, width: int, inner: int, rows: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one row for each implementation."""
    x = jax.random.normal(jax.random.key(1), (rows, width), jnp.bfloat16)
    weights = make_weights(RoundedInputFloat8Format(), width, inner, arguments.pairs)
    runs = {name: compile_passes(weights, x, arguments.passes, name) for name in arguments.implementations}
    for run in runs.values():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.turns):
        for name, run in runs.items():
            times[name].append(time_turn(run, arguments.seconds))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return [
        {
            "work": f"MLP of {work} in FP8, {rows} rows", "implementation": name, "rows": rows,
            "pairs": arguments.pairs, "passes": arguments.passes,
            "milliseconds": 1e3 * seconds / arguments.passes / arguments.pairs,
            "speedup": medians["xla"] / seconds, "device": jax.devices()[0].device_kind,
        }
        for name, seconds in medians.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama3-8b"], metavar="PRESET",
                        help="presets whose MLP gives the sizes (default: %(default)s)")  # fmt: skip
    parser.add_argument("--rows", nargs="+", type=positive(int), default=[64, 256, 8192], metavar="N",
                        help="of activations, over 16 (default: %(default)s)")  # fmt: skip
    parser.add_argument("--pairs", type=positive(int), default=8, metavar="N", help="layers (default: %(default)s)")
    parser.add_argument("--passes", type=positive(int), default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--turns", type=positive(int), default=5, metavar="N", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    arguments = parser.parse_args()
    script = SCRATCH + "float8_mlp" if arguments.tiny else "float8_mlp"
    require_commit(script)
    arguments.implementations = [backend.name for backend in BACKENDS]
    sizes = {name: preset_config(name) for name in arguments.models}
    shapes = {name: (config.hidden_size, config.feed_forward_size) for name, config in sizes.items()}
    if arguments.tiny:
        shapes = {"tiny": (256, 512)}
        arguments.rows = [32]
        arguments.pairs = arguments.turns = 1
        arguments.passes = 2
        arguments.seconds = 0.01
        arguments.implementations = ["xla"]
    for rows in arguments.rows:
        for name, (width, inner) in shapes.items():
            found = measure(name, width, inner, rows, arguments)
            append_rows(script, found)
            print_table(found, COLUMNS)


if __name__ == "__main__":
    main()
