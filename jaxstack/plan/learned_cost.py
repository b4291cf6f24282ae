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
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxstack.errors import ConfigError
from jaxstack.observe.collectives import KINDS, collectives
from jaxstack.observe.hlo import Execution, Module, parse_module

_NO_KERNEL = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "iota"),
    *("after-all", "partition-id", "replica-id", "opt-barrier"),
}
_TRANSCENDENTAL = {"exponential", "tanh", "log", "logistic", "power", "erf", "sine", "cosine", "rsqrt", "sqrt"}
_MATMUL_CALL = re.compile(r"matmul|gemm", re.IGNORECASE)
SMALL = 64
LARGE = 512
"""Bounds of the smallest dim of a matmul: below the first it is small, from the second on large."""


@dataclasses.dataclass(frozen=True)
class ProgramFeatures:
    """Features of a compiled program that predict its run time: the FLOPs, bytes and kernels of one run on one device.

    Attributes:
      dot_flops: FLOPs of matmuls by the size of their smallest dim: "small", "middle", "large".
      kernel_bytes: bytes that all kernels read and write, each operand once.
      collective_bytes: bytes that the device sends, by kind of collective.
      transcendentals: number of values of exponentials, logarithms and the like.
      kernels: number of kernels.
      trips: number of iterations of all loops.
      largest_bytes: bytes of the kernel that moves most.
      work: (matmul FLOPs, bytes) of each kernel, for the roofline, and how often it runs.
    """

    dot_flops: Mapping[str, float]
    kernel_bytes: float
    collective_bytes: Mapping[str, float]
    transcendentals: float
    kernels: int
    trips: int
    largest_bytes: float
    work: tuple[tuple[float, float, int], ...]

    def roofline_seconds(self, peak_flops: float, bandwidth: float) -> float:
        """Return the roofline time of a run, in seconds: the sum over its kernels of max(compute time, memory time).

        Args:
          peak_flops: FLOP/s of the device.
          bandwidth: bytes/s of its memory.
        """
        times = (calls * max(flops / peak_flops, size / bandwidth) for flops, size, calls in self.work)
        return max(sum(times), 1e-9)

    def to_json(self) -> dict[str, Any]:
        """Return the program's FLOPs, bytes and other features as plain JSON, which `from_json` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ProgramFeatures":
        """Return the ProgramFeatures that `to_json` converted to this JSON value."""
        work = tuple((float(flops), float(size), int(calls)) for flops, size, calls in value["work"])
        return cls(**{**value, "work": work})


def parse_program_features(text: str | Module) -> ProgramFeatures:
    """Return FLOPs, bytes, collectives and kernel counts of a compiled program, read from its HLO text.

    Args:
      text: `compiled.as_text()`, or the result of `parse_module`. Matmuls that the compiler made calls of a library are
        counted from the shapes of their operands; other custom calls have bytes only.

    Raises:
      ValueError: the text is not that of an XLA module.
    """
    module = parse_module(text) if isinstance(text, str) else text
    flops = _by_size(0.0, 0)
    transcendentals = 0.0
    trips = 0
    inside: dict[str, float] = {}  # FLOPs of matmuls inside a fusion, by its name
    for one in module.executions:
        opcode = one.instruction.opcode
        if opcode in _TRANSCENDENTAL:
            transcendentals += one.calls * sum(math.prod(array.dims) for array in one.instruction.arrays)
        if opcode == "while":
            trips += one.calls * (one.instruction.trip_count or 1)
        if found := _matmul(one):
            count, smallest = found
            for size, value in _by_size(one.calls * count, smallest).items():
                flops[size] += value
            if one.wrapper is not None:
                inside[one.wrapper.name] = inside.get(one.wrapper.name, 0.0) + count
    work = _kernels(module, inside)
    sent = dict.fromkeys(KINDS, 0.0)
    for collective in collectives(module):
        sent[collective.kind] += float(collective.wire_bytes * collective.calls)
    return ProgramFeatures(
        dot_flops=flops,
        kernel_bytes=sum(size * calls for _, size, calls in work),
        collective_bytes={kind: size for kind, size in sent.items() if size},
        transcendentals=transcendentals,
        kernels=sum(calls for *_, calls in work),
        trips=trips,
        largest_bytes=max((size for _, size, _ in work), default=0.0),
        work=_merge(work),
    )


def matmul_features(rows: int, summed: int, columns: int, itemsize: float) -> ProgramFeatures:
    """Return the run-time features (FLOPs, bytes moved, ...) of a single matmul, computed from its shape.

    Args:
      rows: rows of the first matrix.
      summed: the dim that is summed over.
      columns: columns of the second matrix.
      itemsize: bytes of each value read; results are written in two bytes.
    """
    flops = 2.0 * rows * summed * columns
    size = itemsize * summed * (rows + columns) + 2.0 * rows * columns
    return ProgramFeatures(_by_size(flops, min(rows, summed, columns)), size, {}, 0.0, 1, 0, size, ((flops, size, 1),))


def _by_size(flops: float, smallest: int) -> dict[str, float]:
    """Return a matmul's FLOPs keyed by the class of its smallest dim: small, middle or large."""
    name = "small" if smallest < SMALL else "middle" if smallest < LARGE else "large"
    return {"small": 0.0, "middle": 0.0, "large": 0.0} | {name: flops}


def _kernels(module: Module, inside: Mapping[str, float]) -> list[tuple[float, float, int]]:
    """Return (FLOPs of matmuls, bytes, calls) of each kernel of a compiled program.

    Args:
      module: the program.
      inside: FLOPs of the matmuls inside a fusion, by the fusion's name.
    """
    work = []
    for one in module.executions:
        if one.wrapper is not None or one.instruction.opcode in _NO_KERNEL:
            continue
        found = _matmul(one)
        count = found[0] if found else inside.get(one.instruction.name, 0.0)
        work.append((count, float(_bytes(one)), one.calls))
    return work


def _merge(work: list[tuple[float, float, int]]) -> tuple[tuple[float, float, int], ...]:
    """Merge kernels of the same FLOPs and bytes by adding up their calls."""
    calls: dict[tuple[float, float], int] = {}
    for flops, size, number in work:
        calls[flops, size] = calls.get((flops, size), 0) + number
    return tuple((*kernel, number) for kernel, number in calls.items())


def _bytes(one: Execution) -> int:
    """Return the bytes that a kernel reads and writes; of sliced or gathered arrays only the part that is read."""
    results = sum(array.bytes for array in one.instruction.arrays)
    if one.instruction.opcode in ("dynamic-slice", "gather", "slice"):
        return 2 * results
    if one.instruction.opcode == "dynamic-update-slice":
        return 2 * one.operand_arrays[1].bytes if len(one.operand_arrays) > 1 else results
    return results + sum(array.bytes for array in one.operand_arrays)


def _matmul(one: Execution) -> tuple[float, int] | None:
    """Return (FLOPs, smallest dim) of an instruction if it is a matmul, else None."""
    instruction = one.instruction
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    called = instruction.opcode == "custom-call" and target is not None and _MATMUL_CALL.search(target[1])
    if instruction.opcode not in ("dot", "convolution") and not called:
        return None
    operands = one.operand_arrays
    if len(operands) < 2 or not instruction.arrays:
        return None
    left = operands[0].dims
    right = operands[1].dims
    out = instruction.arrays[0].dims
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    batched = re.search(r"lhs_batch_dims=\{([\d,]*)\}", instruction.attributes)
    if instruction.opcode == "convolution":
        summed = math.prod(right) / max(out[-1], 1)  # window x input channels, with the channels last
        return 2 * math.prod(out) * summed, int(min(summed, out[-1]))
    batch = math.prod(left[int(i)] for i in batched[1].split(",") if i) if batched else 1
    if contracted:
        summed = math.prod(left[int(i)] for i in contracted[1].split(",") if i)
    else:
        summed = math.isqrt(max(1, math.prod(left) * math.prod(right) // max(math.prod(out), 1) // batch))
    rows = math.prod(left) // max(batch * summed, 1)
    columns = math.prod(right) // max(batch * summed, 1)
    return 2.0 * math.prod(out) * summed, min(rows, columns, summed)


_DISPATCH_SECONDS = 3e-5
_KERNEL_SECONDS = 3e-6
_TRIP_SECONDS = 1e-5
"""Rough times to start a program, a kernel, and an iteration of a loop; the fit scales them."""


@dataclasses.dataclass(frozen=True)
class MeasuredProgram:
    """Measured run time of a compiled program on a device, and the features that predict it (FLOPs, bytes, ...).

    Attributes:
      family: kind of program; programs of one family are similar, so it is never split between training and test.
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
                f"{path} is no learned cost model ({error}); make one with python benchmarks/planning/learned_cost.py"
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


def read_programs(path: str | Path, device: str | None = None) -> list[MeasuredProgram]:
    """Read the measured programs that `benchmarks/planning/learned_cost.py` wrote.

    Args:
      path: the benchmark's rows.
      device: kind of device of the programs, such as `NVIDIA H200` or `cpu`; default: all.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    return [program_of(row) for row in rows if device in (None, row["device"])]


def program_of(row: Mapping[str, Any]) -> MeasuredProgram:
    """Return the measured program of a row that `benchmarks/planning/learned_cost.py` wrote."""
    features = ProgramFeatures.from_json(row["features"])
    seconds = 1e-3 * float(row["milliseconds"])
    return MeasuredProgram(row["family"], features, seconds, float(row["peak_flops"]), float(row["bandwidth"]))
