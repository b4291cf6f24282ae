"""Operators of a model with their FLOPs and bytes of memory traffic, and their arithmetic intensity."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class OperatorCost:
    """Cost of an operation of a model, or the sum over several of one kind: FLOPs, bytes and number of calls.

    Attributes:
      name: what it computes.
      kind: "matmul", "attention", "elementwise" or "gather".
      flops: floating-point operations of one call.
      bytes: bytes that one call reads from and writes to the device's memory, each operand once.
      calls: number of calls.
    """

    name: str
    kind: str
    flops: float
    bytes: float
    calls: int = 1

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOPs per byte."""
        return self.flops / self.bytes

    def seconds(self, peak_flops: float, bandwidth: float) -> float:
        """Return the roofline time of all calls, in seconds: calls x max(flops / peak_flops, bytes / bandwidth).

        Roofline model: Williams et al. 2009.

        Args:
          peak_flops: FLOP/s of the device.
          bandwidth: bytes/s of its memory.
        """
        return self.calls * max(self.flops / peak_flops, self.bytes / bandwidth)


def total_flops(operators: Iterable[OperatorCost]) -> float:
    """Return the total FLOPs of a list of operators, over all their calls."""
    return sum(one.flops * one.calls for one in operators)


def total_bytes(operators: Iterable[OperatorCost]) -> float:
    """Return the total bytes of memory traffic of a list of operators, over all their calls."""
    return sum(one.bytes * one.calls for one in operators)


def total_intensity(operators: Iterable[OperatorCost]) -> float:
    """Return the arithmetic intensity of a list of operators taken together, in FLOPs per byte."""
    listed = list(operators)
    return total_flops(listed) / total_bytes(listed)
