"""Matrix products of tensor parallelism with their communication inside: gather the rows first, or scatter the sums."""

from collections.abc import Sequence
from typing import Any, overload

import jax

from pallas_kernels.collective_matmul import gradients, mosaic, xla
from pallas_kernels.collective_matmul.request import Request, make_request
from pallas_kernels.dispatch import Backend, select

BACKENDS = (
    Backend(
        "mosaic",
        "rows and sums travel while the tensor cores work",
        mosaic.unsupported_reason,
        mosaic.multiplier,
        mosaic.lower_priority_reason,
        opaque=True,
    ),
    Backend("xla", "one after the other, on every device and for every shape", xla.unsupported_reason, xla.multiplier),
)


@overload
def all_gather_matmul(
    x: jax.Array, w: jax.Array, *, axis_name: str, implementation: str | None = None
) -> jax.Array: ...


@overload
def all_gather_matmul(
    x: jax.Array, w: Sequence[jax.Array], *, axis_name: str, implementation: str | None = None
) -> tuple[jax.Array, ...]: ...


def all_gather_matmul(
    x: jax.Array, w: jax.Array | Sequence[jax.Array], *, axis_name: str, implementation: str | None = None
) -> jax.Array | tuple[jax.Array, ...]:
    """All rows of x, of all devices of the axis, times this device's columns of w. Inside `jax.shard_map`.

    Its gradient for x is a product and a reduce-scatter; the gathered rows are kept for the gradient of w, unless a
    `jax.checkpoint` around has them gathered again. bfloat16 is multiplied with float32 accumulation.

    Args:
        x: [T/n, D], this device's rows.
        w: [D, F/n], this device's columns, in x's dtype; or several such, for which the rows are gathered once.
        axis_name: the axis of the surrounding shard_map with n devices.
        implementation: a name of `BACKENDS`; None takes the first that fits. A named one never falls back.

    Returns:
        [T, F/n] in x's dtype, the rows in the order of the devices; a tuple of them for several w.

    Raises:
        ValueError: an argument breaks a rule; `NotSupported` (a ValueError) for an implementation that is unknown or
            cannot compute this.
    """
    single = hasattr(w, "shape")
    weights: tuple[Any, ...] = (w,) if single else tuple(w)
    request = make_request("all_gather_matmul", x, weights, axis_name)
    multiplier = select("all_gather_matmul", BACKENDS, implementation, request).call(request)
    outs: Any = gradients.gather_multiply(multiplier, axis_name, x, weights)
    return outs[0] if single else outs


def matmul_reduce_scatter(
    x: jax.Array, w: jax.Array, *, axis_name: str, implementation: str | None = None
) -> jax.Array:
    """The sum over the devices of the axis of x @ w, of which each gets its rows. Inside `jax.shard_map`.

    Partial sums travel in x's dtype. Its gradient for x is a gather and a product, and the rows gathered there also
    give the gradient of w.

    Args:
        x: [T, F/n], this device's columns.
        w: [F/n, D], this device's rows, in x's dtype.
        axis_name: the axis of the surrounding shard_map with n devices, of which T is a multiple.
        implementation: a name of `BACKENDS`; None takes the first that fits. A named one never falls back.

    Returns:
        [T/n, D] in x's dtype.

    Raises:
        ValueError: an argument breaks a rule; `NotSupported` (a ValueError) for an implementation that is unknown or
            cannot compute this.
    """
    request = make_request("matmul_reduce_scatter", x, (w,), axis_name)
    multiplier = select("matmul_reduce_scatter", BACKENDS, implementation, request).call(request)
    return gradients.multiply_scatter(multiplier, axis_name, x, w)


def reason_against_kernels(request: Request) -> str | None:
    """Why the automatic choice would not take our kernels, if so; for one who has to choose around the `shard_map`."""
    kernels = BACKENDS[0]
    return kernels.unsupported_reason(request) or kernels.lower_priority_reason(request)
