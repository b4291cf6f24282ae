"""Recurrent mixers, forward and with gradients: ours, flash-linear-attention and mamba_ssm, in turn.

    python benchmarks/kernels/recurrent.py                 # errors of ours, all rows, errors of peers
    python benchmarks/kernels/recurrent.py --only ssd      # works whose name contains the word
    python benchmarks/kernels/recurrent.py --implementations 'jaxstack mosaic' mamba_ssm
    python benchmarks/kernels/recurrent.py --tiny          # ours at tiny sizes, on any device; rows go to tiny/

Works are the gated delta rule, with the normalization of queries and keys, and Mamba-2's state space layer (SSD) with
one group of b and c. Peers are measured where they are installed: `fla-core`, whose SSD is its simple gated linear
attention, of inputs repeated for each head before the time begins; and the Triton kernels of `mamba_ssm`. Only the
modules of these kernels are imported: neither their packages' other layers nor compiled extensions.

jax and torch have one process each, which takes turns with the other work by work. A peer's kernels choose among tens
of configurations at the first call with a number of heads; all of them are compiled at once, and the kernels are named
on standard error as they are tuned. A process that takes longer than `--timeout` is ended and started again for the
next work; what it compiled and chose stays in Triton's cache. Errors of peers are measured after the rows, in shapes
for which their kernels are tuned by then.

`copy_milliseconds` is the time in which a copy reads and writes as many bytes as inputs, outputs and gradients have,
each once: no kernel is faster. A backward that an implementation refuses to compute is `refused` in its row. Rows are
appended to benchmarks/results/recurrent.jsonl.
"""

import argparse
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from benchmarks.arguments import positive
from benchmarks.rows import append_rows, print_table, require_commit
from benchmarks.timing import median_seconds


@dataclasses.dataclass(frozen=True)
class Work:
    """Shapes of one call; in SSD, `keys` is the number of groups.

    Attributes:
        operation: `delta` or `ssd`.
        width: numbers of a value head.
        state: numbers of a key head, or of the state for each number of a head.
    """

    operation: str
    batch: int
    tokens: int
    keys: int
    heads: int
    width: int
    state: int

    @property
    def name(self) -> str:
        """Name in the rows."""
        shape = f"{self.batch} x {self.tokens}"
        if self.operation == "ssd":
            return f"ssd {self.heads} heads of {self.width}, state {self.state}, {shape}"
        return f"gated delta rule {self.keys} key / {self.heads} value heads of {self.width}, {shape}"


def delta(batch: int, tokens: int, keys: int, heads: int) -> Work:
    """Return a work of the gated delta rule, whose heads have the width of today's models."""
    return Work("delta", batch, tokens, keys, heads, 128, 128)


WORKS = [
    *(delta(batch, tokens, keys, 32) for keys in (16, 32) for batch, tokens in ((1, 32768), (1, 8192), (4, 8192))),
    delta(1, 32768, 64, 64),
    delta(1, 32768, 8, 8),
    Work("ssd", 2, 8192, 1, 64, 64, 128),
    Work("ssd", 1, 32768, 1, 64, 64, 128),
]
TINY = [Work("delta", 1, 128, 1, 2, 16, 16), Work("ssd", 1, 128, 1, 2, 8, 16)]
SMALL = [delta(2, 512, 16, 32), Work("ssd", 2, 512, 1, 64, 64, 128)]
"""What the errors are measured at: few tokens of the heads of `WORKS`, by which peers tune their kernels."""
FLOAT32 = ("log_decay", "beta", "dt", "a")
"""Inputs that are not in bfloat16."""
OURS = {"jaxstack": None, "jaxstack mosaic": "mosaic", "jaxstack xla": "xla"}
"""Implementation of ours -> its backend; None: the one that is chosen."""
PEERS = {"flash-linear-attention": "fla", "mamba_ssm": "mamba_ssm"}
"""Implementation in torch -> its package."""
BARE = ("fla", "fla.ops", "fla.modules", "mamba_ssm")
"""Packages whose own imports are skipped: they are of every layer and model, and of compiled extensions."""
OPERATIONS = {"mamba_ssm": ("ssd",)}
"""Implementation -> what it computes, if not all operations."""
NORM_EPSILON = 1e-6
MARK = "RESULT "
"""Start of the lines that a process answers with."""


def make_inputs(work: Work) -> dict[str, np.ndarray]:
    """Return the arrays of a work in float32, by name; `gradient` is that of the output."""
    rng = np.random.default_rng(0)
    pool = rng.standard_normal(2**22 + 1, dtype=np.float32)

    def normal(*shape: int) -> np.ndarray:
        return np.resize(np.roll(pool, int(rng.integers(len(pool)))), shape)

    places = (work.batch, work.tokens)
    keys, values, heads = (*places, work.keys, work.state), (*places, work.heads, work.width), (*places, work.heads)
    if work.operation == "delta":
        found = {
            "q": normal(*keys), "k": normal(*keys), "v": normal(*values),
            "log_decay": -np.logaddexp(0, -3 - normal(*heads)), "beta": 1 / (1 + np.exp(-normal(*heads))),
        }  # fmt: skip
    else:
        # Step sizes from 0.001 to 0.1, as models begin with.
        steps = np.exp(np.clip(normal(*heads) - 4.6, math.log(1e-3), math.log(1e-1)))
        found = {
            "x": normal(*values), "dt": steps, "a": -rng.uniform(1, 16, work.heads).astype(np.float32),
            "b": normal(*keys), "c": normal(*keys),
        }  # fmt: skip
    return {**found, "gradient": normal(*values)}


def moved_bytes(work: Work) -> tuple[int, int]:
    """Return the bytes that the forward pass, and that with gradients, read and write at least."""
    arrays = make_inputs(dataclasses.replace(work, batch=1, tokens=1))
    sizes = {name: array.size * (4 if name in FLOAT32 else 2) for name, array in arrays.items()}
    scale = work.batch * work.tokens
    out = sizes.pop("gradient") * scale
    inputs = sum(size * (1 if name == "a" else scale) for name, size in sizes.items())
    return inputs + out, 3 * inputs + 2 * out


# --- jax --------------------------------------------------------------------------------------------------------------


def jax_function(operation: str, implementation: str | None = None) -> Callable:
    """Return a function of the inputs, in the order of `make_inputs`, that gives the output."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import gated_delta_rule, ssd

    if operation == "ssd":
        return lambda *inputs: ssd(*inputs, implementation=implementation)[0]

    def unit(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide * wide).sum(-1, keepdims=True) + NORM_EPSILON)).astype(x.dtype)

    def normalized(q: Any, k: Any, *rest: Any) -> Any:
        return gated_delta_rule(unit(q), unit(k), *rest, implementation=implementation)[0]

    return normalized


def jax_arrays(work: Work, exact: bool = False) -> dict[str, Any]:
    """Return the inputs on the device; `exact`: rounded to bfloat16, but in float32."""
    import jax
    import jax.numpy as jnp

    def put(name: str, array: np.ndarray) -> Any:
        if name in FLOAT32:
            return jax.device_put(array)
        rounded = jnp.asarray(array, jnp.bfloat16)
        return rounded.astype(jnp.float32) if exact else rounded

    return {name: put(name, array.astype(np.float32)) for name, array in make_inputs(work).items()}


def with_gradients(function: Callable) -> Callable:
    """Return a function of (gradient, *inputs) that gives the output and the gradients of the inputs."""
    import jax

    def both(gradient: Any, *inputs: Any) -> Any:
        out, transpose = jax.vjp(function, *inputs)
        return out, *transpose(gradient)

    return both


def time_jax(implementation: str, work: Work) -> dict[str, Any]:
    """Return the times of ours, and which backend computed it."""
    import jax

    from pallas_kernels import record_choices

    arrays = jax_arrays(work)
    gradient = arrays.pop("gradient")
    function = jax_function(work.operation, OURS[implementation])
    with record_choices() as choices:
        forward = jax.jit(function).lower(*arrays.values()).compile()
    both = jax.jit(with_gradients(function)).lower(gradient, *arrays.values()).compile()
    block = jax.block_until_ready
    return {
        "device": jax.devices()[0].device_kind,
        "backends": sorted({choice.backend for choice in choices}),
        "forward_milliseconds": 1e3 * median_seconds(lambda: forward(*arrays.values()), block),
        "milliseconds": 1e3 * median_seconds(lambda: both(gradient, *arrays.values()), block),
        "extra_bytes": getattr(both.memory_analysis(), "temp_size_in_bytes", 0),
    }


def results_jax(implementation: str, work: Work) -> dict[str, np.ndarray]:
    """Return output and gradients by name: of ours in bfloat16, or of the recurrence (`exact`) in float32."""
    import jax
    import jax.numpy as jnp

    exact = implementation == "exact"
    arrays = jax_arrays(work, exact)
    gradient = arrays.pop("gradient")
    function = jax_function(work.operation, "recurrent" if exact else OURS[implementation])
    with jax.default_matmul_precision("highest" if exact else "default"):
        found = jax.jit(with_gradients(function))(gradient, *arrays.values())
    return dict(zip(("out", *arrays), (np.asarray(x.astype(jnp.float32)) for x in found), strict=True))


def copy_rate(_: str, work: Work) -> dict[str, Any]:
    """Return the bytes that a copy of at least 16 MiB reads and writes a second."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones(max(2**22, min(2**28, moved_bytes(work)[0])), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return {"bytes_per_second": 2 * x.nbytes / median_seconds(lambda: copy(x), jax.block_until_ready)}


# --- torch ------------------------------------------------------------------------------------------------------------


def torch_inputs(work: Work) -> tuple[dict[str, Any], Any]:
    """Return the inputs on the GPU, which want gradients, and the gradient of the output."""
    import torch

    def put(name: str, array: np.ndarray) -> Any:
        dtype = torch.float32 if name in FLOAT32 else torch.bfloat16
        return torch.from_numpy(np.ascontiguousarray(array)).to(torch.device("cuda"), dtype)

    arrays = {name: put(name, array) for name, array in make_inputs(work).items()}
    gradient = arrays.pop("gradient")
    return {name: array.requires_grad_() for name, array in arrays.items()}, gradient


def torch_call(implementation: str, work: Work, inputs: dict[str, Any]) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Return a call that gives the output, and the tensors that it takes gradients of."""
    if implementation == "mamba_ssm":
        combined = import_kernels("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
        return lambda: combined(*inputs.values(), chunk_size=256), inputs
    if work.operation == "delta":
        rule = import_kernels("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        return lambda: rule(*inputs.values(), use_qk_l2norm_in_kernel=True)[0], inputs
    attend = import_kernels("fla.ops.simple_gla").chunk_simple_gla
    x, dt, a, b, c = (array.detach() for array in inputs.values())
    repeats = work.heads // work.keys
    taken = {
        "q": c.repeat_interleave(repeats, 2), "k": b.repeat_interleave(repeats, 2),
        "v": (x * dt[..., None]).to(x.dtype), "g": dt * a,
    }  # fmt: skip
    taken = {name: array.contiguous().requires_grad_() for name, array in taken.items()}
    return lambda: attend(*taken.values(), scale=1.0)[0], taken


def import_kernels(module: str) -> Any:
    """Return a module of a peer, imported without the `__init__.py` of the packages in `BARE`."""
    root = module.partition(".")[0]
    for name in BARE:
        if name.partition(".")[0] != root or name in sys.modules:
            continue
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.submodule_search_locations is not None
        package = types.ModuleType(name)
        package.__path__ = list(spec.submodule_search_locations)
        vars(package)["__version__"] = version_of(root)
        sys.modules[name] = package
    return importlib.import_module(module)


def tune_in_parallel() -> None:
    """Let Triton compile the configurations that a kernel is tuned over in parallel; name the kernel on stderr."""
    from triton.runtime import autotuner
    from triton.runtime._async_compile import AsyncCompileMode

    prune = autotuner.Autotuner.prune_configs

    def prune_and_compile(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        configs = prune(self, kwargs)
        began = time.perf_counter()
        with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for config in configs:
                self.fn.run(**self.nargs, **{**kwargs, "warmup": True}, **config.all_kwargs())
        seconds = time.perf_counter() - began
        print(f"compiled {self.base_fn.__name__}, {len(configs)} ways, in {seconds:.1f} s", file=sys.stderr, flush=True)
        return configs

    autotuner.Autotuner.prune_configs = prune_and_compile


def time_torch(implementation: str, work: Work) -> dict[str, Any]:
    """Return the times of a peer; `refused` says why it computes no gradients."""
    import torch

    inputs, gradient = torch_inputs(work)
    call, taken = torch_call(implementation, work, inputs)
    torch.cuda.reset_peak_memory_stats()

    def wait(_: Any) -> None:
        torch.cuda.synchronize()

    def both() -> Any:
        return torch.autograd.grad(call(), list(taken.values()), gradient)

    with torch.no_grad():
        forward = 1e3 * median_seconds(call, wait)
    row: dict[str, Any] = {
        "implementation": f"{implementation} {version_of(PEERS[implementation])}".strip(),
        "device": torch.cuda.get_device_name(0), "forward_milliseconds": forward,
    }  # fmt: skip
    try:
        row["milliseconds"] = 1e3 * median_seconds(both, wait)
    except Exception as error:  # the message is the result
        row["refused"] = f"{type(error).__name__}: {str(error)[:300]}"
    row["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    return row


def version_of(package: str) -> str:
    """Return the version of an installed package; empty if it was not installed as one, such as from a copy."""
    found = importlib.metadata.packages_distributions().get(package)
    return importlib.metadata.version(found[0]) if found else ""


def results_torch(implementation: str, work: Work) -> dict[str, np.ndarray]:
    """Return output and gradients by name, without those that the peer refuses or that are of other arrays."""
    import torch

    inputs, gradient = torch_inputs(work)
    call, taken = torch_call(implementation, work, inputs)
    out = call()
    found = {"out": out}
    if taken is inputs:
        try:
            found |= dict(zip(inputs, torch.autograd.grad(out, list(inputs.values()), gradient), strict=True))
        except Exception as error:
            print(f"{implementation}, {work.name}: no gradients: {str(error)[:300]}", file=sys.stderr, flush=True)
    return {name: array.detach().float().cpu().numpy() for name, array in found.items()}


# --- one process for each framework -----------------------------------------------------------------------------------

TASKS: dict[tuple[str, str], Callable[[str, Work], Mapping[str, Any]]] = {
    ("jax", "time"): time_jax,
    ("jax", "results"): results_jax,
    ("jax", "copy"): copy_rate,
    ("torch", "time"): time_torch,
    ("torch", "results"): results_torch,
}


def serve(framework: str) -> None:
    """Answer the requests on standard input, one a line; results that are arrays go to the file that is asked for."""
    if framework == "torch":
        tune_in_parallel()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            found = TASKS[framework, request["task"]](request["implementation"], Work(**request["work"]))
        except Exception as error:
            answer: Mapping[str, Any] = {"failed": f"{type(error).__name__}: {str(error)[-500:]}"}
        else:
            if request["task"] == "results":
                np.savez(request["file"], **found)
            answer = {} if request["task"] == "results" else found
        print(MARK + json.dumps(answer), flush=True)


class Failed(Exception):
    """A process ended, took too long, or answered with an error."""


class Process:
    """A process of one framework, started at the first request and again after its end."""

    def __init__(self, framework: str, timeout: float) -> None:
        self.framework = framework
        self.timeout = timeout
        self._process: subprocess.Popen[str] | None = None

    def ask(self, task: str, implementation: str, work: Work, file: Path | None = None) -> dict[str, Any]:
        """Return the answer.

        Raises:
            Failed: There is none.
        """
        if self._process is None:
            command = [sys.executable, __file__, "--serve", self.framework]
            self._process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        request = {"task": task, "implementation": implementation, "work": dataclasses.asdict(work), "file": str(file)}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        timer = threading.Timer(self.timeout, process.kill)
        timer.start()
        line = next((line for line in process.stdout if line.startswith(MARK)), None)
        timer.cancel()
        if line is None:
            self._process = None
            raise Failed(f"no result within {self.timeout:.0f} s, or the process ended ({process.wait()})")
        answer = json.loads(line.removeprefix(MARK))
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


# --- rows -------------------------------------------------------------------------------------------------------------


def installed(wanted: list[str]) -> list[str]:
    """Return the wanted implementations that can be measured; print which are not installed."""
    missing = [name for name in wanted if name in PEERS and not importlib.util.find_spec(PEERS[name])]
    if missing:
        print(f"no rows of {', '.join(missing)}, which are not installed", flush=True)
    return [name for name in wanted if name not in missing]


def ways(work: Work, implementations: list[str]) -> list[str]:
    """Return the implementations that compute a work."""
    return [name for name in implementations if work.operation in OPERATIONS.get(name, (work.operation,))]


def process_of(processes: Mapping[str, Process], implementation: str) -> Process:
    """Return the process of an implementation's framework."""
    return processes["torch" if implementation in PEERS else "jax"]


def check_errors(processes: Mapping[str, Process], implementations: list[str], works: list[Work]) -> bool:
    """Print the relative errors against the recurrence in float32; return whether all of ours are small."""
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for work in works:
            exact = read_results(processes["jax"], "exact", work, Path(folder))
            for name in ways(work, implementations):
                try:
                    found = read_results(process_of(processes, name), name, work, Path(folder))
                except Failed as error:
                    print(f"errors of {name}, {work.name}: {error}", flush=True)
                    good = good and name in PEERS
                    continue
                errors = {key: relative_error(array, exact[key]) for key, array in found.items()}
                print(f"errors of {name}, {work.name}: {json.dumps(errors)}", flush=True)
                good = good and (name in PEERS or max(errors.values()) < 2e-2)
    return good


def read_results(process: Process, implementation: str, work: Work, folder: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an implementation."""
    file = folder / f"{implementation} {work.operation}.npz"
    process.ask("results", implementation, work, file)
    with np.load(file) as found:
        return dict(found)


def relative_error(found: np.ndarray, exact: np.ndarray) -> float:
    """Return the length of the difference relative to that of the exact values; infinity if any is not a number."""
    found, exact = (x.astype(np.float64).ravel() for x in (found, exact))
    error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
    return float(f"{error:.3g}") if np.isfinite(error) else math.inf


def measure_all(
    processes: Mapping[str, Process], implementations: list[str], works: list[Work]
) -> Iterator[dict[str, Any]]:
    """Yield the row of each work and implementation, in turn."""
    rate = processes["jax"].ask("copy", "jaxstack", max(works, key=moved_bytes))["bytes_per_second"]
    for work in works:
        forward, both = moved_bytes(work)
        for name in ways(work, implementations):
            try:
                found = process_of(processes, name).ask("time", name, work)
            except Failed as error:
                print(f"{work.name}, {name}: {error}", flush=True)
                continue
            row = {"work": work.name, "implementation": name, "devices": 1, **found}
            row["copy_forward_milliseconds"] = 1e3 * forward / rate
            row["copy_milliseconds"] = 1e3 * both / rate
            gradients = f"{row['milliseconds']:.3f} ms" if "milliseconds" in row else f"refused, {row['refused']}"
            print(f"{work.name}, {name}: forward {row['forward_milliseconds']:.3f} ms, both {gradients}", flush=True)
            yield row


def main() -> int:
    """Measure each work by each implementation in turn; a row is appended as soon as it is measured."""
    names = [*OURS, *PEERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="works whose name contains it")
    parser.add_argument("--implementations", nargs="+", choices=names, default=[*OURS, *PEERS][1:],
        help="which (default: all, ours by name); jaxstack is what the library chooses")  # fmt: skip
    parser.add_argument("--skip-checks", action="store_true", help="no comparison with float32 first")
    parser.add_argument("--timeout", type=positive(float), default=180, help="seconds a measurement may take")
    parser.add_argument("--tiny", action="store_true", help="ours at tiny sizes; rows go to tiny/")
    parser.add_argument("--serve", choices=("jax", "torch"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return 0
    script = "tiny/recurrent" if args.tiny else "recurrent"
    require_commit(script)
    works = [work for work in (TINY if args.tiny else WORKS) if args.only in work.name]
    if not works:
        parser.error(f"no work's name contains {args.only!r}")
    implementations = ["jaxstack"] if args.tiny else installed(args.implementations)
    processes = {framework: Process(framework, args.timeout) for framework in ("jax", "torch")}
    checked = [work for work in (TINY if args.tiny else SMALL) if any(work.operation == w.operation for w in works)]
    rows = []
    try:
        ours, peers = ([name for name in implementations if (name in PEERS) == peer] for peer in (False, True))
        good = args.skip_checks or check_errors(processes, ours, checked)
        for row in measure_all(processes, implementations, works):
            rows.append(row)
            append_rows(script, [row])
        if peers and not args.skip_checks:
            check_errors(processes, peers, checked)
    finally:
        for process in processes.values():
            process.close()
    columns = ["work", "implementation", "forward_milliseconds", "copy_forward_milliseconds", "milliseconds"]
    print_table(rows, [*columns, "copy_milliseconds", "backends"])
    print("failed checks:", "none" if good else "errors")
    return int(not good or not rows)


if __name__ == "__main__":
    raise SystemExit(main())
