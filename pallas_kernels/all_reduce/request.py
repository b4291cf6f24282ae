"""Checked arguments of an all-reduce, and what it computes beside the sum.

Dims: R rows, D width, n devices of the axis.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from pallas_kernels.target import Target, current_target


class Reducer(Protocol):
    """Interface of a backend. It is hashable, for use as a static argument."""

    def add_up(self, x: jax.Array) -> jax.Array:
        """Return the sum of x over the devices of the axis, in the dtype of x."""
        ...

    def add_up_and_normalize(self, x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return (RMS norm of residual + sum, residual + sum), each [..., D] in the dtype of x."""
        ...


@dataclass(frozen=True)
class NormSettings:
    """Static settings of the RMS norm that follows an all-reduce.

    Attributes:
        epsilon: Number added to the mean square.
        offset: Number added to the weight.
    """

    epsilon: float
    offset: float = 0.0


@dataclass(frozen=True)
class AllReduceRequest:
    """Checked static arguments of one all-reduce: shape, dtype, mesh axis and target device.

    Attributes:
        rows: Number of rows R.
        width: Size of the last dim, D.
        devices: Number of devices of the axis, n.
        axis_name: Axis of the surrounding `jax.shard_map`.
        dtype: Dtype of the array and of its sum.
        target: Device that is lowered for.
        norm: Settings of the norm after the sum; None: the sum alone.
    """

    rows: int
    width: int
    devices: int
    axis_name: str
    dtype: Any
    target: Target
    norm: NormSettings | None = None

    def __str__(self) -> str:
        after = "" if self.norm is None else ", residual and RMS norm"
        return (
            f"{self.rows} rows of {self.width}, {self.dtype}{after}, {self.devices} devices along "
            f"{self.axis_name!r} on {self.target}"
        )


def make_request(operation: str, x: jax.Array, axis_name: str, norm: NormSettings | None = None) -> AllReduceRequest:
    """Return the request for the sum of x [..., D] over a mesh axis.

    Raises:
        ValueError: The code is not inside a `jax.shard_map` over the axis.
    """
    try:
        devices = jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"{operation} sums over the devices of an axis: call it inside jax.shard_map over the axis {axis_name!r}"
        ) from None
    width = x.shape[-1] if x.ndim else 1
    return AllReduceRequest(math.prod(x.shape[:-1]), width, devices, axis_name, x.dtype, current_target(), norm)
