"""A tensor-parallel MLP with communication inside our kernels, serialised with XLA's matmuls, and without any.

    python benchmarks/distributed/collective_matmul.py          # all of the GPUs here and two of them, all variants
    python benchmarks/distributed/collective_matmul.py --devices 4 --only default
    python benchmarks/distributed/collective_matmul.py --quick  # checks and the main variants only

The MLP is that of llama3-8b (D 4096, F 14336, one matrix up and one down) on 2 x 8192 tokens, whose rows are split over
the devices between the matmuls; `gated` has its second matrix up too, and `beside` runs with a gather of XLA at the
same time. Each variant is checked first, at a small shape and at the full one: every device's
result and gradients against float32, whose error may be at most twice that of the serialised form. Variants run in
processes that print events; one without events for `--patience` seconds is killed, and the next variant starts in a new
process. `gemm` is the kernels' product on one device, without communication, compared with XLA's. A row is appended
to benchmarks/results/collective_matmul.jsonl when it is complete. `--tiny` runs the two references on simulated CPU
devices; the kernels need GPUs.
"""

import argparse
import functools
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.reports import events, report
from benchmarks.timing import median_seconds
from jaxstack.launch.supervisor import count_gpus

FULL = 16384, 4096, 14336
"""Rows, D and F."""
SMALL = 2048, 512, 2048
"""The same where results are checked first."""
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "group 4": {"gather": {"group": 4}, "scatter": {"group": 4}},
    "group 16": {"gather": {"group": 16}, "scatter": {"group": 16}},
    "sum by XLA": {"gather": {"stages": 3, "store_columns": 64}, "scatter": {"sum_in_kernel": False}},
    "columns 128": {"gather": {"columns": 128, "stages": 6}, "scatter": {"columns": 128, "stages": 6}},
}
"""Name -> fields of the kernels' `Tiling` that differ from the default."""
QUICK = ("default", "sum by XLA")
REFERENCES = ("serialised", "no communication")

# --- the parent ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Runs what the command line asks for, prints a table and appends the rows."""
    options = parse()
    if options.child:
        return run_child(options)
    from benchmarks.rows import append_rows, print_table

    names = [*REFERENCES, *(() if options.tiny else QUICK if options.quick else VARIANTS)]
    if options.only:
        names = [name for name in names if any(word in name for word in options.only)]
    rows = []
    for devices in options.devices:
        base: dict[str, Any] = {}
        for row in run_all(devices, names, options.patience, options.tiny):
            base = row if row["implementation"].endswith("serialised") else base
            for key in ("forward_milliseconds", "milliseconds"):
                if row.get(key) and base.get(key):
                    row[key.replace("milliseconds", "speedup")] = base[key] / row[key]
            rows.append(row)
            if "milliseconds" in row:
                append_rows("tiny/collective_matmul" if options.tiny else "collective_matmul", [row])
    columns = ("work", "implementation", "gather_milliseconds", "scatter_milliseconds", "forward_milliseconds")
    columns += ("forward_speedup", "milliseconds", "speedup", "gated_forward_milliseconds", "gated_milliseconds")
    columns += ("beside_milliseconds", "gemm_tflops", "gemm_transposed_tflops", "check")
    print_table(rows, columns)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="*", help="left out: all GPUs, and two of them")
    parser.add_argument("--only", nargs="*", help="variants whose name contains one of these words")
    parser.add_argument("--quick", action="store_true", help="checks and the main variants only")
    parser.add_argument("--patience", type=float, default=75, help="seconds without a word before a variant is killed")
    parser.add_argument("--tiny", action="store_true", help="the references at a small shape on simulated CPU devices")
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    devices = options.devices or sorted({4 if options.tiny else count_gpus(), 2}, reverse=True)
    if devices[-1] < 2 or not options.tiny and max(devices) > count_gpus():
        parser.error(f"needs two or more GPUs, found {count_gpus()}; or --tiny, on simulated CPU devices")
    options.devices = devices
    return options


def run_all(devices: int, names: list[str], patience: float, tiny: bool) -> Iterator[dict]:
    """Yield a complete row for each variant; after a crash or a timeout the remaining ones run in a new process."""
    left = list(names)
    while left:
        row = new_row(devices, current := left[0], tiny)
        command = [sys.executable, __file__, "--devices", str(devices), *(["--tiny"] if tiny else []), "--child", *left]
        for event in events(command, patience):
            if event.get("variant", current) != current:
                yield row
                left.remove(current)
                row = new_row(devices, current := event["variant"], tiny)
            row.update(event.get("values", {}))
            if "note" in event:
                print(f"[{devices}] {current}: {event['note']}", flush=True)
            if "failed" in event:
                row["check"] = "FAILED: " + event["failed"]
                print(f"[{devices}] {current} FAILED: {event['failed']}", flush=True)
        yield row
        left.remove(current)


def new_row(devices: int, name: str, tiny: bool) -> dict:
    work = f"mlp tensor{devices} {' x '.join(map(str, SMALL if tiny else FULL))} bf16"
    implementation = f"xla {name}" if name in REFERENCES else f"jaxstack mosaic, {name}"
    return {"work": work, "implementation": implementation, "devices": devices}


# --- the child ----------------------------------------------------------------------------------------------------


def run_child(options: argparse.Namespace) -> None:
    """All checks and times of the variants named, in this process."""
    import jax

    from jaxstack.distributed.device_setup import start_devices

    (devices,) = options.devices
    start_devices(devices if options.tiny else None)
    for name in options.child:
        report(variant=name, values={"device": jax.devices()[0].device_kind})
        try:
            work = Work(devices, name, SMALL if options.tiny else FULL)
            if name not in REFERENCES:
                work.check(SMALL, work.parts(name))
                work.check(work.sizes, ("mlp", "gated", "beside"))
                report(values={"check": "equal"}, note="results and gradients agree")
            work.time()
            if name != "serialised":
                work.time_product()
        except Exception as error:  # One variant's failure must not hide the others' numbers.
            traceback.print_exc()
            report(failed=f"{type(error).__name__}: {str(error)[:500]}")


class Work:
    """One variant of the MLP on some devices.

    Args:
        devices: of the axis.
        name: of the variant.
        sizes: rows, D and F.
    """

    known: ClassVar[dict[tuple, tuple[tuple, list]]] = {}

    def __init__(self, devices: int, name: str, sizes: tuple[int, int, int]):
        import jax

        self.devices = devices
        self.name = name
        self.sizes = sizes
        self.mesh = jax.make_mesh(
            (devices,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
        )

    def multiplier(self, name: str) -> Any:
        from pallas_kernels.collective_matmul.mosaic import OverlappedMultiplier
        from pallas_kernels.collective_matmul.xla import SequentialMultiplier

        if name == "serialised":
            return SequentialMultiplier()
        if name == "no communication":
            return Local(self.devices)
        fields = VARIANTS[name]
        return OverlappedMultiplier(
            *(tuple(sorted(fields.get(kernel, {}).items())) for kernel in ("gather", "scatter"))
        )

    def parts(self, name: str) -> dict[str, tuple[Callable, tuple, Any]]:
        """Name -> local function, in_specs, out_specs."""
        import jax
        from jax.sharding import PartitionSpec as P

        from pallas_kernels.collective_matmul import gradients

        up = P(None, "tensor")
        down = P("tensor", None)
        rows = P("tensor", None)
        multiplier = self.multiplier(name)

        def gather(x: Any, w: Any) -> Any:
            (out,) = gradients.gather_multiply(multiplier, "tensor", x, (w,))  # pyright: ignore
            return out

        def gated(x: Any, w1: Any, w2: Any, w3: Any) -> Any:
            first, second = gradients.gather_multiply(multiplier, "tensor", x, (w1, w2))  # pyright: ignore
            return scatter(first * second, w3)

        def beside(x: Any, w1: Any, w2: Any) -> Any:
            # Nothing orders XLA's gather and the MLP: they run at the same time and wait for the same devices.
            every = jax.lax.all_gather(x * 2, "tensor", axis=0, tiled=True)
            return scatter(gather(x, w1), w2) + every.max(axis=0)

        scatter = functools.partial(gradients.multiply_scatter, multiplier, "tensor")
        return {
            "gather": (gather, (rows, up), up),
            "scatter": (scatter, (up, down), rows),
            "mlp": (lambda x, w1, w2: scatter(gather(x, w1), w2), (rows, up, down), rows),
            "gated": (gated, (rows, up, up, down), rows),
            "beside": (beside, (rows, up, down), rows),
        }

    def jitted(self, name: str, part: str, gradients: bool) -> Any:
        """jit of a part's forward, or of its result and all gradients (the last argument is the cotangent)."""
        import jax

        local, ins, outs = self.parts(name)[part]

        def both(*arguments: Any) -> tuple:
            result, backward = jax.vjp(local, *arguments[:-1])
            return result, *backward(arguments[-1])

        function = both if gradients else local
        specs = ((*ins, outs), (outs, *ins)) if gradients else (ins, outs)
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
        return jax.jit(mapped)

    def arrays(self, sizes: tuple[int, int, int], part: str, dtype: Any = "bfloat16") -> tuple:
        """Return the part's arguments and its result's cotangent, with their shardings."""
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding

        tokens, width, inner = sizes
        mlp = ((tokens, width), (width, inner), (inner, width), (tokens, width))
        shapes = {
            "gather": ((tokens, width), (width, inner), (tokens, inner)),
            "scatter": ((tokens, inner), (inner, width), (tokens, width)),
            "mlp": mlp,
            "gated": (mlp[0], mlp[1], *mlp[1:]),
            "beside": mlp,
        }[part]
        _, ins, outs = self.parts(self.name)[part]
        keys = jax.random.split(jax.random.key(0), len(shapes))
        result = []
        for number, (key, shape, spec) in enumerate(zip(keys, shapes, (*ins, outs), strict=True)):
            scale = shape[0] ** -0.5 if 0 < number < len(shapes) - 1 else 1.0

            def make(key: Any, shape: tuple = shape, scale: float = scale) -> Any:
                return (scale * jax.random.normal(key, shape, jnp.float32)).astype(jnp.bfloat16).astype(dtype)

            result.append(jax.jit(make, out_shardings=NamedSharding(self.mesh, spec))(key))
        return tuple(result)

    def check(self, sizes: tuple[int, int, int], parts: Iterable[str]) -> None:
        """Raises AssertionError where a result or a gradient is further from float32 than twice the serialised one."""
        import jax

        for part in parts:
            arrays = self.arrays(sizes, part)
            exact, errors = self.expected(sizes, part, arrays)
            function = self.jitted(self.name, part, True)
            for attempt in range(3):
                got = jax.block_until_ready(function(*arrays))
                for index, (mine, want, (mean_its, most_its)) in enumerate(zip(got, exact, errors, strict=True)):
                    mean, most = distance(mine, want)
                    where = f"{part} {sizes}, array {index} (0 the result, then gradients), attempt {attempt}"
                    good = mean <= 2 * mean_its + 1e-6 and most <= 4 * most_its + 1e-6
                    assert good, (
                        f"{where}: error {mean:.3g} (most {most:.3g}), serialised {mean_its:.3g} ({most_its:.3g})"
                    )
            report(note=f"{part} {sizes} equal")

    def expected(self, sizes: tuple[int, int, int], part: str, arrays: tuple) -> tuple[tuple, list]:
        """The float32 results and gradients of a part, and how far the serialised form is from them."""
        import jax
        import jax.numpy as jnp

        key = self.devices, sizes, part
        if key not in self.known:
            with jax.default_matmul_precision("highest"):
                exact = self.jitted("serialised", part, True)(*(x.astype(jnp.float32) for x in arrays))
            plain = self.jitted("serialised", part, True)(*arrays)
            self.known[key] = exact, [distance(*pair) for pair in zip(plain, exact, strict=True)]
        return self.known[key]

    def time(self) -> None:
        """Milliseconds of the parts' forwards, and of the MLP's forward and backward."""
        for part in self.parts(self.name):
            arrays = self.arrays(self.sizes, part)
            name = {"mlp": "forward", "gated": "gated_forward"}.get(part, part)
            values = {f"{name}_milliseconds": self.milliseconds(part, False, arrays)}
            if part in ("mlp", "gated"):
                name = "milliseconds" if part == "mlp" else "gated_milliseconds"
                values[name] = self.milliseconds(part, True, arrays)
            report(values=values, note=str(values))

    def milliseconds(self, part: str, gradients: bool, arrays: tuple) -> float:
        import jax

        arguments = arrays if gradients else arrays[:-1]
        compiled = self.jitted(self.name, part, gradients).lower(*arguments).compile()
        return 1e3 * median_seconds(lambda: compiled(*arguments), jax.block_until_ready, 0.2)

    def time_product(self) -> None:
        """TFLOP/s of the up product alone on one device, its right operand as it is and transposed."""
        import jax
        import jax.numpy as jnp

        tokens, width, inner = self.sizes
        columns = inner // self.devices
        x = jnp.ones((tokens, width), jnp.bfloat16) * 0.5
        x = x * jax.random.normal(jax.random.key(1), x.shape, jnp.bfloat16)
        values = {}
        for transposed in (False, True):
            w = jax.random.normal(jax.random.key(2), (columns, width) if transposed else (width, columns), jnp.bfloat16)
            function = functools.partial(self.product, transposed=transposed)
            compiled = jax.jit(function).lower(x, w).compile()
            want = jnp.dot(x, w.T if transposed else w, preferred_element_type=jnp.float32)
            difference = float(jnp.max(jnp.abs(compiled(x, w).astype(jnp.float32) - want)))
            assert difference <= 0.02 * float(jnp.max(jnp.abs(want))), f"the product is off by {difference}"
            seconds = median_seconds(functools.partial(compiled, x, w), jax.block_until_ready, 0.2)
            key = "gemm_transposed_tflops" if transposed else "gemm_tflops"
            values[key] = 2 * tokens * width * columns / seconds / 1e12
        report(values=values, note=str(values))

    def product(self, x: Any, w: Any, transposed: bool) -> Any:
        import jax

        if self.name in REFERENCES:
            return jax.lax.dot_general(x, w, (((1,), (1 if transposed else 0,)), ((), ())))
        from pallas_kernels.collective_matmul.mosaic_gather import gather_multiply
        from pallas_kernels.collective_matmul.mosaic_product import CollectiveProduct, CollectiveTiling

        tiling = CollectiveTiling(**VARIANTS[self.name].get("gather", {}))
        columns = w.shape[0 if transposed else 1]
        product = CollectiveProduct(x.shape[0], (x.shape[1],), (columns,), 1, transposed, tiling)
        return gather_multiply(product, x, (w,))[0][0]


def distance(got: Any, want: Any) -> tuple[float, float]:
    """Root of the mean square of the difference, and its maximum."""
    import jax.numpy as jnp

    difference = jnp.abs(got.astype(jnp.float32) - want)
    return float(jnp.sqrt(jnp.mean(difference**2))), float(jnp.max(difference))


class Local:
    """A `Multiplier` with the same FLOPs and no communication: wrong results, and a lower bound of the time."""

    def __init__(self, devices: int):
        self.devices = devices

    def gather_multiply(self, x: Any, weights: tuple, axis_name: str, transposed: bool) -> tuple:
        import jax
        import jax.numpy as jnp

        from pallas_kernels.collective_matmul.xla import multiply

        del axis_name
        gathered = jnp.broadcast_to(x[None], (self.devices, *x.shape)).reshape(-1, x.shape[1])
        gathered = jax.lax.optimization_barrier(gathered)
        return tuple(multiply(gathered, w, transposed) for w in weights), gathered

    def multiply_scatter(self, xs: tuple, weights: tuple, axis_name: str, transposed: bool) -> Any:
        import jax

        from pallas_kernels.collective_matmul.xla import multiply

        del axis_name
        total = sum(multiply(x, w, transposed) for x, w in zip(xs, weights, strict=True))
        return jax.lax.optimization_barrier(total)[: xs[0].shape[0] // self.devices]


if __name__ == "__main__":
    main()
