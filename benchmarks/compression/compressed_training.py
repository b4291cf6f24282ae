"""Compressed training of a small language model: what each method loses, beside compression after training.

    python benchmarks/compression/compressed_training.py         # a few minutes a part on two CPU cores
    python benchmarks/compression/compressed_training.py --run runs/quickstart --parts qat sparse
    python benchmarks/compression/compressed_training.py --tiny  # tiny sizes; rows go to tiny/

All methods but `low_rank_from_start` start from one trained model, the quickstart's, and take the same number of
further steps on the same text. `float32` takes these steps without compression; compression after training starts from
its weights. Parts:

    qat       integers of `--bits` for the model after the further steps, by rounding, by GPTQ, and by training from its
              GPTQ, with learned scales, on the text of these steps once more: alone, or with the model as teacher
    sparse    half of the weights zero: pruning after training, and training that keeps the zeros of a pruned start
    cluster   8 values a matrix: k-means after training, and training with clusters
    low_rank  the singular value decomposition at the ranks that training found, and that training
    low_rank_from_start
              the same for a model that is trained with factors from initial weights, as long as the quickstart's
    distill   a student of half the width and depth that learns from the text alone, and with the model as its teacher
    sizes     memory of eDKM's clustering, and bytes of a clustered LLaMA 7B; nothing is trained

`loss` is the held-out loss in nats, the mean over `--seeds` (other text, and other initial weights of students);
`rise` is that loss minus the one of `float32`. Rows are appended to benchmarks/results/compressed_training.jsonl.
"""

import argparse
import collections
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.arguments import positive
from benchmarks.compression.compression_methods import (
    QUICKSTART,
    TINY,
    Trained,
    calibration_batches,
    dense_paths,
    open_model,
    replaced,
)
from benchmarks.rows import SCRATCH, append_rows, print_table, require_commit
from jaxstack.compress.after_training.layerwise import compress_layers
from jaxstack.compress.base import AfterTraining, DuringTraining
from jaxstack.compress.during_training import Compression, compress_in_training
from jaxstack.compress.formats.integer_grid import Rtn
from jaxstack.compress.formats.lookup_table import KMeans
from jaxstack.compress.formats.low_rank import LowRank
from jaxstack.compress.formats.sparse import Magnitude, MaskRule
from jaxstack.compress.solvers.cluster import (
    Clustering,
    ClusterRule,
    count_values,
    soft_clusters,
    start_centroids,
    stored_bytes,
)
from jaxstack.compress.solvers.gptq import Gptq
from jaxstack.compress.solvers.lsq import LsqRule
from jaxstack.compress.solvers.maestro import LowRankRule
from jaxstack.compress.solvers.sparsegpt import SparseGpt
from jaxstack.distill import DistillConfig, distillation_loss, empty_model, with_teacher
from jaxstack.loss import language_model_loss
from jaxstack.models import Transformer
from jaxstack.module_arrays.module import Dict, ModuleArrays
from jaxstack.run_config import RunConfig
from jaxstack.trainer import Trainer
from pallas_kernels import PackedWeight

SCRIPT = "compressed_training"
DENSE = "attention|mlp"
EVAL_TOKENS = 2**17
"""Held-out tokens that a loss is measured on."""
COLUMNS = ("work", "variant", "implementation", "loss", "rise", "device")

Row = dict[str, Any]


class Study:
    """A trained model, what further training makes of it, and held-out losses.

    Args:
      args: the command line.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.losses = collections.defaultdict[tuple[str, str], list[float]](list)

    @functools.cached_property
    def base(self) -> Trained:
        """The model that everything starts from."""
        return open_model(TINY if self.args.tiny else QUICKSTART, self.args.base_steps, self.args.run)

    @functools.cached_property
    def start(self) -> Dict:
        """Its parameters, in host memory."""
        return jax.device_get(self.base.trainer.state.params)

    @functools.cached_property
    def calibration(self) -> list[Mapping[str, Any]]:
        """Text that GPTQ and SparseGPT are calibrated on."""
        return calibration_batches(self.base.data, self.args.sequences)

    def train(
        self, seed: int, start: Dict, *rules: DuringTraining, teacher: Dict | None = None
    ) -> tuple[ModuleArrays, Dict]:
        """Take further steps from `start`; return the module, and what its train state stores.

        Args:
          seed: which part of the text the steps see.
          start: the parameters to start from.
          rules: methods of compressed training.
          teacher: parameters of a base whose predictions are the only target; None: the text is.
        """
        config = self.base.config
        args = self.args
        changes = {
            "train": config.train.model_copy(update={"steps": args.steps}),
            "optimizer": config.optimizer.model_copy(update={"learning_rate": args.learning_rate}),
            "schedule": config.schedule.model_copy(update={"warmup_steps": min(20, args.steps - 1)}),
        }
        distill = None if teacher is None else DistillConfig(alpha=1.0, temperature=1.0)
        trainer = self.make_trainer(config.model_copy(update=changes), rules, distill, teacher)
        trainer.start_from(jax.tree.map(jnp.array, start))
        take_steps(trainer, self.base.steps + seed * args.steps)
        return trainer.module, trainer.state.params

    def make_trainer(
        self, config: RunConfig, rules: Sequence[DuringTraining], distill: DistillConfig | None, teacher: Dict | None
    ) -> Trainer:
        """Return a trainer on the base's text, with rules; with `distill` a base with other parameters teaches it."""

        def make(rngs):
            return Transformer(config.model, rngs)

        loss = language_model_loss
        if distill is not None:
            base = self.base.config.model

            def make(rngs):
                return with_teacher(Transformer(config.model, rngs), empty_model(base, jnp.float32))

            loss = functools.partial(distillation_loss, settings=distill)
        trainer = Trainer(
            compress_in_training(make, rules),
            loss,
            self.base.data,
            optimizer=config.optimizer,
            schedule=config.schedule,
            mesh=self.base.trainer.rules.mesh,
            train=config.train,
            seed=config.run.seed,
        )
        if teacher is not None:
            trainer.load_unsaved({"teacher": jax.tree.map(jnp.array, teacher)})
        return trainer

    @functools.cache  # noqa: B019 (one study in a process)
    def plain(self, seed: int) -> Dict:
        """Return the parameters after further steps without compression."""
        return self.train(seed, self.start)[1]

    def compress(self, params: Dict, methods: AfterTraining | Mapping[str, AfterTraining]) -> Dict:
        """Return the parameters with the dense layers compressed, as plain arrays."""
        model = self.base.trainer.module.merge(params, self.base.trainer.state.non_params)
        if isinstance(methods, AfterTraining):
            methods = dict.fromkeys(dense_paths(self.base.config.model.num_layers), methods)
        return replaced(params, compress_layers(model, self.calibration, methods).weights)

    def loss(self, params: Dict) -> float:
        """Return the held-out loss of parameters."""
        trainer = self.base.trainer
        found = trainer.evaluator.run(params, trainer.state.non_params, EVAL_TOKENS)
        assert found is not None
        return found["eval_loss"]

    def record(self, variant: str, implementation: str, params: Dict) -> None:
        """Add the loss of parameters to those of a variant and an implementation."""
        self.losses[variant, implementation].append(self.loss(params))
        print(variant, implementation, self.losses[variant, implementation], flush=True)

    def rows(self, reference: str = "float32") -> Iterator[Row]:
        """Yield a row for each variant and implementation that was recorded."""
        args = self.args
        losses = dict(self.losses)
        base = next(statistics.mean(values) for (_, name), values in losses.items() if name == reference)
        for (variant, name), values in losses.items():
            yield {
                "work": f"quickstart, {self.base.steps} + {args.steps} steps", "variant": variant,
                "implementation": name, "loss": statistics.mean(values), "rise": statistics.mean(values) - base,
                "losses": values, "steps": args.steps, "learning_rate": args.learning_rate,
                "base_steps": self.base.steps, "eval_tokens": EVAL_TOKENS,
            }  # fmt: skip


def take_steps(trainer: Trainer, start: int) -> None:
    """Take all steps of a trainer, on the batches from `start` on."""
    batches = trainer.batches(start)
    for _ in range(trainer.train.steps):
        trainer.train_step(next(batches)[0])
    batches.close()


def qat_rows(study: Study, seeds: int, group_size: int) -> Iterator[Row]:
    """Yield the rows of quantization-aware training, which starts from GPTQ of the model that the others compress.

    Training sees the text of the further steps once more, and no other; GPTQ sees the calibration text.
    """
    for seed in range(seeds):
        plain = study.plain(seed)
        study.record("uncompressed", "float32", plain)
        study.record("uncompressed", "float32 once more", study.train(seed, plain)[1])
        for bits in study.args.bits:
            variant = f"int{bits}, groups of {group_size}"
            settings = {"bits": bits, "group_size": group_size}
            study.record(variant, "rtn", study.compress(plain, Rtn(path=".", **settings)))
            start = study.compress(plain, Gptq(path=".", **settings))
            study.record(variant, "gptq", start)
            rule = LsqRule(path=DENSE, **settings)
            for name, teacher in (("qat", None), ("qat with a teacher", plain)):
                module, stored = study.train(seed, start, rule, teacher=teacher)
                study.record(variant, name, module.load(stored))
    yield from study.rows()


def sparse_rows(study: Study, seeds: int) -> Iterator[Row]:
    """Yield the rows of sparse fine-tuning.

    Raises:
      AssertionError: a zero of the pruned start is not zero after training.
    """
    methods = {"magnitude": Magnitude(path="."), "sparsegpt": SparseGpt(path=".")}
    starts = {name: study.compress(study.start, method) for name, method in methods.items()}
    for seed in range(seeds):
        plain = study.plain(seed)
        study.record("uncompressed", "float32", plain)
        for name, method in methods.items():
            study.record("50 % zeros", name, study.compress(plain, method))
            module, stored = study.train(seed, starts[name], MaskRule(path=DENSE))
            found = module.load(stored)
            kept = jax.tree.map(lambda old, new: bool(jnp.all((old != 0) | (new == 0))), starts[name], found)
            assert all(jax.tree.leaves(kept)), "a zero was not kept"
            study.record("50 % zeros", f"{name}, then trained with its zeros", found)
    yield from study.rows()


def cluster_rows(study: Study, seeds: int) -> Iterator[Row]:
    """Yield the rows of training with clusters."""
    for seed in range(seeds):
        plain = study.plain(seed)
        study.record("uncompressed", "float32", plain)
        study.record("3 bits, clustered", "kmeans", study.compress(plain, KMeans(path=".", bits=3)))
        module, stored = study.train(seed, study.start, ClusterRule(path=DENSE, bits=3))
        study.record("3 bits, clustered", "edkm", module.load(stored))
    yield from study.rows()


def low_rank_rows(study: Study, seeds: int, penalty: float) -> Iterator[Row]:
    """Yield the rows of trainable low rank, with the share of values that are left."""
    shares = []
    for seed in range(seeds):
        plain = study.plain(seed)
        study.record("uncompressed", "float32", plain)
        rule = LowRankRule(path=DENSE, penalty=penalty, threshold=1e-3)
        module, stored = study.train(seed, study.start, rule)
        study.record("low rank", "maestro", module.load(stored))
        ranks, kept = kept_ranks(module, stored)
        methods = {path: LowRank(path=".", rank=rank, dtype="float32") for path, rank in ranks.items()}
        study.record("low rank", "truncated svd", study.compress(plain, methods))
        shares.append(kept)
    for row in study.rows():
        yield row | ({"kept": statistics.mean(shares), "penalty": penalty} if row["variant"] == "low rank" else {})


def low_rank_from_start_rows(study: Study, penalty: float) -> Iterator[Row]:
    """Yield the rows of training with factors from initial weights, for as many steps as the quickstart's training."""
    config = study.base.config
    base = study.start
    train = config.train.model_copy(update={"steps": study.base.steps})
    rule = LowRankRule(path=DENSE, penalty=penalty, threshold=1e-3)
    trainer = study.make_trainer(config.model_copy(update={"train": train}), (rule,), None, None)
    take_steps(trainer, 0)
    module = trainer.module
    stored = trainer.state.params
    ranks, kept = kept_ranks(module, stored)
    study.record("uncompressed", "float32 from the start", base)
    study.record("low rank", "maestro from the start", module.load(stored))
    at_ranks = {path: LowRank(path=".", rank=rank, dtype="float32") for path, rank in ranks.items()}
    study.record("low rank", "svd at its ranks", study.compress(base, at_ranks))
    if kept < 1:
        evenly = LowRank(path=".", ratio=kept, dtype="float32")
        study.record("low rank", "svd of as many values in each layer", study.compress(base, evenly))
    of_low_rank = {"kept": kept, "penalty": penalty}
    for row in study.rows("float32 from the start"):
        row |= {"work": f"quickstart, {study.base.steps} steps", "steps": study.base.steps}
        row |= {"learning_rate": config.optimizer.learning_rate}
        yield row | (of_low_rank if row["variant"] == "low rank" else {})


def kept_ranks(module: ModuleArrays, stored: Dict) -> tuple[dict[str, int], float]:
    """Return the ranks that training with factors left (at least 1), by path, and the share of the values left."""
    compression = module.view(Compression)
    assert compression is not None
    packed = compression.pack(stored)
    ranks = {path: max(1, w.arrays["v"].shape[0]) for path, w in packed.items() if isinstance(w, PackedWeight)}
    kept = sum(sum(packed[path].shape) * rank for path, rank in ranks.items())
    return ranks, kept / sum(math.prod(packed[path].shape) for path in ranks)


def distill_rows(study: Study, seeds: int) -> Iterator[Row]:
    """Yield the rows of students."""
    settings = DistillConfig(alpha=0.5, temperature=2.0)
    for seed in range(seeds):
        for name, chosen in (("from the text", None), ("distilled", settings)):
            study.losses["student", name].append(train_student(study, chosen, seed))
            print(name, study.losses["student", name], flush=True)
    for row in study.rows("from the text"):
        steps = f"{study.args.student_steps} steps, teacher of {study.base.steps} steps"
        yield row | {"work": f"student of half the width and depth, {steps}", "steps": study.args.student_steps,
                     "learning_rate": study.base.config.optimizer.learning_rate}  # fmt: skip


def train_student(study: Study, settings: DistillConfig | None, seed: int) -> float:
    """Return the held-out loss of a student of half the width and depth, with or without the base as its teacher."""
    config = study.base.config
    teacher = config.model
    size = config.model.hidden_size // 2
    changes = {
        "hidden_size": size,
        "num_layers": -(-teacher.num_layers // 2),
        "intermediate_size": teacher.feed_forward_size // 2,
    }
    changed = {
        "model": teacher.model_copy(update=changes),
        "train": config.train.model_copy(update={"steps": study.args.student_steps}),
        "run": config.run.model_copy(update={"seed": seed}),
    }
    trainer = study.make_trainer(config.model_copy(update=changed), (), settings, settings and study.start)
    take_steps(trainer, seed * study.args.student_steps)
    values = trainer.evaluate(EVAL_TOKENS)
    assert values is not None
    return values["eval_loss"]


def size_rows() -> Iterator[Row]:
    """Yield the memory of clustering in a step, and the bytes of a large clustered model."""
    clustering = ClusterRule(path=".").format
    for name, function in (("k-means over all weights", dense_clusters), ("edkm", soft_clusters)):
        saved = saved_bytes(function, 4096, clustering)
        yield {"work": "map of 4096 x 4096, 3 bits", "implementation": name, "bytes": saved}
    found = seven_billion()
    for name, size in (("16 bits a weight", found["bytes_before"]), ("edkm", found["bytes"])):
        yield {"work": "LLaMA 7B, clustered, by arithmetic", "implementation": name, "bytes": size}


def dense_clusters(w: jax.Array, settings: Clustering) -> jax.Array:
    """Return `soft_clusters` of weights [out, in] as DKM defines it, with a map of every weight to every centroid."""
    centroids, temperature = start_centroids(count_values(w), settings)
    x = w.reshape(-1, 1)
    shares = x
    for _ in range(settings.iterations):
        shares = jax.nn.softmax(-jnp.square(x - centroids) / temperature, axis=-1)
        centroids = jnp.sum(shares * x, axis=0) / jnp.sum(shares, axis=0)
    return jnp.sum(shares * centroids, axis=-1).reshape(w.shape)


def saved_bytes(function: Callable[..., Any], size: int, settings: Clustering) -> int:
    """Return the bytes that the backward pass of a square matrix needs of the forward pass; nothing is computed."""
    w = jax.ShapeDtypeStruct((size, size), jnp.float32)
    pull = jax.eval_shape(lambda w: jax.vjp(lambda w: function(w, settings), w)[1], w)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))


def seven_billion() -> dict[str, int]:
    """Return the bytes of a LLaMA 7B in 16 bits, and with layers of 3 bits and tables of 8, by arithmetic."""
    layers = 32
    d = 4096
    f = 11008
    vocabulary = 32000
    matrices = layers * (4 * d * d + 3 * d * f)
    tables = 2 * vocabulary * d
    norms = (2 * layers + 1) * d
    after = stored_bytes(matrices, 7 * layers, bits=3) + stored_bytes(tables, 2, bits=8) + 2 * norms
    return {"bytes_before": 2 * (matrices + tables + norms), "bytes": after}


PARTS: Mapping[str, Callable[[Study], Iterator[Row]]] = {
    "qat": lambda study: qat_rows(study, study.args.seeds, 32 if study.args.tiny else 128),
    "sparse": lambda study: sparse_rows(study, study.args.seeds),
    "cluster": lambda study: cluster_rows(study, study.args.seeds),
    "low_rank": lambda study: low_rank_rows(study, study.args.seeds, study.args.penalty),
    "low_rank_from_start": lambda study: low_rank_from_start_rows(study, study.args.penalty),
    "distill": lambda study: distill_rows(study, study.args.seeds),
    "sizes": lambda study: size_rows(),
}
"""Part -> function that makes its rows."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="default: all")
    parser.add_argument("--run", help="directory of a trained quickstart; default: it is trained")
    parser.add_argument("--base-steps", type=positive(int), default=1500, help="steps of that training")
    parser.add_argument("--steps", type=positive(int), default=300, help="further steps")
    parser.add_argument("--student-steps", type=positive(int), default=600, help="steps of a student")
    parser.add_argument("--learning-rate", type=positive(float), default=1e-3, help="of the further steps")
    parser.add_argument("--bits", nargs="+", type=int, choices=range(2, 9), default=[4, 3, 2], metavar="N",
                        help="of the part `qat` (default: 4 3 2)")  # fmt: skip
    parser.add_argument("--penalty", type=positive(float), default=1e-3, help="of low rank")
    parser.add_argument("--seeds", type=positive(int), default=2, help="repetitions with other text")
    parser.add_argument("--sequences", type=positive(int), default=128, help="calibration sequences")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; rows go to tiny/")
    args = parser.parse_args()
    if args.tiny:
        args.base_steps = 4
        args.steps = 3
        args.student_steps = 3
        args.seeds = 1
        args.sequences = 8
    name = f"{SCRATCH}{SCRIPT}" if args.tiny else SCRIPT
    require_commit(name)
    study = Study(args)
    rows = list[Row]()
    for part in args.parts:
        study.losses.clear()
        common = {"device": jax.devices()[0].device_kind, "devices": 1, "part": part}
        found = [{**row, **common} for row in PARTS[part](study)]
        append_rows(name, found)
        rows += found
    print_table(rows, COLUMNS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
