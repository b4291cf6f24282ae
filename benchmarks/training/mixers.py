"""Loss of recurrent hybrids beside a Transformer of the same size, on the same tokens of real text, for several seeds.

    python benchmarks/training/mixers.py                    # nine runs, three at a time
    python benchmarks/training/mixers.py --models transformer 'gated deltanet 3:1' --seeds 0
    python benchmarks/training/mixers.py --tiny             # tiny sizes on simulated CPU devices

The hybrids have three recurrent layers (gated DeltaNet or Mamba-2) to one of attention, and a narrower feed-forward, so
that every model has about as many parameters. `final_loss` is the mean over the last tenth of the tokens, `loss_ratio`
that by the Transformer's of the same seed; `eval_loss` is that of held-out text. Each run is a process of its own.
`--together` of them share a GPU, so that their speed means nothing and is not in the rows. Rows, curves included, are
appended to benchmarks/results/mixers.jsonl.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.arguments import positive
from benchmarks.picture import Panel, draw
from benchmarks.rows import append_rows, print_table, require_commit
from benchmarks.training.convergence import SPEEDS, TINY, Row, compare, kept_rows, points_of, run_variant

BASE = "transformer"
MODELS: dict[str, tuple[str, ...]] = {
    BASE: ("model.intermediate_size=1408",),
    "gated deltanet 3:1": (
        "model.layer_types=[delta, delta, delta, full_attention]", "model.intermediate_size=1280",
        "model.delta={num_heads: 8, head_dim: 64, num_key_heads: 4, key_head_dim: 64}",
    ),
    "mamba-2 3:1": (
        "model.layer_types=[ssd, ssd, ssd, full_attention]", "model.intermediate_size=960",
        "model.ssd={num_heads: 16, head_dim: 64, state_size: 128, n_groups: 1}",
    ),
}  # fmt: skip
RATE = 1e-3
SIZE = (
    "model.num_layers=12", "model.hidden_size=512", "model.num_heads=8", "model.num_kv_heads=4",
    "train.global_batch_size=32", "train.sequence_length=1024", f"optimizer.learning_rate={RATE}",
    "precision.compute=bfloat16",
)  # fmt: skip
TINY_LAYERS = ("model.num_layers=4", "model.delta.num_heads=2", "model.delta.num_key_heads=2", "model.ssd.num_heads=2")
COLUMNS = ("variant", "parameters", "tokens", "final_loss", "loss_ratio", "eval_loss", "eval_loss_ratio")


def variant_name(model: str, seed: int) -> str:
    """Return the name of the row of a model and a seed."""
    return f"{model}, seed {seed}"


def overrides_of(args: argparse.Namespace, model: str, seed: int) -> list[str]:
    """Return the configuration of one run."""
    tokens_per_step, tokens = (256, 12 * 256) if args.tiny else (32768, args.tokens)
    steps = max(2, round(tokens / tokens_per_step))
    source = [f"data.sources=[{{path: {json.dumps(args.text)}}}]", "data.packing=false"]
    tiny = [*TINY, *(given for given in TINY_LAYERS if _applies(given, model))] if args.tiny else []
    schedule = [f"train.steps={steps}", f"schedule.warmup_steps={steps // 10}"]
    return [*SIZE, *MODELS[model], *source, *tiny, *schedule, f"run.seed={seed}"]


def _applies(override: str, model: str) -> bool:
    """Whether the model has the section that an override sets."""
    section = override.split(".")[1]
    return section not in ("delta", "ssd") or section in " ".join(MODELS[model])


def measure(args: argparse.Namespace, model: str, seed: int) -> Row:
    """Return the row of one run, which shares the device with others."""
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / args.together:.3f}"}
    name = variant_name(model, seed)
    row = run_variant(name, overrides_of(args, model, seed), args.minutes, args.patience, environment)
    return {key: value for key, value in row.items() if key not in SPEEDS}


def picture(rows: Iterable[Mapping[str, Any]]) -> str:
    """Draw the loss against tokens: for each model the mean over its seeds, whole and for the last half."""
    curves: dict[str, list[list[tuple[float, float]]]] = {}
    for row in rows:
        model = row["variant"].rpartition(", ")[0]
        points = [(point["tokens"] / 1e6, point["loss"]) for point in points_of(row)[1:]]
        curves.setdefault(model, []).append(points)
    means = {model: [_mean(points) for points in zip(*found, strict=False)] for model, found in curves.items()}
    late = {model: points[len(points) // 2 :] for model, points in means.items()}
    panels = [
        Panel("Training loss (nats a token)", "million tokens", means),
        Panel("The same, second half", "million tokens", late),
    ]
    return draw(panels, "Training loss of a Transformer and of hybrids")


def _mean(points: tuple[tuple[float, float], ...]) -> tuple[float, float]:
    """Return the mean of points at the same number of tokens."""
    return points[0][0], sum(loss for _, loss in points) / len(points)


def main() -> None:
    """Train every model with every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL",
        help=f"to train, of: {', '.join(MODELS)}")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="one run of each model for each")
    parser.add_argument("--tokens", type=positive(float), default=10e6, help="of the whole schedule")
    parser.add_argument("--minutes", type=positive(float), default=20.0, help="of training, after which a run stops")
    parser.add_argument("--text", default="stdlib", help="a source of data: stdlib, a file, a directory, a glob")
    parser.add_argument("--patience", type=positive(float), default=240, help="seconds of silence that end a run")
    parser.add_argument("--together", type=positive(int), default=3, help="runs that share the device at a time")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on simulated CPU devices; rows go to tiny/")
    args = parser.parse_args()
    name = "tiny/mixers" if args.tiny else "mixers"
    require_commit(name)
    work = f"40M parameters, {args.tokens / 1e6:g} million tokens of {args.text} in steps of 32 x 1024"
    work = "tiny mixers" if args.tiny else work
    runs = [(model, seed) for seed in args.seeds for model in args.models]
    with ThreadPoolExecutor(args.together) as pool:
        rows = list(pool.map(lambda run: {"work": work, **measure(args, *run)}, runs))
    kept = kept_rows(name, work) | {row["variant"]: row for row in rows if "failed" not in row}
    for row, (_, seed) in zip(rows, runs, strict=True):
        compare(row, kept.get(variant_name(BASE, seed)))
    found = [row for row in rows if "failed" not in row]
    if not found:
        raise SystemExit(1)
    append_rows(name, found)
    print_table(found, COLUMNS)


if __name__ == "__main__":
    main()
