"""Checked arguments of a matmul with all-gather or reduce-scatter.

Dims: D the width that every device has in full, F the one that the axis splits, T the rows of all devices of the axis,
n their number.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import jax

from pallas_kernels.target import Target, current_target


class Multiplier(Protocol):
    """Interface of a collective-matmul backend: all-gather then matmul, and matmul then reduce-scatter.

    The backward of each uses the other. It is hashable, for use as a static argument.
    """

    def gather_multiply(
        self, x: jax.Array, weights: tuple[jax.Array, ...], axis_name: str, transposed: bool
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Gather x from all devices and return x @ w [T, columns] for each w, and the gathered x [T, depth].

        Args:
            x: This device's rows, [T/n, depth].
            weights: Each [depth, columns], or [columns, depth] if `transposed`.
            axis_name: Axis of the surrounding shard_map.
            transposed: True if the weights are given transposed.
        """
        ...

    def multiply_scatter(
        self, xs: tuple[jax.Array, ...], weights: tuple[jax.Array, ...], axis_name: str, transposed: bool
    ) -> jax.Array:
        """Return this device's rows [T/n, columns] of the sum of x @ w over all devices and all pairs (x, w).

        Args:
            xs: Each [T, depth].
            weights: For each x, [depth, columns], or [columns, depth] if `transposed`.
            axis_name: Axis of the surrounding shard_map.
            transposed: True if the weights are given transposed.
        """
        ...


@dataclass(frozen=True)
class CollectiveRequest:
    """Checked static arguments of one collective matmul: shapes, dtype, mesh axis and target device.

    Attributes:
        rows: Rows of one device, T/n.
        width: D.
        inner: F/n of one device, for each weight.
        devices: Number of devices of the axis, n.
        axis_name: Axis of the surrounding `jax.shard_map`.
        dtype: Dtype of both operands.
        target: Device that is lowered for.
    """

    rows: int
    width: int
    inner: tuple[int, ...]
    devices: int
    axis_name: str
    dtype: Any
    target: Target

    def __str__(self) -> str:
        return (
            f"{self.rows} rows a device, D {self.width}, F/n {', '.join(map(str, self.inner))}, {self.dtype}, "
            f"{self.devices} devices along {self.axis_name!r} on {self.target}"
        )


def make_request(operation: str, x: jax.Array, weights: tuple[jax.Array, ...], axis_name: str) -> CollectiveRequest:
    """Check the arguments of a matmul with all-gather or reduce-scatter, and return them in one object.

    Raises:
        ValueError: A rule is broken; the message names it, the values and the way out.
    """
    gathers = operation == "all_gather_matmul"
    for w in weights:
        given = f"got x {list(x.shape)} {x.dtype} and w {list(w.shape)} {w.dtype}"
        if x.ndim != 2 or w.ndim != 2:
            raise ValueError(
                f"{operation} takes x [rows, depth] and w [depth, columns]; {given}: reshape x to its rows"
            )
        if x.shape[1] != w.shape[0]:
            raise ValueError(f"{operation}: x's columns must be as many as w's rows; {given}")
        if x.dtype != w.dtype:
            raise ValueError(f"{operation}: x and w must have one dtype; {given}: cast the weight first")
    if not weights:
        raise ValueError(f"{operation} got no weight: give w, or a sequence of at least one")
    try:
        devices = jax.lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"{operation} works on each device's part: call it inside jax.shard_map over the axis {axis_name!r}"
        ) from None
    if not gathers and x.shape[0] % devices:
        raise ValueError(f"{operation}: the {x.shape[0]} rows of x must be divisible by the axis' {devices} devices")
    rows = x.shape[0] if gathers else x.shape[0] // devices
    width = weights[0].shape[0 if gathers else 1]
    inner = tuple(w.shape[1 if gathers else 0] for w in weights)
    return CollectiveRequest(rows, width, inner, devices, axis_name, x.dtype, current_target())
