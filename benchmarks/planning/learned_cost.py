"""Measures small compiled programs of many families, and whole models, for the learned correction of the roofline.

    python benchmarks/planning/learned_cost.py                   # about three minutes on two CPU cores
    python benchmarks/planning/learned_cost.py --only attention
    python benchmarks/planning/learned_cost.py --stored cpu      # the errors alone, on the newest stored programs

Every program is compiled, its features are read from the compiled text, and it is timed: the median of five blocks of
calls. The rates of the roofline are the best matmul and the best copy of the same process. A row for each program is
appended to benchmarks/results/learned_cost.jsonl. At the end, each family is predicted by a correction that has not
seen it; whole models, which are losses of Transformers and their gradients, are one of the families. The median errors
of each family are appended to benchmarks/results/learned_cost_errors.jsonl.
"""

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rows import RESULTS, append_rows, print_table, require_commit
from benchmarks.timing import median_seconds
from jaxstack.loss import language_model_loss
from jaxstack.models import ModelConfig, Transformer
from jaxstack.module_arrays.module import ModuleArrays
from jaxstack.plan.learned_cost import (
    MeasuredProgram,
    ProgramFeatures,
    held_out_predictions,
    kendall_tau,
    median_error,
    parse_program_features,
    program_of,
)

COLUMNS = ("family", "programs", "roofline_error", "learned_error", "roofline_tau", "learned_tau")
MODELS = ((2, 64, 4, 64), (2, 128, 8, 64), (4, 128, 4, 128), (8, 128, 2, 128), (2, 256, 8, 64), (4, 256, 2, 256))
"""Layers, width, rows and tokens of a row of the whole models."""


class Program(NamedTuple):
    """A program to measure; its family is what a correction may not have seen."""

    family: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    name: str = ""

    @property
    def work(self) -> str:
        """Family, and name or shapes of the arguments."""
        return f"{self.family} {self.name or ' '.join('x'.join(map(str, x.shape)) for x in self.arguments)}"


def matrices(*shapes: tuple[int, ...]) -> tuple[Any, ...]:
    """Return random float32 arrays of these shapes."""
    random = np.random.default_rng(0)
    return tuple(jnp.asarray(random.normal(size=shape) * 0.1, jnp.float32) for shape in shapes)


def attention(q: Any, k: Any, v: Any) -> Any:
    """Softmax attention, [B, N, T, H] each."""
    weights = jax.nn.softmax(jnp.einsum("bnth,bnsh->bnts", q, k) * q.shape[-1] ** -0.5)
    return jnp.einsum("bnts,bnsh->bnth", weights, v)


def recurrence(x: Any, w: Any) -> Any:
    """A recurrent layer: x [T, B, D], w [D, D]."""
    return jax.lax.scan(lambda h, row: (jnp.tanh(h @ w + row), None), x[0], x)[0]


def layer(x: Any, w1: Any, w2: Any) -> Any:
    """A feed-forward sublayer with its norm and residual connection."""
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
    return x + jax.nn.gelu(normed @ w1) @ w2


def cross_entropy(x: Any, w: Any, labels: Any) -> Any:
    """The loss of a classifier over x [B, D] with weights w [D, V]."""
    logits = x @ w
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0])


def adam(w: Any, g: Any, m: Any, v: Any) -> Any:
    """One update of Adam."""
    m = 0.9 * m + 0.1 * g
    v = 0.99 * v + 0.01 * g * g
    return w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


def programs() -> Iterator[Program]:
    """Yield (family, function, arguments) of every program."""
    for n in (64, 96, 128, 192, 256, 384, 512, 768, 1024):
        yield Program("matmul", jnp.matmul, matrices((n, n), (n, n)))
    for n, k in ((256, 4), (1024, 4), (1024, 16), (2048, 8), (2048, 32), (4096, 16), (1024, 32), (512, 48)):
        yield Program("thin matmul", jnp.matmul, matrices((n, k), (k, n)))
    for b, n in ((8, 32), (32, 32), (128, 32), (8, 64), (32, 64), (64, 96), (8, 128), (32, 128)):
        yield Program("batched matmul", jnp.matmul, matrices((b, n, n), (b, n, n)))
    for heads, length, width in (
        (4, 64, 32),
        (8, 64, 64),
        (4, 128, 32),
        (8, 128, 64),
        (4, 256, 64),
        (8, 256, 64),
        (4, 512, 64),
    ):
        yield Program("attention", attention, matrices(*[(2, heads, length, width)] * 3))
    for rows, d in ((64, 64), (128, 128), (512, 128), (256, 256), (1024, 256), (512, 512), (128, 512), (2048, 128)):
        yield Program("feed-forward", layer, matrices((rows, d), (d, 4 * d), (4 * d, d)))
        gradient = jax.grad(lambda *a: jnp.sum(layer(*a) ** 2), argnums=(0, 1, 2))
        yield Program("feed-forward gradient", gradient, matrices((rows, d), (d, 4 * d), (4 * d, d)))
    for steps, rows, d in (
        (16, 8, 32),
        (64, 8, 32),
        (16, 8, 128),
        (64, 8, 128),
        (128, 16, 64),
        (32, 32, 256),
        (256, 4, 64),
    ):
        yield Program("recurrence", recurrence, matrices((steps, rows, d), (d, d)))
    for rows, d in ((64, 256), (256, 256), (256, 1024), (1024, 1024), (4096, 256), (4096, 1024), (512, 4096)):
        yield Program("softmax", jax.nn.softmax, matrices((rows, d)))
        yield Program("norm", lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)), matrices((rows, d)))
        yield Program("column sum", lambda x: jnp.sum(x, 0), matrices((rows, d)))
    for n in (10**4, 10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7):
        yield Program("addition", lambda x, y: 2 * x + y, matrices((n,), (n,)))
        yield Program("exponential", lambda x: jnp.exp(-x) + jnp.tanh(x), matrices((n,)))
        yield Program("adam", adam, matrices((n,), (n,), (n,), (n,)))
    for rows, d, v in (
        (64, 64, 512),
        (256, 64, 1024),
        (128, 128, 4096),
        (512, 128, 2048),
        (256, 256, 4096),
        (1024, 128, 1024),
    ):
        x, w = matrices((rows, d), (d, v))
        yield Program("cross-entropy", cross_entropy, (x, w, jnp.arange(rows) % v))
    for rows, d, picks in (
        (1000, 64, 512),
        (10**4, 64, 4096),
        (10**4, 256, 4096),
        (10**5, 64, 2048),
        (10**4, 512, 8192),
    ):
        index = jnp.asarray(np.random.default_rng(0).integers(0, rows, picks))
        yield Program("gather", lambda table, index: table[index], (*matrices((rows, d)), index))
    for size, channels in ((16, 8), (32, 8), (32, 16), (32, 32), (64, 16), (64, 32)):

        def convolve(x, w):
            return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

        yield Program("convolution", convolve, matrices((4, size, size, channels), (3, 3, channels, channels)))
    yield from models()


def models() -> Iterator[Program]:
    """Yield the loss of whole Transformers, and its gradients."""
    for layers, width, rows, length in MODELS:
        config = ModelConfig(
            num_layers=layers,
            hidden_size=width,
            num_heads=width // 32,
            intermediate_size=3 * width,
            vocab_size=1024,
            scan_layers=False,
        )
        module = ModuleArrays(functools.partial(Transformer, config))
        params, others = jax.jit(module.init)(jax.random.key(0))
        tokens = jnp.asarray(np.random.default_rng(0).integers(0, 1024, (rows, length)))
        loss = functools.partial(model_loss, module, others)
        name = f"of {layers} layers of {width}, {rows} x {length} tokens"
        yield Program("whole model", loss, (params, tokens), name)
        yield Program("whole model", jax.grad(loss), (params, tokens), f"{name}, gradients")


def model_loss(module: ModuleArrays, others: Any, params: Any, tokens: jax.Array) -> jax.Array:
    """Return the mean loss of each next token."""
    found = language_model_loss(module.merge(params, others), {"tokens": tokens, "labels": jnp.roll(tokens, -1, 1)})
    return found.total / found.count


def measure(program: Program) -> tuple[ProgramFeatures, float]:
    """Return the features and the seconds of a program."""
    compiled = jax.jit(program.function).lower(*program.arguments).compile()
    seconds = median_seconds(lambda: compiled(*program.arguments), jax.block_until_ready)
    return parse_program_features(compiled.as_text() or ""), seconds


def peak_rates() -> tuple[float, float]:
    """Return the FLOP/s of the best matmul and the bytes/s of the best copy."""
    best = [0.0, 0.0]
    for n in (512, 1024, 2048):
        _, seconds = measure(Program("", jnp.matmul, matrices((n, n), (n, n))))
        best[0] = max(best[0], 2 * n**3 / seconds)
    for n in (10**6, 3 * 10**6, 10**7, 3 * 10**7):
        _, seconds = measure(Program("", lambda x: -x, matrices((n,))))
        best[1] = max(best[1], 8 * n / seconds)
    return best[0], best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="FAMILY", help="measure the programs of one family")
    parser.add_argument("--stored", metavar="DEVICE", help="take the newest stored programs of a kind of device")
    args = parser.parse_args()
    require_commit("learned_cost")
    if args.stored:
        append_errors(*stored_programs(args.stored))
        return
    peak, bandwidth = peak_rates()
    device = jax.devices()[0]
    common = {"implementation": "xla", "devices": 1, "peak_flops": peak, "bandwidth": bandwidth}
    common |= {"device": device.device_kind, "cores": os.cpu_count()}
    measured = []
    rows = []
    for program in programs():
        if args.only and program.family != args.only:
            continue
        features, seconds = measure(program)
        measured.append(MeasuredProgram(program.family, features, seconds, peak, bandwidth))
        row = {"work": program.work, "family": program.family, "milliseconds": 1e3 * seconds}
        rows.append({**row, **common, "features": features.to_json()})
    append_rows("learned_cost", rows)
    if len({one.family for one in measured}) > 1:
        append_errors(measured, common)


def stored_programs(device: str) -> tuple[list[MeasuredProgram], dict[str, Any]]:
    """Return the programs of the newest run on a kind of device, and what their rows have in common.

    Raises:
        SystemExit: there is none.
    """
    path = RESULTS / "learned_cost.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["device"] == device]
    if not rows:
        raise SystemExit(f"{path} has no programs of a device {device!r}: run this script there without --stored.")
    newest = rows[-1]
    measured = [program_of(row) for row in rows if row["run"] == newest["run"]]
    shared = ("implementation", "devices", "peak_flops", "bandwidth", "device", "cores")
    return measured, {**{key: newest[key] for key in shared}, "programs_of": newest["date"]}


def append_errors(measured: list[MeasuredProgram], common: dict[str, Any]) -> None:
    """Append and print the errors of each family."""
    errors = [{"work": f"errors, {row['family']}", **row, **common} for row in summarize(measured)]
    append_rows("learned_cost_errors", errors)
    print_table(errors, COLUMNS)


def summarize(measured: list[MeasuredProgram]) -> list[dict[str, Any]]:
    """Return a row per family, and one for all, with the errors of the roofline and of the held-out correction."""
    found = list(held_out_predictions(measured))
    rows = []
    for family in [*dict.fromkeys(one.family for one in measured), None]:
        part = [(one, value) for one, value in found if family in (None, one.family)]
        seconds = [one.seconds for one, _ in part]
        row: dict[str, Any] = {"family": family or "all", "programs": len(part)}
        for name, times in (("roofline", [one.roofline_seconds for one, _ in part]), ("learned", [t for _, t in part])):
            row |= {f"{name}_error": median_error(times, seconds), f"{name}_tau": kendall_tau(times, seconds)}
        rows.append({**row, "error_ratio": row["learned_error"] / row["roofline_error"]})
    return rows


if __name__ == "__main__":
    main()
