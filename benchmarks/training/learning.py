"""Training on real text, timed as it goes: what ablation.py and convergence.py share."""

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import jax

Point = dict[str, float]
"""`step`, `tokens`, `seconds` of training without the first step, `loss`: the mean since the point before."""


def learn(
    trainer: Any,
    *,
    every: int,
    seconds: float = math.inf,
    say: Callable[[Point], None] = lambda point: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Point]:
    """Trains for `train.steps`, or until about so many seconds have gone; a point for every `every` steps.

    Steps between two points are queued together. The first one, which loads kernels, is not timed. `clock` returns the
    seconds to count: of the wall, or of the processor with `time.process_time`.
    """
    train = trainer.train
    tokens = train.global_batch_size * train.sequence_length
    points = []
    batches = trainer.batches(0)
    spent = 0.0
    first = float(trainer.train_step(next(batches)[0])["loss"])
    points.append({"step": 1, "tokens": tokens, "seconds": 0.0, "loss": first})
    while points[-1]["step"] < train.steps and spent < seconds:
        begin = int(points[-1]["step"])
        end = min(begin // every * every + every, train.steps)
        began = clock()
        losses = [trainer.train_step(batch)["loss"] for batch, _ in itertools.islice(batches, end - begin)]
        mean = sum(map(float, losses)) / len(losses)
        spent += clock() - began
        points.append({"step": end, "tokens": end * tokens, "seconds": spent, "loss": mean})
        say(points[-1])
    batches.close()
    return points


def count_matmuls(trainer: Any) -> Any:
    """Count the matmuls of the compiled step, those in FP8 and those expected in FP8; None if not known.

    Raises:
        SystemExit: on a GPU not all of those that should run in FP8.
    """
    counted = trainer.describe().get("matmuls")
    if jax.default_backend() == "gpu" and (not counted or counted["fp8"] < counted["fp8_expected"]):
        raise SystemExit(f"not every matmul that should run in FP8 does: {counted}")
    return counted


def mean_loss(points: list[Point], low: float, high: float) -> float:
    """Mean loss of the points with `low < tokens <= high`, each weighted by its steps.

    Raises:
        ValueError: there are none.
    """
    pairs = [(after["loss"], after["step"] - before["step"]) for before, after in itertools.pairwise(points)
             if low < after["tokens"] <= high]  # fmt: skip
    if not pairs:
        raise ValueError(f"no point between {low:,.0f} and {high:,.0f} tokens")
    return sum(loss * steps for loss, steps in pairs) / sum(steps for _, steps in pairs)
