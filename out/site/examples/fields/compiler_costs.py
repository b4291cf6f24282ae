"""A cost model that reads a program's text, trained through `Trainer` on what XLA counts once it has compiled it.

python docs/examples/fields/compiler_costs.py

A compiler has to choose between versions of a program before it knows what they cost. Das and Mannarswamy 2023
(arXiv:2302.11405) read the program as text: the operations, operands and shapes in MLIR become tokens, and a small
network predicts properties of the compiled code. Here 1,200 random programs are lowered to StableHLO, XLA compiles each
for the CPU, and its own analysis of the compiled program counts the bytes that all kernels read and write. That number
is not in the text: XLA fuses operations, and what stays inside a fused kernel does not go through memory.

Compiling takes half of the time; its results are kept in the system's folder for temporary files.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from jaxstack import Trainer
from jaxstack.loop import LoopSettings
from jaxstack.observe.config import ObserveConfig
from jaxstack.plan.learned_cost import kendall_tau, median_error
from jaxstack.run_config import TrainConfig
from jaxstack.trainer import numpy_batches

SIZES = (16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows and of columns of the random programs' arrays."""
LINES, TOKENS = 48, 12
"""A program is cut off after this number of operations, and an operation after this number of tokens."""
UNARY: Sequence[Callable[..., Any]] = (lax.tanh, lax.exp, lax.neg, lax.sqrt, jnp.transpose)
BINARY: Sequence[Callable[..., Any]] = (lax.add, lax.mul, lax.max, lambda x, y: lax.concatenate([x, y], 0))
FAST = {"xla_backend_optimization_level": 0}
"""No optimization of machine code, on which the counts do not depend."""
QUIET = LoopSettings(observe=ObserveConfig(progress=False))


def random_program(seed: int) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """Return a function of three matrices that applies 2 to 7 random operations, and the shapes of its arguments."""
    sizes = np.random.default_rng(seed).choice(SIZES, (3, 2))

    def program(*arguments: jax.Array) -> list[jax.Array]:
        random, values, used = np.random.default_rng(seed), list(arguments), set[int]()
        for _ in range(random.integers(2, 8)):
            first = int(random.integers(len(values)))
            x, kind = values[first], random.integers(4)
            alike = [i for i, y in enumerate(values) if y.shape == x.shape]
            second = int(random.choice(alike)) if kind == 0 else int(random.integers(len(values)))
            if kind == 0:
                value = BINARY[random.integers(len(BINARY))](x, values[second])
            elif kind == 1 and x.shape[1] == values[second].shape[0]:
                value = x @ values[second]
            elif kind == 1:
                second, value = first, x @ jnp.transpose(x)
            elif kind == 2:
                second, value = first, x - lax.reduce_sum(x, (0,))[None] / x.shape[0]
            else:
                second, value = first, UNARY[random.integers(len(UNARY))](x)
            used |= {first, second}
            values.append(value)
        return [value for i, value in enumerate(values) if i not in used and i >= len(arguments)]

    return program, [jax.ShapeDtypeStruct(tuple(map(int, size)), jnp.float32) for size in sizes]


def lower_program(seed: int) -> jax.stages.Lowered:
    """Return a random program in StableHLO."""
    program, shapes = random_program(seed)
    return jax.jit(program).lower(*shapes)


def compile_program(seed: int) -> dict[str, Any]:
    """Return the text of a random program, and the bytes that XLA counts after compiling it."""
    lowered = lower_program(seed)
    counts = lowered.compile(compiler_options=FAST).cost_analysis()
    return {"text": lowered.as_text(), "bytes": counts["bytes accessed"]}


def compiled_programs(count: int, seed: int) -> list[dict[str, Any]]:
    """Return what `compile_program` gives for `count` random programs, from a file if there is one from before."""
    seeds = range(1_000_000 * seed, 1_000_000 * seed + count)
    first = "".join(lower_program(one).as_text() for one in seeds[:10])  # other programs belong into another file
    version = hashlib.sha256((jax.__version__ + first).encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir()) / f"jaxstack-compiler-costs-{version}-{count}.json"
    if not path.exists():
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            found = list(threads.map(compile_program, seeds))
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(path)  # never half a file under the final name
    return json.loads(path.read_text(encoding="utf-8"))


def tokenize(text: str) -> list[list[str]]:
    """Return the tokens of each operation: its name, its operands as distances in lines, and the sizes of its arrays.

    `%4 = stablehlo.add %3, %arg0 : tensor<16x32xf32>`, when %3 is the line before, gives add, -1, argument, 16, 32.
    """
    lines, defined = [], dict[str, int]()
    for line in text.splitlines():
        if not (found := re.search(r"stablehlo\.(\w+)", line)):
            continue
        name, _, right = line.partition(" = ")
        operands = [
            f"-{len(lines) - defined[one]}" if one in defined else "argument" for one in re.findall(r"%\w+", right)
        ]
        lines.append([found[1], *operands[:3], *re.findall(r"\d+(?=x)", right)])
        defined[name.strip().partition(":")[0]] = len(lines) - 1
    return lines


def encode(programs: Sequence[list[list[str]]], words: Mapping[str, int]) -> np.ndarray:
    """Return the tokens as numbers, int32 [programs, LINES, TOKENS]; 0 where there is none, or an unknown one."""
    encoded = np.zeros((len(programs), LINES, TOKENS), np.int32)
    for program, rows in zip(encoded, programs, strict=True):
        for line, tokens in zip(program, rows, strict=False):
            line[: len(tokens)] = [words.get(token, 0) for token in tokens[:TOKENS]]
    return encoded


class CostModel(nnx.Module):
    """The log of a sum over operations, each of which costs what a network reads from its tokens and its neighbours'.

    The embeddings of an operation's tokens are added up, so that a product of sizes can become a sum of logs.
    """

    def __init__(self, words: int, rngs: nnx.Rngs, width: int = 64):
        table = 0.3 * jax.random.normal(rngs.params(), (TOKENS, words, width))
        self.table = nnx.Param(table)  # a word means something else at another place in its operation
        self.near = nnx.List([nnx.Conv(width, width, kernel_size=(7,), rngs=rngs) for _ in range(2)])
        self.hidden, self.cost = nnx.Linear(width, width, rngs=rngs), nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the predicted log cost [B] of programs [B, LINES, TOKENS]."""
        is_operation = tokens[..., 0] > 0
        x = self.table[...][jnp.arange(TOKENS), tokens] * (tokens > 0)[..., None]
        x = x.sum(-2)
        for layer in self.near:
            x = x + nnx.relu(layer(x * is_operation[..., None]))
        costs = self.cost(nnx.relu(self.hidden(x)))[..., 0]
        return jax.nn.logsumexp(jnp.where(is_operation, costs, -jnp.inf), axis=-1)


def squared_error(model: Any, batch: Any) -> jax.Array:
    """Mean squared error of the log cost."""
    return jnp.mean((model(batch["tokens"]) - batch["log_cost"]) ** 2)


def linear_baseline(counts: np.ndarray, log_costs: np.ndarray, train: int) -> np.ndarray:
    """Return the log costs that ridge regression on features predicts, fitted to the first `train` programs."""
    inputs = np.concatenate([np.ones((len(counts), 1)), counts], axis=1)
    fitted, ridge = inputs[:train], 1e-2 * np.eye(inputs.shape[1])
    return inputs @ np.linalg.solve(fitted.T @ fitted + ridge, fitted.T @ log_costs[:train])


def bytes_without_fusion(text: str) -> float:
    """Return the bytes that the operations of a text would read and write, if each were a kernel of its own."""
    total = 0.0
    for line in filter(lambda line: "stablehlo." in line, text.splitlines()):
        shapes = [re.findall(r"\d+", dims) for dims in re.findall(r"tensor<([\dx]*)f32>", line)]
        arrays = 1 if "->" in line else len(re.findall(r"%\w+", line))  # one type may stand for all arrays
        total += 4 * arrays * sum(np.prod([int(size) for size in shape]) for shape in shapes)
    return total


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Return Spearman's rank correlation."""
    return float(np.corrcoef(np.argsort(np.argsort(x)), np.argsort(np.argsort(y)))[0, 1])


def main(steps: int = 1500, seed: int = 0, programs: int = 1200) -> dict[str, Any]:
    """Train on four fifths of the programs; return the median error on the others."""
    found = compiled_programs(programs, seed)
    tokens, train = [tokenize(one["text"]) for one in found], programs * 4 // 5
    words = {word: i for i, word in enumerate(sorted({w for rows in tokens[:train] for row in rows for w in row}), 1)}
    encoded, log_costs = encode(tokens, words), np.log([one["bytes"] for one in found])
    rows = {"tokens": encoded[:train], "log_cost": (log_costs[:train] - log_costs[:train].mean()).astype(np.float32)}
    trainer = Trainer(
        lambda rngs: CostModel(len(words) + 1, rngs),
        squared_error,
        numpy_batches(rows, 64, seed),
        optimizer=optax.adam(optax.cosine_decay_schedule(2e-3, steps)),
        train=TrainConfig(steps=steps, global_batch_size=64),
        seed=seed,
    )
    trainer.fit(settings=QUIET)
    predict = nnx.jit(lambda model, tokens: model(tokens))
    logs = {
        "model": np.asarray(predict(trainer.trained_module, jnp.asarray(encoded[train:]))) + log_costs[:train].mean()
    }
    counts = np.stack([np.bincount(one.ravel(), minlength=len(words) + 1)[1:] for one in encoded])
    logs["linear regression on token counts"] = linear_baseline(counts, log_costs, train)[train:]
    unfused = np.log([[bytes_without_fusion(one["text"])] for one in found])
    logs["bytes without fusion"] = linear_baseline(unfused, log_costs, train)[train:]
    true = log_costs[train:]
    errors = {name: median_error(np.exp(log), np.exp(true)) for name, log in logs.items()}
    ranks = rank_correlation(logs["model"], true)
    ours, baseline = errors["model"], errors["linear regression on token counts"]
    shown = np.argsort(true)[:: max(1, len(true) // 60)]
    return {
        "claim": "A network that reads a program's text as tokens predicts the cost of the compiled program.",
        "paper": "arXiv:2302.11405",
        "measure": "median relative error of bytes read and written; baseline: linear regression on token counts",
        "ours": ours,
        "baseline": baseline,
        "published": None,
        "checks": {
            "at most half the error of the linear baseline": ours <= 0.5 * baseline,
            "rank correlation at least 0.9": ranks >= 0.9,
        },
        "numbers": {
            "Spearman's rank correlation": ranks,
            "Kendall's rank correlation": kendall_tau(logs["model"], true),
            "error of the bytes without fusion, scaled": errors["bytes without fusion"],
            "held-out programs": float(len(true)),
        },
        "picture": [
            {
                "title": "Held-out programs: log10 of the bytes",
                "x_label": "programs, in the order of XLA's count",
                "curves": {
                    name: [(i, float(log[at] / np.log(10))) for i, at in enumerate(shown)]
                    for name, log in {"XLA's count": true, **logs}.items()
                },
            }
        ],
    }


if __name__ == "__main__":
    for name, value in main().items():
        if name != "picture":
            print(f"{name}: {value}")
