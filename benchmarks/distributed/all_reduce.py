"""All-reduces of a decoding step's size over the GPUs of a host: NCCL's, XLA's kernels and ours.

    python benchmarks/distributed/all_reduce.py                    # all GPUs, 1 to 512 rows of 4096 values in bfloat16
    python benchmarks/distributed/all_reduce.py --devices 2 --rows 64 256 --width 8192

A program sums, adds to the result and sums again, 32 times, as the layers of a model do, in each of 16 steps, as text
is generated in several steps of one program; the time of the same program without sums is subtracted. With `--steps 1`
the times contain what the host does for each sum when a program starts. `nccl in graphs` records NCCL's all-reduces in
CUDA graphs, `xla` is what XLA does by default: since jaxlib 0.11 kernels of its own for up to 4 MiB, which no graph can
contain. `mosaic + norm` adds to a residual stream and normalizes too, in the same kernel; the program without sums does
that as well. Results are checked against float32 first, and must have equal bits on all devices. Rows are appended to
benchmarks/results/all_reduce.jsonl. `--tiny` runs XLA's on simulated CPU devices.
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks.rows import append_rows, print_table
from benchmarks.timing import median_seconds
from jaxstack.distributed.device_setup import start_devices
from jaxstack.distributed.xla_options import OptionValue, low_precision_cpu_options, translate_options
from pallas_kernels import NotSupported, all_reduce, all_reduce_rms_norm, rms_norm

CALLS = 32
STEPS = 16
KERNELS = "xla_gpu_experimental_use_collective_kernels"
GRAPHS = "xla_gpu_enable_command_buffer"
IN_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION,COLLECTIVES"


class AllReduce(NamedTuple):
    """A way to sum over devices.

    Attributes:
        implementation: of `pallas_kernels.all_reduce`.
        options: XLA's compiler options.
    """

    implementation: str
    options: dict[str, OptionValue]


ALL_REDUCES = {
    "nccl": AllReduce("xla", {KERNELS: ""}),
    "nccl in graphs": AllReduce("xla", {KERNELS: "", GRAPHS: IN_GRAPHS}),
    "xla": AllReduce("xla", {}),
    "mosaic": AllReduce("mosaic", {}),
}
"""Name -> how it is done; `benchmarks/serving/generate.py` measures whole steps with them."""
NORM = " + norm"


class Work:
    """The programs of one size, with their arguments on the devices.

    Args:
        devices: number of devices.
        rows, width: size of the array that is summed, in bfloat16.
        steps: number of steps of a program.
    """

    def __init__(self, devices: int, rows: int, width: int, steps: int):
        self.steps = steps
        self.mesh = jax.make_mesh((devices,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
        self.devices = devices
        generator = np.random.default_rng(0)
        parts = generator.standard_normal((devices, rows, width)).astype(jnp.bfloat16)
        self.parts = jax.device_put(parts, jax.NamedSharding(self.mesh, P("tensor")))
        self.weight = jax.device_put(np.ones(width, np.float32), jax.NamedSharding(self.mesh, P()))

    def program(self, name: str | None, norm: bool, calls: int = CALLS) -> Any:
        """Return a compiled program of all-reduces, from the devices' parts to the devices' results."""
        steps = self.steps if calls > 1 else 1
        way = ALL_REDUCES[name] if name else AllReduce("xla", {})
        total = functools.partial(all_reduce, axis_name="tensor", implementation=way.implementation)
        both = functools.partial(all_reduce_rms_norm, axis_name="tensor", implementation=way.implementation)

        def local(parts: jax.Array, weight: jax.Array) -> jax.Array:
            def step(_: jax.Array | int, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                x, residual = carry
                for _ in range(calls):
                    if name is None:
                        x = jax.lax.optimization_barrier(x)
                        if norm:
                            x, residual = rms_norm(x, weight, residual=residual / 2)
                    elif norm:
                        x, residual = both(x, residual / 2, weight)
                    else:
                        x = total(x)
                    # Something of each device's own: XLA would not sum what is equal everywhere.
                    x = x * (1 / self.devices) + parts[0] if calls > 1 else x
                return x, residual

            carry = parts[0], parts[0]
            x, _ = jax.lax.fori_loop(0, steps, step, carry) if steps > 1 else step(0, carry)
            return x[None]

        specs = P("tensor"), P()
        mapped = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=P("tensor"), check_vma=False)
        on_gpu = jax.default_backend() == "gpu"
        options = translate_options(way.options)[0] if on_gpu else low_precision_cpu_options()
        return jax.jit(mapped).lower(self.parts, self.weight).compile(compiler_options=options)

    def check(self, name: str) -> str:
        """Return "equal" if the sums are right and have equal bits everywhere, else what is wrong."""
        found = np.asarray(self.program(name, False, 1)(self.parts, self.weight), np.float32)
        expected = np.asarray(self.parts, np.float32).sum(0)
        error = np.linalg.norm(found[0] - expected) / np.linalg.norm(expected)
        if not error < 0.01:
            return f"FAILED: relative error {error:.3g}"
        return "equal" if (found == found[:1]).all() else "FAILED: bits differ between devices"

    def seconds(self, name: str | None, norm: bool) -> float:
        """Return the seconds of the program."""
        program = self.program(name, norm)
        return median_seconds(lambda: program(self.parts, self.weight), jax.block_until_ready)


def measure(devices: int, rows: int, width: int, steps: int, names: list[str]) -> list[dict[str, Any]]:
    """Return a row for each way to sum an array of one size."""
    work = Work(devices, rows, width, steps)
    shown_steps = f", {steps} steps" if steps > 1 else ""
    base = {norm: work.seconds(None, norm) for norm in (False, True)}
    found = []
    for name in names:
        for norm in (False, True) if ALL_REDUCES[name].implementation == "mosaic" else (False,):
            try:
                check = work.check(name)
                seconds = work.seconds(name, norm)
            except (NotSupported, jax.errors.JaxRuntimeError) as error:
                print(f"no row of {name}, {rows} rows: {str(error)[:300]}", flush=True)
                continue
            shown = name + NORM * norm
            microseconds = 1e6 * (seconds - base[norm]) / (CALLS * steps)
            print(f"{rows} x {width}, {devices} devices, {shown}: {microseconds:.1f} us, {check}", flush=True)
            found.append({
                "work": f"all-reduce {rows} x {width} bf16{shown_steps}", "implementation": shown, "devices": devices,
                "device": jax.devices()[0].device_kind, "microseconds": microseconds, "check": check,
                "program_milliseconds": 1e3 * seconds,
            })  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, help="left out: all")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256, 512], help="of the array")
    parser.add_argument("--width", type=int, default=4096, help="values of a row")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a program")
    parser.add_argument("--only", nargs="+", default=list(ALL_REDUCES), choices=ALL_REDUCES, help="ways to sum")
    parser.add_argument("--tiny", action="store_true", help="XLA's all-reduce on two simulated CPU devices")
    options = parser.parse_args()
    start_devices(2 if options.tiny else None)
    devices = options.devices or jax.device_count()
    if devices < 2 or devices > jax.device_count():
        parser.error(f"needs two or more devices, found {jax.device_count()}; or --tiny, on simulated CPU devices")
    rows = []
    for count in [1] if options.tiny else options.rows:
        found = measure(devices, count, options.width, options.steps, ["xla"] if options.tiny else options.only)
        append_rows("tiny/all_reduce" if options.tiny else "all_reduce", found)
        rows += found
    print_table(rows, ("work", "implementation", "devices", "microseconds", "program_milliseconds", "check"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
