"""Speed of attention to a paged KV cache at one new token per sequence, as a share of the memory's bandwidth.

    python benchmarks/attention/paged_attention.py                        # on a GPU: a minute
    python benchmarks/attention/paged_attention.py --only "8B, 256"       # works whose name contains the words
    python benchmarks/attention/paged_attention.py --sweep                # times of other tiles of the kernel, no rows
    python benchmarks/attention/paged_attention.py --sweep 64/4/3 64/4/3/2 32/8/3/0/64
                                                     # keys of a step/warps/stages[/ranges, 0 to choose[/rows]]
    python benchmarks/attention/paged_attention.py --tiny                 # tiny sizes on a CPU; rows go to tiny/

Pages are allotted to sequences in random order, as in a server that has run for a while. A program attends to the
caches of several layers in turn, `--passes` times, so that keys and values come from memory and not from a cache of the
GPU.
Rows are appended to benchmarks/results/paged_attention.jsonl:

    milliseconds   of the attention of one layer, the combination of its ranges included
    bandwidth      bytes of the keys and values that are seen over the time, in GB/s
    share          of the bandwidth at which the memory was read (`READ_SPEED` in benchmarks/serving/generate.py)
    tflops_per_device  of the products with keys and with values

Latents (DeepSeek's absorbed attention) are one key head of 576 channels, of which the first 512 are the values.
"""

import argparse
import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.arguments import positive
from benchmarks.rows import SCRATCH, append_rows, print_table, require_commit
from benchmarks.serving.generate import READ_SPEED
from benchmarks.timing import median_seconds
from pallas_kernels.low_bits.codecs import Fp8Codec
from pallas_kernels.low_bits.encoded import Encoded, Stored
from pallas_kernels.paged_attention import triton
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.request import make_request


@dataclasses.dataclass(frozen=True)
class Work:
    """Sequences of a decoding step: N query heads, K key heads of H elements, and a range of lengths.

    Values are the first `value_width` elements of their keys if it is not None. With `fp8` keys and values are in FP8.
    """

    heads: tuple[int, int, int]
    sequences: int
    lengths: tuple[int, int]
    value_width: int | None = None
    fp8: bool = False


DEEPSEEK_V2_LITE = (16, 1, 576)
DEEPSEEK_V3 = (128, 1, 576)
LLAMA_1B = (32, 8, 64)
LLAMA_8B = (32, 8, 128)
WORKS: Mapping[str, Work] = {
    "Llama 1B, 1 x 4,096 tokens": Work(LLAMA_1B, 1, (4096, 4096)),
    "Llama 1B, 16 x 768 tokens": Work(LLAMA_1B, 16, (768, 768)),
    "Llama 1B, 64 x 1,024 tokens": Work(LLAMA_1B, 64, (1024, 1024)),
    "Llama 8B, 1 x 32,768 tokens": Work(LLAMA_8B, 1, (32768, 32768)),
    "Llama 8B, 16 x 8,192 tokens": Work(LLAMA_8B, 16, (8192, 8192)),
    "Llama 8B, 64 x 64 to 4,096 tokens": Work(LLAMA_8B, 64, (64, 4096)),
    "Llama 8B, 256 x 1,000 to 2,000 tokens": Work(LLAMA_8B, 256, (1000, 2000)),
    "Llama 8B, 16 x 8,192 tokens in FP8": Work(LLAMA_8B, 16, (8192, 8192), fp8=True),
    "Llama 8B, 256 x 1,000 to 2,000 tokens in FP8": Work(LLAMA_8B, 256, (1000, 2000), fp8=True),
    "latents, 16 heads, 1 x 32,768 tokens": Work(DEEPSEEK_V2_LITE, 1, (32768, 32768), 512),
    "latents, 16 heads, 64 x 4,096 tokens": Work(DEEPSEEK_V2_LITE, 64, (4096, 4096), 512),
    "latents, 128 heads, 64 x 4,096 tokens": Work(DEEPSEEK_V3, 64, (4096, 4096), 512),
    "latents, 128 heads, 128 x 8,192 tokens": Work(DEEPSEEK_V3, 128, (8192, 8192), 512),
}
TINY: Mapping[str, Work] = {
    "tiny, 4 x 10 to 50 tokens": Work((4, 2, 32), 4, (10, 50)),
    "tiny in FP8, 4 x 10 to 50 tokens": Work((4, 2, 32), 4, (10, 50), fp8=True),
    "tiny latents, 4 x 10 to 50 tokens": Work((4, 1, 80), 4, (10, 50), 64),
}
COLUMNS = ("work", "variant", "implementation", "milliseconds", "bandwidth", "share", "tflops_per_device", "device")
_BYTES = 2**28
"""Of all layers' keys and values at least, several times the cache of an H200."""

Row = dict[str, Any]
Attend = Callable[[jax.Array, Stored, Stored | int, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Arguments of paged attention: one query for each sequence, and the caches of some layers.

    Attributes:
        q: [B, 1, N, H].
        caches: (keys, values) of each layer, [P, page, K, H].
        table: int32 [B, pages].
        lengths: int32 [B].
        value_width: as of the `Work`.
    """

    q: jax.Array
    caches: Sequence[tuple[Stored, Stored]]
    table: jax.Array
    lengths: jax.Array
    value_width: int | None

    @property
    def flops(self) -> int:
        """FLOPs of a layer's products of queries with keys, and of weights with values."""
        heads, width = self.q.shape[2:]
        return 2 * int(self.lengths.sum()) * heads * (width + (self.value_width or width))

    @property
    def bytes_seen(self) -> int:
        """Bytes of a layer's keys and values that the queries see."""
        (keys,) = jax.tree.leaves(self.caches[0][0])
        return (
            (2 if self.value_width is None else 1)
            * int(self.lengths.sum())
            * keys.shape[2]
            * keys.shape[3]
            * keys.dtype.itemsize
        )


def make_arrays(work: Work, page: int, least_bytes: int) -> Arrays:
    """Return random arrays for a work, with pages of `page` tokens in random order."""
    random = np.random.default_rng(0)
    heads, key_heads, width = work.heads
    lengths = random.integers(work.lengths[0], work.lengths[1] + 1, work.sequences)
    pages = -(-lengths // page)
    table = np.zeros((work.sequences, pages.max()), np.int32)
    order = random.permutation(pages.sum())
    for row, own in zip(table, np.split(order, np.cumsum(pages)[:-1]), strict=True):
        row[: len(own)] = own
    shape = (int(pages.sum()), page, key_heads, width)

    @jax.jit
    def make(key: jax.Array) -> Stored:
        numbers = jax.random.normal(key, shape, jnp.bfloat16)
        return Encoded(Fp8Codec().encode(numbers), None, Fp8Codec()) if work.fp8 else numbers

    layers = max(2, -(-least_bytes // (4 * int(np.prod(shape)))))
    keys = jax.random.split(jax.random.key(0), 2 * layers)
    q = jax.random.normal(jax.random.key(1), (work.sequences, 1, heads, width), jnp.bfloat16)
    caches = [(make(keys[2 * n]), make(keys[2 * n + 1])) for n in range(layers)]
    if work.value_width is not None:
        caches = [(keys, keys) for keys, _ in caches]
    return Arrays(q, caches, jnp.asarray(table), jnp.asarray(lengths, jnp.int32), work.value_width)


def seconds_of(attend: Attend, arrays: Arrays, passes: int) -> float:
    """Return the seconds of the attention of one layer."""

    def run(q: jax.Array, caches: Sequence[tuple[Stored, Stored]]) -> jax.Array:
        def one_pass(_: jax.Array | int, q: jax.Array) -> jax.Array:
            for keys, values in caches:
                # Each layer's queries depend on the output of the layer before, as in a model.
                out = attend(q, keys, arrays.value_width or values, arrays.table, arrays.lengths)
                q = q.at[..., : out.shape[-1]].add(out)
            return q * 0.5

        return jax.lax.fori_loop(0, passes, one_pass, q)

    compiled = jax.jit(run).lower(arrays.q, arrays.caches).compile()
    seconds = median_seconds(lambda: compiled(arrays.q, arrays.caches), jax.block_until_ready, 0.2)
    return seconds / passes / len(arrays.caches)


def variants(sweep: Sequence[str] | None) -> Mapping[str, Attend]:
    """Return the ways to attend, by name: the one that is chosen, or these tiles of the Triton kernel (empty: all)."""
    if sweep is None:
        return {"as chosen": paged_attention}

    def with_tile(tile: triton.Tile) -> Attend:
        options = {"scale": None, "soft_cap": None, "window": None}
        return lambda *arrays: triton.attend(make_request(*arrays, **options), tile)

    tiles = [tuple(map(int, sizes.split("/"))) for sizes in sweep]
    tiles = tiles or itertools.product((32, 64, 128), (1, 2, 4, 8), (2, 3, 4))
    return {"/".join(map(str, sizes)): with_tile(make_tile(*sizes)) for sizes in tiles}


def make_tile(key_block: int, warps: int, stages: int, ranges: int = 0, rows: int = 64) -> triton.Tile:
    """Return a tile; 0 ranges are as many as can be computed at a time."""
    return triton.Tile(key_block, warps, stages, ranges or None, rows)


def measure(name: str, work: Work, arguments: argparse.Namespace) -> list[Row]:
    """Return a row for each variant; those that cannot be compiled are left out of a sweep."""
    arrays = make_arrays(work, arguments.page, 0 if arguments.tiny else _BYTES)
    device = jax.devices()[0].device_kind
    rows = list[Row]()
    for variant, attend in variants(arguments.sweep).items():
        try:
            seconds = seconds_of(attend, arrays, arguments.passes)
        except jax.errors.JaxRuntimeError as error:  # A tile may need more memory than a multiprocessor has.
            if arguments.sweep is None:
                raise
            print(f"{name}, {variant}: {str(error)[:100]}", flush=True)
            continue
        speed = arrays.bytes_seen / seconds / 1e9
        if arguments.sweep is not None:
            print(f"{name}, {variant}: {1e3 * seconds:.4f} ms", flush=True)
        share = {"share": speed / READ_SPEED[device]} if device in READ_SPEED else {}
        rows.append({
            "work": f"paged attention {name}", "variant": f"pages of {arguments.page}, {variant}",
            "implementation": "jaxstack", "milliseconds": 1e3 * seconds, "bandwidth": speed, **share,
            "tflops_per_device": arrays.flops / seconds / 1e12, "device": device,
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORDS", help="works whose name contains them")
    parser.add_argument("--page", type=positive(int), default=16, metavar="N", help="tokens a page (default: 16)")
    parser.add_argument("--passes", type=positive(int), default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--sweep", nargs="*", metavar="TILE", help="time other tiles, no rows")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    arguments = parser.parse_args()
    script = SCRATCH + "paged_attention" if arguments.tiny else "paged_attention"
    if arguments.sweep is None:
        require_commit(script)
    for name, work in (TINY if arguments.tiny else WORKS).items():
        if any(words in name for words in arguments.only):
            rows = sorted(measure(name, work, arguments), key=lambda row: row["milliseconds"])
            print_table(rows, COLUMNS)
            if arguments.sweep is None:
                append_rows(script, rows)


if __name__ == "__main__":
    main()
