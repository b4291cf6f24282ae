"""Predicts run times of compiled programs: the roofline's time with a correction learned from measured programs.

The correction is a ridge regression on log(time / roofline).

The roofline uses peak rates only. In real programs matmuls with a small dim are slower, kernels have launch overhead,
and data may fit a cache. The correction learns these effects from about a hundred measured programs. Kaufman et al.
2021 (arXiv:2008.01040) train a neural network on such programs. The correction is evaluated on families of programs
that it was not fitted to.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxstack.errors import ConfigError
from jaxstack.plan.program_features import ProgramFeatures

_DISPATCH_SECONDS = 3e-5
_KERNEL_SECONDS = 3e-6
_TRIP_SECONDS = 1e-5
"""Rough times to start a program, a kernel, and an iteration of a loop; the fit scales them."""


@dataclasses.dataclass(frozen=True)
class MeasuredProgram:
    """Measured run time of a compiled program on a device, and the features that predict it (FLOPs, bytes, ...).

    Attributes:
      family: kind of program; programs of one family are alike, so it is never split between training and test.
      features: of the compiled program.
      seconds: measured time of a run.
      peak_flops: FLOP/s of the device.
      bandwidth: bytes/s of its memory.
    """

    family: str
    features: ProgramFeatures
    seconds: float
    peak_flops: float
    bandwidth: float

    @property
    def roofline_seconds(self) -> float:
        """Roofline time of the program, in seconds."""
        return self.features.roofline_seconds(self.peak_flops, self.bandwidth)


def feature_vector(features: ProgramFeatures, peak_flops: float, bandwidth: float) -> Float[np.ndarray, " features"]:
    """Return the learned cost model's inputs for a program: its FLOPs, bytes etc. as ratios to its roofline time.

    Args:
      features: of a program.
      peak_flops: FLOP/s of the device.
      bandwidth: bytes/s of its memory.
    """
    roofline = features.roofline_seconds(peak_flops, bandwidth)
    share = {size: flops / peak_flops / roofline for size, flops in features.dot_flops.items()}
    sent = sum(features.collective_bytes.values()) / bandwidth / roofline
    starts = _DISPATCH_SECONDS + _KERNEL_SECONDS * features.kernels + _TRIP_SECONDS * features.trips
    return np.array(
        [
            1.0,
            share["small"],
            share["middle"],
            share["large"],
            features.kernel_bytes / bandwidth / roofline,
            min(sent, 10.0),
            math.log1p(features.transcendentals / (bandwidth * roofline)) * 10,
            math.log1p(starts / roofline),
        ]
    )


@dataclasses.dataclass(frozen=True)
class LearnedCost:
    """Learned cost model: predicts log(run time / roofline time) of a program as a linear function of its features.

    Attributes:
      weights: of the entries of `feature_vector`.
      bounds: lowest and highest correction in the fit; predictions are clipped to this range.
    """

    weights: Float[np.ndarray, " features"]
    bounds: tuple[float, float]

    def predict(self, features: ProgramFeatures, peak_flops: float, bandwidth: float) -> float:
        """Return the predicted run time of a compiled program, in seconds.

        Args:
          features: of the compiled program.
          peak_flops: FLOP/s of the device.
          bandwidth: bytes/s of its memory.
        """
        correction = float(feature_vector(features, peak_flops, bandwidth) @ self.weights)
        return features.roofline_seconds(peak_flops, bandwidth) * math.exp(float(np.clip(correction, *self.bounds)))

    def save(self, path: str | Path) -> None:
        """Write the learned cost model to a JSON file."""
        text = json.dumps({"weights": self.weights.tolist(), "bounds": list(self.bounds)})
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "LearnedCost":
        """Read a learned cost model that `save` wrote.

        Raises:
          ConfigError: the file is missing or of another form.
        """
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
            low, high = map(float, value["bounds"])
            weights = np.array(value["weights"], dtype=np.float64)
            if weights.ndim != 1:
                raise ValueError("weights must be a list of numbers")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is no learned cost model ({error}); make one with python benchmarks/learned_cost.py"
            ) from None
        return cls(weights, (low, high))


def fit_cost(programs: Sequence[MeasuredProgram], penalty: float = 1.0) -> LearnedCost:
    """Fit a cost model to measured programs; every family (kind of program) has the same total weight.

    Args:
      programs: programs of one device or of several.
      penalty: of the squared weights, but not of the constant.

    Raises:
      ValueError: there is no program.
    """
    if not programs:
        raise ValueError("a learned cost model needs measured programs")
    inputs = np.stack([feature_vector(p.features, p.peak_flops, p.bandwidth) for p in programs])
    targets = np.array([math.log(p.seconds / p.roofline_seconds) for p in programs])
    sizes = {name: sum(p.family == name for p in programs) for name in {p.family for p in programs}}
    scale = np.sqrt([len(programs) / len(sizes) / sizes[p.family] for p in programs])
    ridge = penalty * np.eye(inputs.shape[1])
    ridge[0, 0] = 1e-9
    scaled = inputs * scale[:, None]
    weights = np.linalg.solve(scaled.T @ scaled + ridge, scaled.T @ (targets * scale))
    return LearnedCost(weights, (float(targets.min()), float(targets.max())))


def held_out_predictions(
    programs: Sequence[MeasuredProgram], fit: Callable[[Sequence[MeasuredProgram]], LearnedCost] = fit_cost
) -> Iterator[tuple[MeasuredProgram, float]]:
    """Yield each program and its seconds as predicted by a model fitted without its family (cross-validation).

    Args:
      programs: programs of at least two families.
      fit: makes the correction.
    """
    for family in sorted({one.family for one in programs}):
        cost = fit([one for one in programs if one.family != family])
        for one in programs:
            if one.family == family:
                yield one, cost.predict(one.features, one.peak_flops, one.bandwidth)


def median_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return the median relative error of predictions, |predicted / measured - 1|."""
    return float(np.median(np.abs(np.asarray(predicted) / np.asarray(measured) - 1)))


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return Kendall's rank correlation: (concordant pairs - discordant pairs) / all pairs."""
    first = np.sign(np.subtract.outer(np.asarray(predicted), np.asarray(predicted)))
    second = np.sign(np.subtract.outer(np.asarray(measured), np.asarray(measured)))
    count = len(predicted)
    return float(np.sum(first * second) / (count * (count - 1)))


def read_programs(path: str | Path) -> list[MeasuredProgram]:
    """Read the measured programs that `benchmarks/learned_cost.py` wrote."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [_program(json.loads(line)) for line in lines if line.strip()]


def _program(row: Mapping[str, Any]) -> MeasuredProgram:
    features = ProgramFeatures.from_json(row["features"])
    seconds = 1e-3 * float(row["milliseconds"])
    return MeasuredProgram(row["family"], features, seconds, float(row["peak_flops"]), float(row["bandwidth"]))
