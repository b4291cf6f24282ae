"""Highest rates of this machine's devices, and the limit of a training step that follows from them.

    python benchmarks/planning/device.py         # about three minutes on four H200s
    python benchmarks/planning/device.py --only gemm attention limit
    python benchmarks/planning/device.py --tiny  # tiny sizes on simulated CPU devices

Parts:
    gemm         matmuls in bfloat16, FP8 (operands that are quantized already) and int8, by cuBLAS through XLA
    copy         y = -x by XLA, and on Hopper y = x by a Triton kernel (benchmarks/kernels/copy_kernel.py)
    attention    forward and backward at the shapes of the works of train_step.py, by the fastest backend
    collective   all-reduce, all-gather, reduce-scatter, permute, all-to-all over all devices
    limit        the fastest possible step of each work, from the rates measured before in the same run

Each is called for two seconds, as GPUs at their limit of power lower their clocks; `sm_mhz` and `watts` say how far.
The limit takes every matmul at the best rate of its dtype and attention at its best rate; nothing else takes time.
`update_milliseconds` is what reading and writing weights, gradient and moments once (28 bytes a parameter) takes at the
speed of a copy: it is not part of the limit. GB/s of a collective are bus bandwidth as NCCL's tests count it: of an
all-reduce 2 (n - 1) / n times the bytes, of a permute all bytes, of the others (n - 1) / n times. A row is appended to
benchmarks/results/device.jsonl as soon as it is measured.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.clocks import GpuClocks
from benchmarks.rows import append_rows, print_table
from benchmarks.steps import rates
from benchmarks.timing import median_seconds
from benchmarks.training.train_step import WORKS
from jaxstack.distributed.device_setup import start_devices
from jaxstack.distributed.xla_options import step_options
from jaxstack.models import count_parameters, model_flops_per_token
from jaxstack.run_config import RunConfig, load_config
from pallas_kernels import flash_attention
from pallas_kernels.fp8.formats import E4M3, dequantize, quantize
from pallas_kernels.target import current_target
from pallas_kernels.triton_support import unsupported_target

GEMMS = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (32768, 2048, 8192),
    (32768, 8192, 2048),
    (8192, 4096, 14336),
    (16384, 14336, 4096),
    (8192, 4096, 128256),
)
"""Rows, summed dim, columns."""
SUSTAINED_SECONDS = 0.4
"""Length of each of five blocks of calls; a GPU at its power limit lowers its clock within less."""
COPY_BYTES = 2**31
PEAK_BANDWIDTH = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}
"""Bytes a second of the memory by its data sheet; a kernel should reach 88 % of it."""
COLLECTIVE_BYTES = 2**29
ATTENTION_TOKENS = 32768
"""Largest number of tokens on a device for measuring attention, except for a single longer sequence."""
COLUMNS = (
    "work", "implementation", "devices", "milliseconds", "tflops_per_device", "gigabytes_per_second",
    "bandwidth_share", "tokens_per_second_per_device", "mfu", "update_milliseconds", "sm_mhz", "watts",
)  # fmt: skip

Row = dict[str, Any]


class Device:
    """Measures the parts and records the best rates, from which the limit is computed."""

    def __init__(self, tiny: bool):
        self.tiny = tiny
        self.kind = jax.devices()[0].device_kind
        self.count = jax.device_count()
        self.on_gpu = jax.default_backend() == "gpu"
        self.best: dict[Any, float] = {}
        """FLOP/s by dtype and by attention shape, bytes/s of `copy`."""
        self.clocks: dict[str, float] = {}
        """Clock and power of the last measurement."""

    def seconds(self, function: Callable[..., Any], *arrays: Any) -> float:
        """Return the median time of a call of the compiled function over two seconds; sets `clocks`."""
        options: Any = step_options() if self.on_gpu else None
        compiled = jax.jit(function).lower(*arrays).compile(compiler_options=options)
        if self.on_gpu:
            call = functools.partial(compiled, *arrays)
            with GpuClocks() as clocks:
                seconds = median_seconds(call, jax.block_until_ready, SUSTAINED_SECONDS, most_calls=10_000)
            self.clocks = clocks.row
            return seconds
        # Simulated devices share a few threads: collectives of several calls would wait for one another.
        return median_seconds(lambda: jax.block_until_ready(compiled(*arrays)), lambda result: result)

    def row(self, work: str, implementation: str, seconds: float, **values: Any) -> Row:
        """A row of one device."""
        described = {"work": work, "implementation": implementation, "device": self.kind, "devices": 1}
        return {**described, "milliseconds": 1e3 * seconds, **values, **self.clocks}

    def keep(self, key: Any, rate: float) -> float:
        """Record a rate if it is the best one so far, and return it."""
        self.best[key] = max(rate, self.best.get(key, 0.0))
        return rate

    def gemm(self) -> Iterator[Row]:
        """Matmuls of random operands."""
        for rows, inner, columns in ((64, 64, 64),) if self.tiny else GEMMS:
            keys = jax.random.split(jax.random.key(0), 2)
            x = jax.random.normal(keys[0], (rows, inner), jnp.bfloat16)
            # Both with the summed dim contiguous, the only form that FP8 tensor cores take.
            w = jax.random.normal(keys[1], (columns, inner), jnp.bfloat16)
            for dtype, function, arrays in matmuls(x, w):
                seconds = self.seconds(function, *arrays)
                rate = self.keep(dtype, 2 * rows * inner * columns / seconds)
                work = f"gemm {dtype} {rows} x {inner} x {columns}"
                yield self.row(work, "xla", seconds, tflops_per_device=rate / 1e12)

    def copy(self) -> Iterator[Row]:
        """Bytes read and written."""
        size = 2**16 if self.tiny else COPY_BYTES
        x = jnp.arange(size // 4, dtype=jnp.float32)
        works: dict[str, Callable[[jax.Array], jax.Array]] = {"xla": jnp.negative}
        if unsupported_target(current_target(), (9, 0)) is None:
            from benchmarks.kernels.copy_kernel import copy

            works["jaxstack triton"] = copy
        for name, function in works.items():
            if function is not jnp.negative and not jnp.array_equal(jax.jit(function)(x), x):
                raise SystemExit(f"copy by {name}: the copy differs from the array")
            seconds = self.seconds(function, x)
            rate = self.keep("copy", 2 * size / seconds)
            share = {"bandwidth_share": rate / PEAK_BANDWIDTH[self.kind]} if self.kind in PEAK_BANDWIDTH else {}
            work = f"copy of {size / 2**30:.3g} GiB"
            yield self.row(work, name, seconds, gigabytes_per_second=rate / 1e9, **share)

    def attention(self) -> Iterator[Row]:
        """Causal attention at each work's shape; 3.5 times the forward's FLOPs, half of the square of the length."""
        names = ("mosaic", "cudnn") if self.on_gpu else ("xla",)
        for batch, length, heads, kv_heads, width in dict.fromkeys(attention_shape(c) for c in self.configs()):
            if self.tiny:
                batch = 1
                length = 32
            counts = (heads, kv_heads, kv_heads, heads)
            keys = jax.random.split(jax.random.key(0), len(counts))
            shapes = [(batch, length, n, width) for n in counts]
            x = [jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True)]
            for name in names:
                attend = functools.partial(flash_attention, causal=True, implementation=name)
                try:
                    seconds = self.seconds(lambda q, k, v, d, f=attend: jax.vjp(f, q, k, v)[1](d), *x)
                except Exception as error:  # One backend's failure must not hide the others' numbers.
                    print(f"attention by {name}: {str(error).splitlines()[0]}", flush=True)
                    continue
                flops = 3.5 * 4 * batch * length**2 / 2 * heads * width
                rate = self.keep((length, heads, kv_heads, width), flops / seconds)
                work = f"attention forward+backward {batch}, {length}, {heads}/{kv_heads}, {width} causal bf16"
                yield self.row(work, f"jaxstack {name}", seconds, tflops_per_device=rate / 1e12)

    def collective(self) -> Iterator[Row]:
        """Collectives over all devices, so many bytes a device; of an all-gather its result, of others the operand."""
        n = self.count
        size = 2**16 if self.tiny else COLLECTIVE_BYTES
        if n == 1:
            print("collective: needs two or more devices", flush=True)
            return
        mesh = jax.make_mesh((n,), ("x",), axis_types=(AxisType.Auto,))
        for name, (function, split, factor) in collectives(n).items():
            elements = size // 2 // (n if split else 1)
            place = NamedSharding(mesh, P("x"))
            make = jax.jit(lambda m=elements: jnp.ones((n * m,), jnp.bfloat16), out_shardings=place)
            run = jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
            seconds = self.seconds(run, make())
            row = self.row(f"{name} of {size / 2**20:.3g} MiB a device", "xla", seconds)
            yield {**row, "devices": n, "gigabytes_per_second": factor * size / seconds / 1e9}

    def limit(self) -> Iterator[Row]:
        """The fastest possible step of each work that trains all weights."""
        for work, config in zip(WORKS, self.configs(), strict=True):
            if not config.adapters.rules:
                yield {"work": work, "implementation": "limit", **self.limit_of(config)}

    def limit_of(self, config: RunConfig) -> Row:
        """Return the limit of one configuration.

        Raises:
            SystemExit: a rate that it needs was not measured.
        """
        train = config.train
        model = config.model
        devices = functools.reduce(lambda a, b: a * b, config.parallel.degrees.values())
        tokens = train.global_batch_size * train.sequence_length / devices
        count = count_parameters(model)
        matmul = 6.0 * count.matmul
        fp8 = matmul - 6.0 * model.vocab_size * model.hidden_size if config.precision.fp8 != "none" else 0.0  # pyright: ignore
        attention = model_flops_per_token(model, train.sequence_length) - matmul
        shape = attention_shape(config)[1:]
        if self.tiny:
            shape = (32, *shape[1:])
        try:
            seconds = tokens * (
                (matmul - fp8) / self.best["bf16"] + fp8 / self.best["fp8"] + attention / self.best[shape]
            )
            update = 28.0 * count.total / devices / self.best["copy"]
        except KeyError as missing:
            raise SystemExit(f"limit: needs the rate of {missing}; measure gemm, copy and attention too") from None
        found = rates(config, 1e3 * seconds, devices, self.kind)
        return {**found, "milliseconds": 1e3 * seconds, "update_milliseconds": 1e3 * update}

    @staticmethod
    def configs() -> list[RunConfig]:
        """Return the attention shapes of the works."""
        return [load_config(None, overrides) for overrides in WORKS.values()]


def matmuls(x: jax.Array, w: jax.Array) -> Iterator[tuple[str, Callable[..., jax.Array], tuple]]:
    """(dtype, function, operands) of x [rows, D] times w [columns, D] transposed."""
    yield "bf16", lambda x, w: x @ w.T, (x, w)
    yield (
        "fp8",
        lambda x, w: dequantize(x, jnp.bfloat16) @ dequantize(w, jnp.bfloat16).T,
        (quantize(x, E4M3), quantize(w, E4M3)),
    )
    integers = tuple(jnp.clip(jnp.round(30 * a), -127, 127).astype(jnp.int8) for a in (x, w))
    yield "int8", lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), None, jnp.int32), integers


def collectives(n: int) -> dict[str, tuple[Callable[[jax.Array], jax.Array], bool, float]]:
    """Name -> function of a device's part, whether that is a part of the bytes counted, bus bytes a byte."""
    shift = [(i, (i + 1) % n) for i in range(n)]
    share = (n - 1) / n
    return {
        "all-reduce": (lambda x: jax.lax.psum(x, "x"), False, 2 * share),
        "all-gather": (lambda x: jax.lax.all_gather(x, "x", tiled=True), True, share),
        "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, "x", tiled=True), False, share),
        "permute": (lambda x: jax.lax.ppermute(x, "x", shift), False, 1.0),
        "all-to-all": (lambda x: jax.lax.all_to_all(x.reshape(n, -1), "x", 0, 0).reshape(-1), False, share),
    }


def attention_shape(config: RunConfig) -> tuple[int, int, int, int, int]:
    """Batch, length, heads, kv heads and head dim of a work, with no more tokens than needed to measure."""
    model = config.model
    train = config.train
    batch = max(1, min(train.global_batch_size, ATTENTION_TOKENS // train.sequence_length))
    return batch, train.sequence_length, model.num_heads, model.kv_heads, model.width_per_head


def main() -> None:
    """Measures the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("gemm", "copy", "attention", "collective", "limit")
    parser.add_argument("--only", nargs="+", default=list(parts), choices=parts, metavar="PART")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on simulated CPU devices; rows go to tiny/")
    args = parser.parse_args()
    start_devices(4 if args.tiny else None)
    device = Device(args.tiny)
    rows = []
    for part in args.only:
        for row in getattr(device, part)():
            rows.append(row)
            append_rows("tiny/device" if args.tiny else "device", [row])
            print(f"{row['work']}, {row['implementation']}: {row['milliseconds']:,.3f} ms", flush=True)
    print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
