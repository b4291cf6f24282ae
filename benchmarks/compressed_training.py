"""Compressed training of a small language model: what each method loses, against compression after training.

    python benchmarks/compressed_training.py

The model reads the bytes of Python's standard library. All methods start from the same trained model and take the same
number of further steps; `before` is the held-out loss when its weights are compressed without training, `after` with
training, and `plain` is that of equally long training without compression, compressed at its end. A student of half
the width learns with and without the trained model as its teacher, from the same tokens.
"""

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.rows import append_rows, require_commit
from jaxstack.compressed_training.cluster import (
    Clustering,
    ClusterRule,
    count_patterns,
    soft_clusters,
    start_centroids,
    stored_bytes,
)
from jaxstack.compressed_training.distill import DistillConfig, distillation_loss, empty_model, with_teacher
from jaxstack.data.loader import Data, open_data
from jaxstack.functional.compressed import CompressedModule
from jaxstack.functional.module import Dict, flatten, nest
from jaxstack.loss import language_model_loss
from jaxstack.models import Transformer
from jaxstack.run.build import make_trainer, resolve_model
from jaxstack.run_config import RunConfig, config_from_tree
from jaxstack.trainer import Trainer
from pallas_kernels.weight_only.packed import PackedWeight

SCRIPT = "compressed_training"
EVAL_TOKENS = 32768
LAYERS = "attention|mlp"
RULES: dict[str, dict[str, Any]] = {
    "int4": {"method": "qat", "bits": 4, "group_size": 32},
    "int3": {"method": "qat", "bits": 3, "group_size": 32},
    "cluster3": {"method": "cluster", "bits": 3},
    "low_rank": {"method": "low_rank", "penalty": 1e-3, "threshold": 1e-3},
    "sparse50": {"method": "mask"},
}
"""Work -> the rule of the dense layers."""


class Base(NamedTuple):
    """A trained model.

    Attributes:
      config: its configuration.
      data: its text.
      params: its parameters.
    """

    config: RunConfig
    data: Data
    params: Dict


def make_config(steps: int, learning_rate: float, width: int = 64, **sections: Any) -> RunConfig:
    """Return the configuration of a training run of the small model."""
    model = {"hidden_size": width, "num_layers": 2, "num_heads": 4, "intermediate_size": 3 * width}
    return config_from_tree(
        {
            "model": {**model, "scan_layers": False},
            "data": {"tokenizer": {"name": "byte"}},
            "train": {"steps": steps, "global_batch_size": 16, "sequence_length": 64, "eval_batch_size": 64},
            "optimizer": {"learning_rate": learning_rate, "weight_decay": 0.0},
            "schedule": {"name": "linear", "warmup_steps": min(20, steps // 2)},
            "observe": {"progress": False},
            **sections,
        }
    )


def train_base(steps: int) -> Base:
    """Train the model that all methods start from."""
    config = make_config(steps, 5e-3)
    data = open_data(config.data, sequence_length=64, seed=0, report=lambda line: None)
    config = config.model_copy(update={"model": resolve_model(config.model, data.vocab_size)})
    trainer = make_trainer(config, data)
    take_steps(trainer)
    return Base(config, data, jax.device_get(trainer.state.params))


def take_steps(trainer: Trainer) -> float:
    """Take all steps of a trainer, and return its held-out loss."""
    batches = trainer.batches(0)
    for _ in range(trainer.train.steps):
        trainer.train_step(next(batches)[0])
    batches.close()
    return held_out(trainer)


def held_out(trainer: Trainer) -> float:
    """Return the held-out loss of a trainer's model, with its weights as exported."""
    values = trainer.evaluate(EVAL_TOKENS)
    assert values is not None
    return values["eval_loss"]


def compressing(base: Base, rule: Mapping[str, Any], steps: int, params: Dict) -> Trainer:
    """Return a trainer that starts from `params` and compresses by `rule` in its steps."""
    sections = {"compression": {"rules": [{"path": LAYERS, **rule}]}, "run": {"init_from": "base"}}
    config = make_config(steps, 1e-3, **sections).model_copy(update={"model": base.config.model})
    trainer = make_trainer(config, base.data)
    trainer.start_from(jax.tree.map(jnp.array, params))
    return trainer


def train_plainly(base: Base, steps: int) -> Dict:
    """Return the parameters after further training without compression."""
    config = make_config(steps, 1e-3).model_copy(update={"model": base.config.model})
    trainer = make_trainer(config, base.data)
    trainer.start_from(jax.tree.map(jnp.array, base.params))
    take_steps(trainer)
    return jax.device_get(trainer.state.params)


def measure(base: Base, work: str, plain: Dict, steps: int) -> dict[str, Any]:
    """Return the row of one method."""
    rule, start, after_plain = RULES[work], base.params, plain
    if work == "sparse50":
        start, after_plain = prune(start), prune(plain)
    trainer = compressing(base, rule, steps, start)
    before = held_out(trainer)
    after = take_steps(trainer)
    assert isinstance(trainer.module, CompressedModule)
    packed = trainer.module.pack(jax.device_get(trainer.state.params))
    size = sum(x.stored_bytes if isinstance(x, PackedWeight) else 4 * x.size for x in packed.values())
    plainly = compressing(base, rule, steps, after_plain)
    if work == "low_rank":
        truncate(trainer, plainly)
    weights = sum(int(np.prod(x.shape)) for x in packed.values())
    kept = sum(int(x) for x in trainer.module.kept(trainer.state.params).values())
    return {
        "before": before,
        "after": after,
        "plain": held_out(plainly),
        "weights": weights,
        "kept": kept,
        "bytes": size,
    }


def prune(params: Dict) -> Dict:
    """Return the parameters with the smaller half of each dense layer's weights at zero."""

    def halve(path: tuple[str, ...], x: np.ndarray) -> np.ndarray:
        dense = path[-1] == "kernel" and ("attention" in path or "mlp" in path)
        return np.where(np.abs(x) < np.median(np.abs(x)), 0, x) if dense else x

    return nest((path, halve(path, x)) for path, x in flatten(params).items())


def truncate(trained: Trainer, plain: Trainer) -> None:
    """Truncate the factors of `plain`, singular value decompositions, to the ranks that `trained` found."""
    found, stored = flatten(trained.state.params), flatten(plain.state.params)
    for path in [path for path in stored if path[-1] == "u"]:
        other = (*path[:-1], "v")
        rank = int(jnp.sum(jnp.linalg.norm(found[path], axis=0) * jnp.linalg.norm(found[other], axis=1) > 0))
        stored[path] = stored[path].at[:, rank:].set(0)
        stored[other] = stored[other].at[rank:].set(0)
    plain.state = plain.state._replace(params=nest(stored.items()))


def distil(base: Base, steps: int, settings: DistillConfig | None, seed: int) -> float:
    """Return the held-out loss of a student of half the width, with or without the base as its teacher."""
    config = make_config(steps, 5e-3, width=32)
    model = config.model.model_copy(update={"vocab_size": base.config.model.vocab_size})
    student = lambda rngs: Transformer(model, rngs)  # noqa: E731
    if settings is None:
        make, loss = student, language_model_loss
    else:
        make = lambda rngs: with_teacher(student(rngs), empty_model(base.config.model, jnp.float32))  # noqa: E731
        loss = functools.partial(distillation_loss, settings=settings)
    trainer = Trainer(
        make, loss, base.data, optimizer=config.optimizer, schedule=config.schedule, train=config.train, seed=seed
    )
    if settings is not None:
        trainer.set_teacher(jax.tree.map(jnp.array, base.params))
    return take_steps(trainer)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the measurements, print a table, and append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args(argv)
    require_commit(SCRIPT)
    base = train_base(arguments.base_steps)
    plain = train_plainly(base, arguments.steps)
    common = {"implementation": "jaxstack", "device": jax.devices()[0].device_kind, "devices": 1}
    common |= {"base_steps": arguments.base_steps, "steps": arguments.steps}
    rows: list[dict[str, Any]] = []
    for work in RULES:
        rows.append({"work": work, **common, **measure(base, work, plain, arguments.steps)})
        print(rows[-1], flush=True)
    settings = DistillConfig(alpha=0.5, temperature=2.0)
    for seed in range(arguments.seeds):
        losses = {
            "scratch": distil(base, arguments.base_steps, None, seed),
            "after": distil(base, arguments.base_steps, settings, seed),
        }
        rows.append({"work": "distill", **common, "seed": seed, **losses})
        print(rows[-1], flush=True)
    clustering = ClusterRule(path=".").settings
    dense, table = (saved_bytes(form, 4096, clustering) for form in (dense_clusters, soft_clusters))
    rows.append({"work": "map of 4096 x 4096, 3 bits", **common, "bytes_before": dense, "bytes": table})
    rows.append({"work": "LLaMA 7B, clustered", **common, **seven_billion()})
    print(*rows[-2:], sep="\n")
    append_rows(SCRIPT, rows)


def dense_clusters(w: jax.Array, settings: Clustering) -> jax.Array:
    """Return `soft_clusters` of weights [out, in] as DKM defines it, with a map of every weight to every centroid."""
    centroids, temperature = start_centroids(count_patterns(w)[1], settings)
    x = w.reshape(-1, 1)
    shares = x
    for _ in range(settings.iterations):
        shares = jax.nn.softmax(-jnp.square(x - centroids) / temperature, axis=-1)
        centroids = jnp.sum(shares * x, axis=0) / jnp.sum(shares, axis=0)
    return jnp.sum(shares * centroids, axis=-1).reshape(w.shape)


def saved_bytes(function: Callable[..., jax.Array], size: int, settings: Clustering) -> int:
    """Return the bytes that the backward pass of a square matrix needs of the forward pass; nothing is computed."""
    w = jax.ShapeDtypeStruct((size, size), jnp.float32)
    pull = jax.eval_shape(lambda w: jax.vjp(lambda w: function(w, settings), w)[1], w)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))


def seven_billion() -> dict[str, int]:
    """Return the bytes of a LLaMA 7B in 16 bits, and with layers of 3 bits and tables of 8, by arithmetic."""
    layers, d, f, vocabulary = 32, 4096, 11008, 32000
    matrices, tables, norms = layers * (4 * d * d + 3 * d * f), 2 * vocabulary * d, (2 * layers + 1) * d
    after = stored_bytes(matrices, 7 * layers, bits=3) + stored_bytes(tables, 2, bits=8) + 2 * norms
    return {"bytes_before": 2 * (matrices + tables + norms), "bytes": after}


if __name__ == "__main__":
    main()
