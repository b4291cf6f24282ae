"""Held-out perplexity of a trained run with its cache, its weights or its activations in few bits.

    python benchmarks/compression/cache_formats.py --train configs/quickstart.yaml train.steps=1500 --max-tokens 40000
    python benchmarks/compression/cache_formats.py --run runs/quickstart    # a run that is trained already

Each format of `precision.kv_cache` is evaluated on the run's held-out text, where every query sees rounded keys and
values, so that the loss is that of decoding through the cache. The bits of a value are counted on the arrays of a cache
in bfloat16. The rows of weights have the recipes `bct` and `cluster3`, with activations in the compute dtype and, for
`bct`, in integers; and `bct_gptq`, calibrated on 128 sequences of the training text, also with an exponent for each
token of the embedding. `accuracy` is the share of held-out tokens to which the model gives the highest probability.
`model` is what was trained, or the directory of the run.
"""

import argparse
import dataclasses
import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.compression.compression_methods import calibration_batches
from benchmarks.rows import append_rows, print_table, require_commit
from benchmarks.trained import train_run
from jaxstack.checkpoint.compressed import dense_parameter, named_leaves
from jaxstack.compress.after_training.layerwise import compress_layers
from jaxstack.compress.after_training.run import compress_leaves
from jaxstack.compress.after_training.stored_weights import as_stored
from jaxstack.compress.config import Recipe, choose_methods, load_recipe
from jaxstack.compress.matrix import compressible_weights
from jaxstack.compress.solvers.bct import BctGptq, in_integers
from jaxstack.data.loader import open_data
from jaxstack.decoding.decode import Params
from jaxstack.loss import language_model_loss
from jaxstack.models import Transformer
from jaxstack.models.attention.cache_formats import CACHE_FORMATS, CacheFormat
from jaxstack.parameter_paths import nest
from jaxstack.run.evaluate import TextOptions, measure_loss, open_evaluation
from jaxstack.run.load import load_decoder, run_config
from jaxstack.run.setting import with_evaluation_layout
from jaxstack.stored import StoredModel
from jaxstack.trainer import Trainer
from pallas_kernels import PackedWeight
from pallas_kernels.low_bits.encoded import stored_bytes

SCRIPT = "cache_formats"
COLUMNS = ("format", "bits_per_value", "ratio", "perplexity", "change_percent", "accuracy")
SEQUENCES = 128
"""Calibration sequences."""
EVAL_BATCH = 16
"""Sequences in a batch when accuracy is measured."""
Change = Callable[[Transformer], Transformer]
"""Function that changes a model in place, and returns it."""


def calibrated(tile_outputs: int, tile_size: int) -> Recipe:
    """Return the recipe `bct` with the column sweep, for models whose embedding is tied to the head.

    Args:
      tile_outputs, tile_size: tokens and channels of a tile of the embedding.
    """
    table = BctGptq(path="embedding/table", tile_outputs=tile_outputs, tile_size=tile_size)
    return Recipe(layers=(table, BctGptq(path=".")), vectors="bfp8")


def cached_in(cache_format: CacheFormat, model: Transformer) -> Transformer:
    """Set the cache format of a model, in place; formats may be others than those of the table."""
    for layer in model.decoder.layers:
        layer.attention.heads = dataclasses.replace(layer.attention.heads, cache_format=cache_format)
    return model


def cache_bits(make: Callable[[nnx.Rngs], Transformer]) -> float:
    """Return the bits of a value of the model's cache."""

    def caches() -> list[Any]:
        model = make(nnx.Rngs(0))
        model.dtype = jnp.bfloat16
        return model.make_cache(1, 64).layers

    found = [(cache.key, cache.value) for cache in jax.eval_shape(caches)]
    model = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    values = 2 * 64 * model.config.kv_heads * model.config.width_per_head * len(found)
    return 8 * sum(stored_bytes(key) + stored_bytes(value) for key, value in found) / values


class Measurement:
    """Perplexities of a run's parameters, of others, and of changed models, on the run's held-out text."""

    def __init__(self, directory: Path, max_tokens: int | None):
        stored = StoredModel.open(directory)
        config = run_config(stored, ["precision.compute=float32"])
        model = config.model.model_copy(update={"scan_layers": False})
        self.config = with_evaluation_layout(config.model_copy(update={"model": model}), 1, chosen=False)
        self.max_tokens = max_tokens
        self.trainer, self.data = open_evaluation(self.config, stored, TextOptions(), print)
        decoder = load_decoder(
            stored, run_config(stored, ["parallel.data=1", "precision.compute=float32"]), layout_chosen=True
        )
        self.step = stored.choose_step(None)
        self.params = decoder.params
        self.non_params = decoder.non_params

    def compress(self, leaves: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
        """Return the parameters by path with the matrices compressed that the recipe chooses."""
        layouts = compressible_weights(self.config.model)
        methods = choose_methods(recipe, layouts)
        if not any(method.needs for method in methods.values()):
            return compress_leaves(leaves, methods, layouts)
        model = self.trainer.module.merge(self.params, self.non_params)
        text = open_data(self.config.data, sequence_length=self.config.train.sequence_length, seed=0)
        return {**leaves, **compress_layers(model, calibration_batches(text, SEQUENCES), methods).weights}

    def make(self, change: Change, rngs: nnx.Rngs) -> Transformer:
        return change(Transformer(self.config.model, rngs))

    def perplexity(self, change: Change = lambda model: model, params: Params | None = None) -> float:
        trainer = Trainer(
            functools.partial(self.make, change),
            language_model_loss,
            self.data,
            optimizer=self.config.optimizer,
            mesh=self.trainer.rules.mesh,
            train=self.config.train,
        )
        params = self.params if params is None else params
        return measure_loss(trainer, self.data, params, self.non_params, self.max_tokens).perplexity

    def accuracy(self, change: Change = lambda model: model, params: Params | None = None) -> float:
        """Return the share of held-out tokens, 0 to 1, to which the model gives the highest probability."""

        @jax.jit
        def count(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
            model = change(self.trainer.module.merge(params, self.non_params))
            inputs = {name: batch[name] for name in ("positions", "segment_ids") if name in batch}
            labels = batch["labels"]
            right = jnp.argmax(model(batch["tokens"], **inputs), axis=-1) == labels
            return jnp.stack([jnp.sum(right & (labels >= 0)), jnp.sum(labels >= 0)])

        params = self.params if params is None else params
        rows = range(EVAL_BATCH)
        limit = self.max_tokens
        batches = self.data.held_out_batches(batch_size=EVAL_BATCH, rows=rows, max_tokens=limit)
        right, tokens = sum(count(params, batch) for batch in batches)
        return float(right / tokens)


def cache_rows(measurement: Measurement) -> list[dict[str, Any]]:
    """Return a row for each format of the cache, and one for bfp12 without sorted channels."""
    unsorted = dataclasses.replace(CACHE_FORMATS["bfp12"], sorts_channels=False)
    formats = {**CACHE_FORMATS, "bfp12, channels unsorted": unsorted}
    rows = [{"format": "none (bfloat16 counted)", "bits_per_value": 16.0, "perplexity": measurement.perplexity()}]
    for name, cache_format in formats.items():
        change = functools.partial(cached_in, cache_format)
        bits = cache_bits(functools.partial(measurement.make, change))
        rows.append({"format": name, "bits_per_value": bits, "perplexity": measurement.perplexity(change)})
        print(rows[-1], flush=True)
    for row in rows:
        row |= {"work": "cache of keys and values", "ratio": 16 / row["bits_per_value"]}
    return rows


def weight_rows(measurement: Measurement) -> list[dict[str, Any]]:
    """Return a row of float32 weights and rows of recipes; `bct` has one with activations in integers too."""
    leaves = named_leaves(measurement.params)
    rows = []
    count = sum(leaf.size for leaf in leaves.values())
    width = measurement.config.model.hidden_size
    recipes = {
        "bct": load_recipe("bct"),
        "bct, by the sweep of GPTQ": calibrated(16, 64),
        "the same, an exponent for each token of the embedding": calibrated(1, width),
        "cluster3": load_recipe("cluster3"),
    }
    rows.append(
        {"work": "weights", "format": "none (float32)", "bits_per_value": 32.0, "ratio": 1.0}
        | {"perplexity": measurement.perplexity(), "accuracy": measurement.accuracy()}
    )
    for name, recipe in recipes.items():
        stored = {path: as_stored(leaf, recipe) for path, leaf in measurement.compress(leaves, recipe).items()}
        size = sum(leaf.stored_bytes if isinstance(leaf, PackedWeight) else leaf.nbytes for leaf in stored.values())
        params = nest((path, dense_parameter(path, leaf)) for path, leaf in stored.items())
        for integers in (False, True) if name == "bct" else (False,):
            change = in_integers if integers else lambda model: model
            rows.append({
                "work": "weights", "format": name + "; activations and softmax in 8-bit integers" * integers,
                "bits_per_value": 8 * size / count, "ratio": 4 * count / size,
                "perplexity": measurement.perplexity(change, params),
                "accuracy": measurement.accuracy(change, params),
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def measure(directory: Path, max_tokens: int | None) -> list[dict[str, Any]]:
    """Return the rows of a trained run."""
    measurement = Measurement(directory, max_tokens)
    caches = cache_rows(measurement)
    plain = caches[0]["perplexity"]
    rows = [*caches, *weight_rows(measurement)]
    size = sum(leaf.size for leaf in jax.tree.leaves(measurement.params))
    for row in rows:
        row |= {"change_percent": 100 * (row["perplexity"] / plain - 1), "step": measurement.step, "parameters": size}
        row |= {"device": jax.devices()[0].device_kind, "devices": 1, "implementation": "jaxstack"}
    return rows


def main() -> None:
    """Measure all formats, and append their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    trained = parser.add_mutually_exclusive_group(required=True)
    trained.add_argument("--run", help="run directory of a trained language model")
    trained.add_argument(
        "--train", nargs="+", metavar="WORD", help="configuration to train first, as for jaxstack.train"
    )
    parser.add_argument("--max-tokens", type=int, help="held-out tokens (default: all)")
    args = parser.parse_args()
    require_commit(SCRIPT)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(args.run) if args.run else train_run(args.train[0], Path(folder), args.train[1:])
        rows = measure(directory, args.max_tokens)
    common = {"model": args.run or " ".join(args.train), "max_tokens": args.max_tokens}
    print_table(rows, COLUMNS)
    append_rows(SCRIPT, [{**row, **common} for row in rows])


if __name__ == "__main__":
    main()
