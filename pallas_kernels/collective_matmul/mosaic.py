"""Backend for Hopper GPUs: kernels that send and receive over NVLink while they multiply.

jax 0.11 needs for that all devices of the mesh on one host (devices then read each other's addresses from a table that
XLA fills in), peer access between them, and devices in row-major order in the mesh (jax says so itself while lowering);
otherwise the backend is refused. For devices of several processes XLA allocates the kernels' arrays in memory that NCCL
2.29 maps into all of them; arguments of the program are copied there first. Collective operations may run at the same
time as the kernels, see `hopper.scheduler`.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.collective_matmul import mosaic_gather, mosaic_scatter
from pallas_kernels.collective_matmul.mosaic_product import CollectiveProduct, CollectiveTiling
from pallas_kernels.collective_matmul.request import CollectiveRequest
from pallas_kernels.hopper.peers import unmeasured_peers, unsupported_peers
from pallas_kernels.hopper.target import unsupported_target
from pallas_kernels.target import multiprocessors

_ROWS = 128
_COLUMNS = (256, 128)
_LEAST_TILES = 3
"""Fewest tiles for each multiprocessor."""
# Tests set this to run the kernels on a CPU, on one device.
INTERPRET = False


@dataclass(frozen=True)
class OverlappedMultiplier:
    """Collective matmuls by Hopper kernels that send and receive over NVLink while they multiply.

    Attributes:
        gather: Fields of the all-gather kernel's `CollectiveTiling` that differ from the default, as pairs.
        scatter: Those of the reduce-scatter kernel.
    """

    gather: tuple[tuple[str, Any], ...] = field(default=())
    scatter: tuple[tuple[str, Any], ...] = field(default=())

    def gather_multiply(
        self, x: jax.Array, weights: tuple[jax.Array, ...], axis_name: str, transposed: bool
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Multiply the rows of x with each weight, as the rows arrive from the other devices."""
        columns = tuple(w.shape[0 if transposed else 1] for w in weights)
        # The warp that sends needs separate shared memory.
        tiling = _tiling(columns, {"store_columns": 32, **dict(self.gather)})
        product = _product(x.shape[0], (x.shape[1],), columns, axis_name, transposed, tiling)
        return mosaic_gather.gather_multiply(product, x, weights)

    def multiply_scatter(
        self, xs: tuple[jax.Array, ...], weights: tuple[jax.Array, ...], axis_name: str, transposed: bool
    ) -> jax.Array:
        """Multiply x with w, and send each device its rows of the result as soon as they are computed."""
        columns = (weights[0].shape[0 if transposed else 1],)
        tiling = _tiling(columns, {"store_columns": 64, **dict(self.scatter)})
        rows = xs[0].shape[0] // jax.lax.axis_size(axis_name)
        product = _product(rows, tuple(x.shape[1] for x in xs), columns, axis_name, transposed, tiling)
        return mosaic_scatter.multiply_scatter(product, xs, weights)


def unsupported_reason(request: CollectiveRequest) -> str | None:
    """Return the first reason why the Hopper kernels cannot compute this collective matmul, or None if they can."""
    return (
        unsupported_target(request.target, INTERPRET)
        or unsupported_peers(request.target, request.devices)
        or _unsupported_shapes(request)
    )


def _unsupported_shapes(request: CollectiveRequest) -> str | None:
    if request.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {request.dtype}"
    if request.rows % _ROWS:
        return f"the rows of one device must be a multiple of {_ROWS}, got {request.rows}"
    least = _COLUMNS[-1]
    if any(size % least for size in (request.width, *request.inner)):
        return f"D and F/n must be multiples of {least}, got {request.width} and {_listed(request.inner)}"
    return None


def lower_priority_reason(request: CollectiveRequest) -> str | None:
    """Return why the matmul is too small to hide its communication, so that XLA is preferred; or None."""
    if request.devices == 1:
        return "on one device there is nothing to send"
    if reason := unmeasured_peers(request.target):
        return reason
    # One kernel's tiles cover F/n columns, the other's D: the backward of each is the other.
    rows = request.rows * request.devices
    columns = min(sum(request.inner), request.width)
    tiles = rows * columns // (_ROWS * _COLUMNS[0])
    least = _LEAST_TILES * multiprocessors()
    if tiles < least:
        return (
            f"{rows} rows x {columns} columns are {tiles} tiles of {_ROWS} x {_COLUMNS[0]}: too little to work on "
            f"while rows travel, below {least}"
        )
    return None


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))


def multiplier(request: CollectiveRequest) -> OverlappedMultiplier:
    """Return the object that computes collective matmuls by the Hopper kernels, with their default block sizes."""
    del request
    return OverlappedMultiplier()


def _tiling(columns: tuple[int, ...], fields: dict[str, Any]) -> CollectiveTiling:
    fitting = next(width for width in _COLUMNS if all(size % width == 0 for size in columns))
    return CollectiveTiling(**{"columns": fitting, **fields})


def _product(
    rows: int,
    depths: tuple[int, ...],
    columns: tuple[int, ...],
    axis_name: str,
    transposed: bool,
    tiling: CollectiveTiling,
) -> CollectiveProduct:
    devices = jax.lax.axis_size(axis_name)
    programs = 2 if INTERPRET else multiprocessors()
    return CollectiveProduct(rows, depths, columns, devices, transposed, tiling, programs, INTERPRET, axis_name)
