"""A classifier of 4-bit and 6-bit integers, trained through `Trainer` and written as a circuit in Verilog.

python docs/examples/fields/fpga.py

Campos et al. 2023 (arXiv:2304.06745) put a small network next to a particle detector, where a result is due every
25 ns: one circuit for all of it, weights as constants, a new input at every tick of the clock. For this all numbers are
integers of a few bits. Training rounds in the forward pass and lets gradients pass as if it had not (the
straight-through estimator, Bengio et al. 2013, arXiv:1308.3432), so that the network learns to live with its grid.

An integer q of a format with f fraction bits stands for q / 2^f. Products and sums of integers are exact, and only the
hidden layers' outputs are rounded, by a shift; so the circuit's results must equal JAX's bit for bit. Data: five
classes, each of three clusters in 16 dimensions. `apt-get install iverilog` brings the simulator; without it the
circuit is evaluated by the few lines of `evaluate` only.
"""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxstack import Trainer
from jaxstack.loop import LoopSettings
from jaxstack.observe.config import ObserveConfig
from jaxstack.run_config import TrainConfig
from jaxstack.trainer import numpy_batches

WIDTHS, WEIGHT_BITS = (16, 32, 16, 5), (6, 4, 6)
BITS, FRACTION = 6, 3
"""Format of the inputs, signed, and of the hidden layers' outputs, unsigned."""
QUIET = LoopSettings(observe=ObserveConfig(progress=False))


def clusters(count: int, seed: int) -> dict[str, np.ndarray]:
    """Return points, float32 [count, 16], and their classes, int32 [count]; the clusters are always the same."""
    centres = np.random.default_rng(7).normal(scale=0.8, size=(15, WIDTHS[0]))
    random = np.random.default_rng(seed)
    which = random.integers(0, 15, count)
    x = centres[which] + random.normal(size=(count, WIDTHS[0]))
    return {"x": x.astype(np.float32), "label": (which % 5).astype(np.int32)}


def to_grid(scaled: jax.Array, low: int, high: int) -> jax.Array:
    """Round to the nearest integer in [low, high]; the gradient is that of clipping alone."""
    clipped = jnp.clip(scaled, low, high)
    # The sum is exactly the integer: x - round(x) is exact in floating point.
    return clipped + jax.lax.stop_gradient(jnp.floor(clipped + 0.5) - clipped)


class FloatMLP(nnx.Module):
    """The same network in float32."""

    def __init__(self, rngs: nnx.Rngs):
        sizes = zip(WIDTHS[:-1], WIDTHS[1:], strict=True)
        self.layers = nnx.List([nnx.Linear(size, out, rngs=rngs) for size, out in sizes])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


class IntegerMLP(FloatMLP):
    """A network whose forward pass computes with integers, stored in float32, where they are exact."""

    def __init__(self, rngs: nnx.Rngs, bits: tuple[int, ...] = WEIGHT_BITS):
        super().__init__(rngs)
        self.bits = bits

    def constants(self) -> list[tuple[jax.Array, jax.Array]]:
        """Return the integers of each layer: kernel [in, out], in [-2^(b-1), 2^(b-1)), and bias [out]."""
        found = []
        for layer, bits in zip(self.layers, self.bits, strict=True):
            half = 2 ** (bits - 1)  # weights stand for [-1, 1)
            kernel = to_grid(layer.kernel[...] * half, -half, half - 1)
            found.append((kernel, to_grid(layer.bias[...] * half * 2**FRACTION, -(2**15), 2**15)))
        return found

    def scores(self, x: jax.Array) -> jax.Array:
        """Return the integer scores [B, 5] of points [B, 16]."""
        x = to_grid(x * 2**FRACTION, -(2 ** (BITS - 1)), 2 ** (BITS - 1) - 1)
        for (kernel, bias), bits in zip(self.constants()[:-1], self.bits[:-1], strict=True):
            x = to_grid((x @ kernel + bias) / 2 ** (bits - 1), 0, 2**BITS - 1)
        kernel, bias = self.constants()[-1]
        return x @ kernel + bias

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.scores(x) / 2 ** (FRACTION + self.bits[-1] - 1)


def cross_entropy(model: Any, batch: Any) -> jax.Array:
    """Mean cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["label"]).mean()


def train_model(module: Any, steps: int, seed: int) -> Any:
    """Return a model trained on 20,000 points."""
    rows, optimizer = clusters(20_000, seed), optax.adam(optax.cosine_decay_schedule(5e-3, steps))
    train = TrainConfig(steps=steps, global_batch_size=256)
    trainer = Trainer(
        module, cross_entropy, numpy_batches(rows, 256, seed), optimizer=optimizer, train=train, seed=seed
    )
    trainer.fit(settings=QUIET)
    return trainer.trained_module


def accuracy(model: Any, rows: dict[str, np.ndarray]) -> float:
    """Return the share of points whose class a model guesses."""
    return float(np.mean(np.asarray(model(jnp.asarray(rows["x"]))).argmax(1) == rows["label"]))


def rounded_after_training(model: FloatMLP, bits: tuple[int, ...] = WEIGHT_BITS) -> IntegerMLP:
    """Return the integer network with the weights of a float one."""
    rounded = IntegerMLP(nnx.Rngs(0), bits)
    nnx.update(rounded, nnx.state(model, nnx.Param))
    return rounded


def to_verilog(model: IntegerMLP) -> tuple[str, int]:
    """Return the circuit, with registers after every layer, and the number of bits of each score in its output `y`."""
    largest, lines = 2 ** (BITS - 1), []
    for i in range(WIDTHS[0]):
        lines.append(f"wire signed [{BITS - 1}:0] a0_{i} = x[{BITS * (i + 1) - 1}:{BITS * i}];")
    for n, (kernel, bias) in enumerate(model.constants(), start=1):
        weights, biases = np.asarray(kernel, int), np.asarray(bias, int)
        width = int((np.abs(weights).sum(0) * largest + np.abs(biases)).max()).bit_length() + 2
        for j, (column, constant) in enumerate(zip(weights.T, biases, strict=True)):
            terms = [f"{'-' if w < 0 else '+'} {abs(w)} * a{n - 1}_{i}" for i, w in enumerate(column) if w]
            lines.append(f"wire signed [{width - 1}:0] s{n}_{j} = {constant} {' '.join(terms)};")
            if n == len(model.bits):
                lines.append(register(f"y_{j}", width, f"s{n}_{j}"))
                continue
            shift, top = model.bits[n - 1] - 1, 2**BITS - 1
            lines.append(f"wire signed [{width - 1}:0] r{n}_{j} = (s{n}_{j} + {2 ** (shift - 1)}) >>> {shift};")
            lines.append(register(f"a{n}_{j}", BITS + 1, f"r{n}_{j} < 0 ? 0 : r{n}_{j} > {top} ? {top} : r{n}_{j}"))
        largest = 2**BITS
    ports = f"input clock, input [{BITS * WIDTHS[0] - 1}:0] x, output [{width * WIDTHS[-1] - 1}:0] y"
    together = f"assign y = {{{', '.join(f'y_{j}' for j in reversed(range(WIDTHS[-1])))}}};"
    return "\n".join([f"module mlp({ports});", *lines, together, "endmodule", ""]), width


def register(name: str, width: int, value: str) -> str:
    """Return the declaration of a register that takes a value at every tick of the clock."""
    return f"reg signed [{width - 1}:0] {name}; always @(posedge clock) {name} <= {value};"


def evaluate(circuit: str, inputs: np.ndarray) -> np.ndarray:
    """Return the scores [N, 5] that a circuit of `to_verilog` computes from integers [N, 16], without its delays."""
    values: dict[str, Any] = {f"a0_{i}": inputs[:, i] for i in range(WIDTHS[0])} | {"clip": np.clip}
    for top, name, text in re.findall(r"^(?:wire|reg) signed \[(\d+):0\] (\w+).*? <?= (?!x\[)(.*);$", circuit, re.M):
        text = re.sub(r"(\w+) < 0 \? 0 : \1 > (\d+) \? \2 : \1", r"clip(\1, 0, \2)", text).replace(">>>", ">>")
        half = 2 ** int(top)
        values[name] = (eval(text, values) + half) % (2 * half) - half  # a wire of too few bits wraps around
    return np.stack([values[f"y_{j}"] for j in range(WIDTHS[-1])], axis=1)


def simulate(circuit: str, width: int, inputs: np.ndarray) -> np.ndarray:
    """Return the scores [N, 5] from iverilog; a new input enters at every tick, and the first result takes three."""
    ticks, delay = len(inputs) + len(WIDTHS) - 2, len(WIDTHS) - 2
    bench = f"""module bench;
      reg clock = 0; reg [{BITS * WIDTHS[0] - 1}:0] x, inputs [0:{ticks - 1}]; integer i;
      wire [{width * WIDTHS[-1] - 1}:0] y; mlp circuit(clock, x, y);
      initial begin
        $readmemh("inputs.hex", inputs);
        for (i = 0; i < {ticks}; i = i + 1) begin
          x = inputs[i]; #1 clock = 1; #1 clock = 0; if (i >= {delay}) $display("%h", y);
        end
      end
    endmodule"""
    packed = [sum((int(q) % 2**BITS) << (BITS * i) for i, q in enumerate(row)) for row in inputs] + [0] * delay
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "mlp.v").write_text(circuit + bench, encoding="utf-8")
        Path(folder, "inputs.hex").write_text("\n".join(f"{value:x}" for value in packed), encoding="utf-8")
        subprocess.run(["iverilog", "-g2005", "-o", "mlp", "mlp.v"], cwd=folder, check=True)
        printed = subprocess.run(["vvp", "-n", "mlp"], cwd=folder, check=True, capture_output=True, text=True).stdout
    words = [int(line, 16) for line in printed.split()]
    scores = np.array([[(word >> (width * j)) % 2**width for j in range(WIDTHS[-1])] for word in words])
    return np.where(scores >= 2 ** (width - 1), scores - 2**width, scores)


def main(steps: int = 1500, seed: int = 0) -> dict[str, Any]:
    """Train in float32 and in integers, compare the circuit with JAX on 1,000 points; return both accuracies."""
    unseen = clusters(10_000, seed + 1)
    model, exact = train_model(IntegerMLP, steps, seed), train_model(FloatMLP, steps, seed)
    ours, baseline = accuracy(model, unseen), accuracy(exact, unseen)
    circuit, width = to_verilog(model)
    x = unseen["x"][:1000]
    inputs = np.clip(np.floor(x * 2**FRACTION + 0.5), -(2 ** (BITS - 1)), 2 ** (BITS - 1) - 1).astype(np.int64)
    expected = np.asarray(nnx.jit(lambda model, x: model.scores(x))(model, jnp.asarray(x)), int)
    found = {"evaluated": evaluate(circuit, inputs)}
    if shutil.which("iverilog"):
        found["simulated by iverilog, an input at every tick"] = simulate(circuit, width, inputs)
    else:
        print("iverilog is not installed (apt-get install iverilog): the circuit was evaluated, not simulated")
    curves: dict[str, list[tuple[int, float]]] = {"straight-through": [], "rounded after training": []}
    for bits in (2, 3, 4, 6):
        trained = train_model(lambda rngs, bits=bits: IntegerMLP(rngs, (bits,) * 3), steps, seed)
        curves["straight-through"].append((bits, accuracy(trained, unseen)))
        curves["rounded after training"].append((bits, accuracy(rounded_after_training(exact, (bits,) * 3), unseen)))
    weights = np.concatenate([np.asarray(kernel, int).ravel() for kernel, _ in model.constants()])
    return {
        "claim": "A network of 4-bit and 6-bit integers becomes a circuit that classifies at every tick of its clock.",
        "paper": "arXiv:2304.06745",
        "measure": "accuracy of the circuit on unseen points; baseline: the same network in float32",
        "ours": ours,
        "baseline": baseline,
        "published": None,
        "checks": {
            "accuracy within one point of float32": ours >= baseline - 0.01,
            **{
                f"scores of 1,000 points, {how}, equal JAX's bit for bit": bool(np.array_equal(scores, expected))
                for how, scores in found.items()
            },
        },
        "numbers": {
            "accuracy if float32 weights are rounded after training": accuracy(rounded_after_training(exact), unseen),
            "weights that are not zero": float(np.count_nonzero(weights)),
            "additions, with constants in canonical signed digits": float(
                sum((3 * w ^ w).bit_count() for w in map(int, np.abs(weights)))
            ),
            "ticks from an input to its result": float(len(WIDTHS) - 1),
        },
        "picture": [{"title": "Accuracy", "x_label": "bits of a weight", "curves": curves}],
    }


if __name__ == "__main__":
    for name, value in main().items():
        if name != "picture":
            print(f"{name}: {value}")
