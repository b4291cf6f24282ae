"""Times of tiles of the kernel for weights in few bits, for `packed_products.py --sweep`.

Of a few hundred tiles those are timed that keep a multiprocessor busy: see `candidate_tiles`.
"""

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.rows import print_table
from jaxstack.distributed.xla_options import packed_weight_options
from pallas_kernels import PackedWeight
from pallas_kernels.target import multiprocessors
from pallas_kernels.weight_only import fragments, triton, xla
from pallas_kernels.weight_only.formats import TwoOfFourFormat
from pallas_kernels.weight_only.fragments import FragmentTile
from pallas_kernels.weight_only.packed import pack_integers
from pallas_kernels.weight_only.request import PackedMatmulRequest, make_request
from pallas_kernels.weight_only.rounding_grid import Grid

Packing = Grid | TwoOfFourFormat
COLUMNS = ("weight", "out", "in", "rows", "variant", "microseconds", "speedup", "bandwidth", "error", "problem")
TILE_FIELDS = ("block_out", "block_in", "ranges", "slices", "warps", "stages")
FRAGMENT_FIELDS = ("blocks", "warps", "ranges")
_BYTES = 2**27
"""Of the weights of one program, more than twice the cache of an H200."""
_LARGEST_ERROR = 0.01
"""Of a product, relative to its largest value; bfloat16 results differ by 0.004."""

_SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory of a multiprocessor that programs can use; each takes 1 KiB more than it asks for."""
_REGISTERS = 65536
_MOST_REGISTERS = 255
"""Of a thread."""
_MOST_WARPS = 64
"""Of a multiprocessor."""
_LEAST_WARPS = 6
_LEAST_LOADED = 16 * 1024
"""Bytes of weights that a multiprocessor must have under way: half of what covers the latency of an H200's memory."""
_LARGEST_WASTE = 1.2
"""Most work of the busiest multiprocessor over the mean."""

Row = dict[str, Any]
Product = Callable[[jax.Array, Any], jax.Array]


@dataclasses.dataclass
class Work:
    """A program that multiplies by each of several weights, `passes` times."""

    row: Row
    product: Product
    x: jax.Array
    weights: Sequence[Any]
    passes: int
    run: Callable[[], list[jax.Array]] | None = None

    def chain(self, x: jax.Array, weights: Sequence[Any]) -> list[jax.Array]:
        """Return the products with each weight, after making them `passes` times."""

        def one_pass(_: jax.Array | int, results: list[jax.Array]) -> list[jax.Array]:
            # Arguments that depend on the last results: no product can be left out or made only once.
            x_now, stored, _ = jax.lax.optimization_barrier((x, weights, results))
            # x by itself for each weight: what a product computes of it first is not shared with the others.
            return [self.product(*jax.lax.optimization_barrier((x_now, w))) for w in stored]

        start = [jnp.zeros((x.shape[0], self.row["out"]), x.dtype) for _ in weights]
        return jax.lax.fori_loop(0, self.passes, one_pass, start)

    def compile(self) -> None:
        """Compile the program; a failure is noted in the row."""
        options = packed_weight_options() if jax.default_backend() == "gpu" else None
        try:
            compiled = jax.jit(self.chain, compiler_options=options).lower(self.x, self.weights).compile()
        except Exception as error:  # A tile may need more memory than a multiprocessor has.
            self.row["problem"] = f"{type(error).__name__}: {str(error)[:300]}"
            return
        self.run = lambda: compiled(self.x, self.weights)

    def measure(self, expected: jax.Array, turns: int) -> None:
        """Add the error of the first product, and the median time of one."""
        if self.run is None:
            return
        try:
            found = jax.block_until_ready(self.run())[0].astype(jnp.float32)
            self.row["error"] = float(jnp.abs(found - expected).max() / jnp.abs(expected).max())
            if not self.row["error"] < _LARGEST_ERROR:
                self.row["problem"] = "wrong result"
            times = [time_calls(self.run) for _ in range(turns)]
        except Exception as error:
            self.row["problem"] = f"{type(error).__name__}: {str(error)[:300]}"
            return
        seconds = statistics.median(times) / (len(self.weights) * self.passes)
        self.row |= {"microseconds": 1e6 * seconds, "bandwidth": _size(self.weights[0]) / seconds / 1e9}


def time_calls(run: Callable[[], Any], calls: int = 4) -> float:
    """Return the seconds of one of several calls that are enqueued together."""
    began = time.perf_counter()
    jax.block_until_ready([run() for _ in range(calls)])
    return (time.perf_counter() - began) / calls


def sweep(
    shapes: Sequence[tuple[int, int]], formats: Mapping[str, Packing], arguments: argparse.Namespace
) -> list[Row]:
    """Time every tile with matrices [out, in]; write all times to `arguments.sweep`, and print the fastest."""
    rows: list[Row] = []
    path = Path(arguments.sweep)
    path.parent.mkdir(parents=True, exist_ok=True)
    works = [(outputs, inputs, count) for outputs, inputs in shapes for count in arguments.rows]
    for outputs, inputs, count in works:
        began = time.perf_counter()
        rows += _time_shape(outputs, inputs, count, formats, arguments)
        path.write_text(json.dumps(rows, indent=1))
        print(f"[{outputs}, {inputs}] at {count} rows: {time.perf_counter() - began:.1f} s", flush=True)
    _print_fastest(rows, works, formats)
    return rows


def _print_fastest(rows: list[Row], works: Sequence[tuple[int, int, int]], formats: Mapping[str, Packing]) -> None:
    shown = [row for row in rows if row.get("problem")]
    lines = []
    for kind, (outputs, inputs, count) in itertools.product(("bf16", *formats), works):
        key = (kind, outputs, inputs, count)
        here = [r for r in rows if (r["weight"], r["out"], r["in"], r["rows"]) == key and not r.get("problem")]
        here.sort(key=lambda row: row["microseconds"])
        shown += [row for n, row in enumerate(here) if n < 3 or row["variant"] == "xla"]
        tile = next((row["tile"] for row in here if row["tile"]), None)
        if tile is not None:
            packing = formats[kind]
            kind = "Tile" if "stages" in tile else "FragmentTile"
            blocks = ", ".join(str(tile[name]) for name in (TILE_FIELDS if "stages" in tile else FRAGMENT_FIELDS))
            bits = packing.bits if isinstance(packing, Grid) else 16
            lines.append(f"    ({bits}, {outputs}, {inputs}, {triton.padded_rows(count)}): {kind}({blocks}),")
    print_table(shown, COLUMNS)
    print("\n".join(["Lines for `MEASURED` in pallas_kernels/weight_only/triton.py:", *lines]))


def _time_shape(
    outputs: int, inputs: int, rows: int, formats: Mapping[str, Packing], arguments: argparse.Namespace
) -> list[Row]:
    x = jax.random.normal(jax.random.key(1), (rows, inputs), jnp.bfloat16)
    works: list[Work] = []
    expected: dict[str, jax.Array] = {}
    for kind in ("bf16", *formats):
        weights = _weights(formats.get(kind), outputs, inputs, arguments.tiny)
        dense = weights[0].dense() if isinstance(weights[0], PackedWeight) else weights[0].astype(jnp.float32)
        expected[kind] = jnp.matmul(x.astype(jnp.float32), dense, precision=jax.lax.Precision.HIGHEST)
        same = {"weight": kind, "out": outputs, "in": inputs, "rows": rows}
        request = make_request(x, weights[0], None)[0] if kind != "bf16" else None
        for variant, tile, product in _variants(request, arguments.backends):
            row = {**same, "variant": variant, "tile": None if tile is None else dataclasses.asdict(tile)}
            works.append(Work(row, product, x, weights, arguments.passes))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(Work.compile, works))
    for work in works:
        work.measure(expected[work.row["weight"]], arguments.turns)
    baseline = works[0].row.get("microseconds")
    for work in works:
        if baseline and "microseconds" in work.row:
            work.row["speedup"] = baseline / work.row["microseconds"]
    return [work.row | {"device": jax.devices()[0].device_kind} for work in works]


def _variants(
    request: PackedMatmulRequest | None, backends: Sequence[str]
) -> list[tuple[str, triton.Tile | FragmentTile | None, Product]]:
    """Return the name, the tile and the function of each way to multiply."""
    if request is None:
        return [("bf16", None, lambda x, w: x @ w)]

    def product(x: jax.Array, w: PackedWeight, tile: triton.Tile | FragmentTile | None) -> jax.Array:
        made, _ = make_request(x, w, None)
        return xla.multiply(made) if tile is None else triton.multiply(made, tile)

    found: list[tuple[str, triton.Tile | FragmentTile | None, Product]] = []
    if "xla" in backends:
        found.append(("xla", None, lambda x, w: product(x, w, None)))
    if "triton" in backends and triton.unsupported_reason(request) is None:
        tiles: list[triton.Tile | FragmentTile] = [*fragment_tiles(request)]
        if not isinstance(request.weight.format, TwoOfFourFormat):
            tiles += candidate_tiles(triton.make_plan(request))
        for tile in tiles:
            name = "/".join(str(int(part)) for part in dataclasses.astuple(tile))
            found.append((name, tile, lambda x, w, tile=tile: product(x, w, tile)))
    return found


def fragment_tiles(request: PackedMatmulRequest) -> Iterator[FragmentTile]:
    """Return the tiles of the kernels of `fragments` that have 12 warps or more for each multiprocessor."""
    if fragments.unsupported_reason(request) is not None:
        return
    for blocks, warps, ranges in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8)):
        plan = fragments.make_plan(request, FragmentTile(blocks, warps, ranges))
        count = plan.outputs // (16 * blocks) * warps * ranges
        if fragments.tile_problem(plan) is None and count >= 12 * multiprocessors() and blocks * plan.columns <= 8:
            yield plan.tile


def candidate_tiles(plan: triton.ProductPlan) -> list[triton.Tile]:
    """Return the tiles worth timing for a product, and the measured one.

    They keep all multiprocessors evenly busy, with enough warps and enough bytes under way. Programs that do not fit
    all at once run in rounds, the last of which may leave most multiprocessors idle.
    """
    found = {plan.tile} | {triton.Tile(*sizes) for sizes in _tile_sizes(plan) if _keeps_busy(plan, triton.Tile(*sizes))}
    return sorted(found, key=dataclasses.astuple)


def _tile_sizes(plan: triton.ProductPlan) -> Iterator[tuple[int, int, int, int, int, int]]:
    ranges = (1, 2, 4) if plan.outputs < 64 * multiprocessors() else (1,)
    for out, inputs, parts, slices in itertools.product((16, 32, 64), (128, 256), ranges, (1, 2, 4, 8, 16)):
        for warps, stages in itertools.product((slices, 2 * slices), (4, 5)):
            if out * slices >= 16 * warps and warps <= 16:
                yield out, inputs, parts, slices, warps, stages


def _keeps_busy(plan: triton.ProductPlan, tile: triton.Tile) -> bool:
    plan = dataclasses.replace(plan, tile=tile)
    if triton.tile_problem(plan) is not None:
        return False
    weights = tile.block_out * tile.block_in * tile.slices // plan.halves
    activations = 2 * plan.padded_rows * tile.block_in * tile.slices
    shared = (tile.stages - 1) * (weights + activations) + 1024
    threads = 32 * tile.warps
    # Of a thread: its part of the weights in bfloat16, of the sums, and some 50 for addresses and loop counters.
    registers = 0.6 * tile.block_out * tile.block_in * tile.slices / threads
    registers += 2 * tile.block_out * plan.padded_rows * tile.slices / threads + 50
    if registers > _MOST_REGISTERS:
        return False
    together = min(_SHARED_MEMORY // shared, _MOST_WARPS // tile.warps, int(_REGISTERS / (registers * threads)))
    if together == 0:
        return False
    each = plan.outputs // tile.block_out * tile.ranges / multiprocessors()
    rounds = each / together
    waste = math.ceil(each) / each if rounds <= 1 else math.ceil(rounds) / rounds
    resident = min(together, each)
    loaded = resident * (tile.stages - 2) * weights
    return waste <= _LARGEST_WASTE and resident * tile.warps >= _LEAST_WARPS and loaded >= _LEAST_LOADED


def _weights(packing: Packing | None, outputs: int, inputs: int, tiny: bool) -> list[Any]:
    """Return random weights, as many as exceed the cache together."""

    def make(key: jax.Array) -> Any:
        if packing is None:
            return jax.random.normal(key, (inputs, outputs), jnp.bfloat16)
        if isinstance(packing, TwoOfFourFormat):
            return random_two_of_four(key, outputs, inputs)
        low, high = packing.limits
        q = jax.random.randint(key, (outputs, inputs), low, high + 1, jnp.int8)
        scales = 2.0 ** jax.random.uniform(key, (outputs, packing.groups(inputs)), minval=-2.0)
        return pack_integers(packing, q, scales.astype(jnp.bfloat16))

    bits = 16 if packing is None else 9 if isinstance(packing, TwoOfFourFormat) else packing.bits
    size = outputs * inputs * bits // 8
    count = 2 if tiny else max(2, -(-_BYTES // size))
    return [jax.jit(make)(key) for key in jax.random.split(jax.random.key(0), count)]


def random_two_of_four(key: jax.Array, outputs: int, inputs: int) -> PackedWeight:
    """Return a weight of random numbers with 2:4 sparsity, in bfloat16."""
    patterns = jnp.asarray([bits for bits in range(16) if bits.bit_count() == 2], jnp.uint4)
    values = jax.random.normal(key, (outputs, inputs // 2), jnp.bfloat16)
    kept = jax.random.choice(key, patterns, (outputs, inputs // 4))
    return PackedWeight({"values": values, "kept": kept}, TwoOfFourFormat(), (inputs,), (outputs,))


def _size(weight: Any) -> int:
    return weight.stored_bytes if isinstance(weight, PackedWeight) else weight.nbytes
