"""Features of a compiled program that predict its run time (FLOPs, bytes, ...), parsed from its HLO text."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

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
