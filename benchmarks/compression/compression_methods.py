"""Pruning and rounding: errors of a synthetic layer, perplexity of a small trained model, and the time of GPTQ.

    python benchmarks/compression/compression_methods.py               # layer and model; a few minutes on two CPU cores
    python benchmarks/compression/compression_methods.py --parts time  # GPTQ of llama3-1b with random weights, on a GPU
    python benchmarks/compression/compression_methods.py --parts model --run runs/quickstart --sequences 256
    python benchmarks/compression/compression_methods.py --tiny        # tiny sizes; rows go to tiny/

Parts:
    layer   a 256 x 256 layer with correlated inputs: squared error of its outputs on further inputs, relative to them
    model   the quickstart's model, trained on its own text, each dense layer of its blocks compressed by each method,
            calibrated on `--sequences` rows of the training text: perplexity on held-out text
    time    all dense layers of `--preset` with random weights, rounded by GPTQ to 4 bits in groups of 128, calibrated
            on `--sequences` sequences of `--length` random tokens; compilation included

`perplexity_rise` is the perplexity minus that of the uncompressed model, `of_first` this by the rise of the variant's
first method (magnitude pruning, plain rounding). Rows are appended to benchmarks/results/compression_methods.jsonl.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.arguments import positive
from benchmarks.compression.synthetic_layer import make_layer
from benchmarks.rows import SCRATCH, append_rows, print_table, require_commit
from benchmarks.steps import open_run
from benchmarks.training.learning import learn
from jaxstack.compress.after_training.layerwise import compress_layers
from jaxstack.compress.base import AfterTraining, InputStatistics
from jaxstack.compress.formats.integer_grid import Rtn
from jaxstack.compress.formats.sparse import Magnitude
from jaxstack.compress.solvers.awq import Awq, candidate_scales, round_scaled, rounding_errors
from jaxstack.compress.solvers.gptq import Gptq
from jaxstack.compress.solvers.sparsegpt import SparseGpt
from jaxstack.compress.solvers.wanda import Wanda
from jaxstack.data.loader import Data, open_data
from jaxstack.models import ModelConfig, Transformer, preset_config
from jaxstack.observe.throughput import peak_memory_bytes
from jaxstack.parameter_paths import map_by_path
from jaxstack.run.build import make_trainer
from jaxstack.run.load import read_run_config
from jaxstack.run_config import RunConfig
from jaxstack.stored import StoredModel
from jaxstack.trainer import Trainer
from pallas_kernels.weight_only.packed import PackedWeight
from pallas_kernels.weight_only.rounding_grid import Grid

QUICKSTART = (
    "model.preset=tiny", "train.global_batch_size=4", "train.sequence_length=128", "optimizer.learning_rate=3.0e-3",
    "optimizer.b2=0.98", "schedule={name: linear, warmup_steps: 100}",
)  # fmt: skip
TINY = (
    "model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.scan_layers=false",
    "data.tokenizer.name=byte", "train.global_batch_size=4", "train.sequence_length=32", "parallel.simulate_devices=1",
)  # fmt: skip
SETTINGS: dict[str, tuple[AfterTraining, ...]] = {
    "50 % zeros": (Magnitude(path="."), Wanda(path="."), SparseGpt(path=".")),
    "2:4": tuple(kind(path=".", pattern="2:4") for kind in (Magnitude, Wanda, SparseGpt)),
    "int4, groups of 128": tuple(kind(path=".", bits=4, group_size=128) for kind in (Rtn, Awq, Gptq)),
    "int3, groups of 128": tuple(kind(path=".", bits=3, group_size=128) for kind in (Rtn, Awq, Gptq)),
}
"""Name of a row's variant -> the methods compared."""
EVAL_TOKENS = 2**15
"""Held-out tokens of the part `model`."""
DENSE = tuple(f"attention/{name}_proj" for name in "qkvo") + tuple(f"mlp/{n}_proj" for n in ("gate", "up", "down"))
COLUMNS = ("work", "variant", "implementation", "output_error", "perplexity", "perplexity_rise", "seconds", "device")

Row = dict[str, Any]


def layer_rows(size: int) -> Iterator[Row]:
    """Yield the error of each method at a synthetic layer."""
    layer = make_layer(size)
    w = jnp.asarray(layer.w, jnp.float32)
    statistics = InputStatistics(
        len(layer.x),
        jnp.asarray(layer.hessian, jnp.float32),
        jnp.asarray(np.abs(layer.x).mean(0), jnp.float32),
        jnp.asarray(np.square(layer.x).sum(0), jnp.float32),
    )
    for variant, methods in SETTINGS.items():
        for method in methods:
            if isinstance(method, Awq):
                new = _smoothed(w, statistics, method.grid)
            else:
                found = method.compress(w, statistics)
                new = found.matrix() if isinstance(found, PackedWeight) else found
            yield {
                "work": f"synthetic layer {size} x {size}", "variant": variant, "implementation": method.method,
                "device": jax.devices()[0].device_kind, "output_error": layer.error(new),
            }  # fmt: skip


def _smoothed(w: jax.Array, statistics: InputStatistics, grid: Grid) -> jax.Array:
    """Return the layer rounded with AWQ's best scales; in a model they are folded into the layer before."""
    assert statistics.mean_abs is not None and statistics.hessian is not None
    candidates = candidate_scales(statistics.mean_abs, [w], grid.group_size)
    best = candidates[jnp.argmin(rounding_errors(w, candidates, statistics.hessian, grid))]
    return round_scaled(w, best, grid)


def train(trainer: Trainer) -> None:
    """Train for the configured steps."""
    learn(trainer, every=max(1, trainer.train.steps // 10), say=lambda point: print(point, flush=True))


class Trained(NamedTuple):
    """A trained model: the trainer holds its parameters."""

    config: RunConfig
    trainer: Trainer
    data: Data
    steps: int


def open_model(overrides: Sequence[str], steps: int, run: str | None) -> Trained:
    """Return the model of a run, or one that is trained now."""
    if run is None:
        config, data = open_run([*overrides, f"train.steps={steps}"])
        trainer = make_trainer(config, data)
        train(trainer)
        return Trained(config, trainer, data, steps)
    config = read_run_config(run)
    data = open_data(config.data, sequence_length=config.train.sequence_length, seed=config.run.seed)
    trainer = make_trainer(config, data, jax.devices()[:1])
    stored = StoredModel.open(run)
    params, _ = stored.read_state(trainer.module, trainer.rules)
    steps = stored.choose_step(None)
    trainer.start_from(params)
    return Trained(config, trainer, data, steps)


def model_rows(
    trainer: Trainer,
    data: Data,
    steps: int,
    sequences: int,
    group_size: int,
    settings: Mapping[str, tuple[AfterTraining, ...]] = SETTINGS,
) -> Iterator[Row]:
    """Yield the held-out perplexity of a trained model on one device, as it is and under each method."""
    params = trainer.state.params
    non_params = trainer.state.non_params

    def perplexity(params: Any) -> float:
        found = trainer.evaluator.run(params, non_params, EVAL_TOKENS)
        assert found is not None
        return math.exp(found["eval_loss"])

    base = perplexity(params)
    common = {"work": f"quickstart, {steps} steps", "device": jax.devices()[0].device_kind, "steps": steps,
              "sequences": sequences, "uncompressed_perplexity": base}  # fmt: skip
    yield {**common, "variant": "uncompressed", "implementation": "float32", "perplexity": base}
    layers = trainer.module.merge(params, non_params).config.num_layers
    batches = calibration_batches(data, sequences)
    for variant, methods in settings.items():
        rises: list[float] = []
        for method in methods:
            chosen = method.model_copy(update={"group_size": group_size}) if "int" in variant else method
            began = time.perf_counter()
            model = trainer.module.merge(params, non_params)
            weights = compress_layers(model, batches, dict.fromkeys(dense_paths(layers), chosen)).weights
            seconds = time.perf_counter() - began
            found = perplexity(replaced(params, weights))
            rises.append(found - base)
            yield {**common, "variant": variant, "implementation": method.method, "perplexity": found,
                   "perplexity_rise": rises[-1], "of_first": rises[-1] / rises[0], "seconds": seconds}  # fmt: skip


def calibration_batches(data: Data, sequences: int) -> list[Mapping[str, np.ndarray]]:
    """Return the first sequences of the training text, in batches of 8 or of a divisor of that."""
    size = math.gcd(sequences, 8)
    return [data.batch(n, global_batch_size=size, rows=range(size)) for n in range(sequences // size)]


def dense_paths(layers: int) -> list[str]:
    """Return the paths of the kernels of all dense layers."""
    return [f"decoder/layers/{n}/{path}/kernel" for n in range(layers) for path in DENSE]


def replaced(params: Any, weights: Mapping[str, Any]) -> Any:
    """Return the parameters with other weights, by path; packed ones are unpacked."""

    def choose(path: str, leaf: jax.Array) -> jax.Array:
        new = weights.get(path, leaf)
        return new.dense() if isinstance(new, PackedWeight) else new

    return map_by_path(choose, params)


def time_row(config: ModelConfig, sequences: int, length: int, batch_size: int) -> Row:
    """Return the time of GPTQ on all dense layers of a model with random weights."""
    config = config.model_copy(update={"scan_layers": False, "vocab_size": config.vocab_size or 4096, "remat": "none"})
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    make = nnx.jit(lambda: Transformer(config, nnx.Rngs(0), dtype=dtype))
    model = make()
    jax.block_until_ready(nnx.state(model))
    random = np.random.default_rng(0)
    tokens = random.integers(0, config.vocab_size or 0, (sequences // batch_size, batch_size, length), np.int32)
    paths = dense_paths(config.num_layers)
    method = Gptq(path=".", group_size=math.gcd(128, config.hidden_size, config.feed_forward_size))
    began = time.perf_counter()
    result = compress_layers(model, [{"tokens": part} for part in tokens], dict.fromkeys(paths, method))
    jax.block_until_ready([w.arrays for w in result.weights.values() if isinstance(w, PackedWeight)])
    seconds = time.perf_counter() - began
    return {
        "implementation": "gptq", "variant": f"int4, groups of {method.group_size}",
        "device": jax.devices()[0].device_kind, "seconds": seconds,
        "sequences": sequences, "sequence_length": length, "peak_memory_bytes": peak_memory_bytes(),
        "weights": sum(math.prod(w.shape) for w in result.weights.values()),
    }  # fmt: skip


def rows_of(part: str, args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of a part."""
    if part == "layer":
        yield from layer_rows(128 if args.tiny else 256)
    elif part == "model":
        overrides = list(TINY if args.tiny else QUICKSTART)
        _, trainer, data, steps = open_model(overrides, 4 if args.tiny else args.steps, args.run)
        sizes = (8, 32) if args.tiny else (args.sequences, 128)
        methods = {name: SETTINGS[name] for name in args.settings or SETTINGS}
        yield from model_rows(trainer, data, steps, *sizes, methods)
    else:
        changes = {"num_layers": 2, "vocab_size": 512} if args.tiny else {}
        sizes = (8, 32, 4) if args.tiny else (args.sequences, args.length, math.gcd(args.sequences, 8))
        preset = "tiny" if args.tiny else args.preset
        row = time_row(preset_config(preset, **changes), *sizes)
        yield {"work": f"GPTQ of {preset}, {sizes[0]} x {sizes[1]} tokens", **row}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("layer", "model", "time")
    parser.add_argument("--parts", nargs="+", choices=parts, metavar="PART", help="default: layer and model")
    parser.add_argument("--preset", default="llama3-1b", help="model of the part `time`")
    parser.add_argument("--steps", type=positive(int), default=1000, help="training steps of the part `model`")
    parser.add_argument("--run", help="directory of a trained quickstart for the part `model`; default: it is trained")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, metavar="NAME",
                        help="settings of the part `model`, such as 2:4 (default: all)")  # fmt: skip
    parser.add_argument("--sequences", type=positive(int), default=128, help="calibration sequences")
    parser.add_argument("--length", type=positive(int), default=2048, help="tokens of a sequence of the part `time`")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; rows go to tiny/")
    args = parser.parse_args()
    name = f"{SCRATCH}compression_methods" if args.tiny else "compression_methods"
    require_commit(name)
    rows = []
    for part in args.parts or (parts if args.tiny else ("layer", "model")):
        for row in rows_of(part, args):
            rows.append(row)
            append_rows(name, [row])
            shown = {key: row[key] for key in COLUMNS if key in row}
            print(shown, flush=True)
    print_table(rows, COLUMNS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
