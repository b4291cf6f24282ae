"""Matmuls for tensor parallelism that overlap with the all-gather of their input or reduce-scatter of their result."""

from collections.abc import Sequence
from typing import Any, overload

import jax
from jaxtyping import Array, Float

from pallas_kernels.collective_matmul import gradients, mosaic, xla
from pallas_kernels.collective_matmul.request import CollectiveRequest, make_request
from pallas_kernels.dispatch import Backend, select

BACKENDS = (
    Backend(
        "mosaic",
        "communication overlaps with the product",
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
    x: Float[Array, "T D"], w: jax.Array | Sequence[jax.Array], *, axis_name: str, implementation: str | None = None
) -> jax.Array | tuple[jax.Array, ...]:
    """Gather the rows of x from all devices of a mesh axis and multiply them with this device's columns of w.

    For use inside `jax.shard_map`. The gradient for x is a product and a reduce-scatter; the gathered rows are saved
    for the gradient of w, unless a surrounding `jax.checkpoint` gathers them again. bfloat16 is multiplied with float32
    accumulation.

    Args:
        x: This device's rows, [T/n, D].
        w: This device's columns, [D, F/n] in the dtype of x; or several such, for which the rows are gathered once.
        axis_name: Axis of the surrounding shard_map, with n devices.
        implementation: Name in `BACKENDS`; None for the first that fits. A named one never falls back.

    Returns:
        [T, F/n] in the dtype of x, the rows in the order of the devices; a tuple of them for several w.

    Raises:
        ValueError: An argument breaks a rule; `NotSupported` (a ValueError) for an implementation that is unknown or
            cannot compute this.
    """
    single = hasattr(w, "shape")
    weights: tuple[Any, ...] = (w,) if single else tuple(w)
    request = make_request("all_gather_matmul", x, weights, axis_name)
    multiplier = select("all_gather_matmul", BACKENDS, implementation, request).call(request)
    outs: Any = gradients.gather_multiply(multiplier, axis_name, x, weights)
    return outs[0] if single else outs


def matmul_reduce_scatter(
    x: Float[Array, "T F"], w: Float[Array, "F D"], *, axis_name: str, implementation: str | None = None
) -> Float[Array, "T_local D"]:
    """Sum x @ w over the devices of a mesh axis and scatter the rows of the sum among them.

    For use inside `jax.shard_map`. Partial sums travel in the dtype of x. The gradient for x is an all-gather and a
    product, and the rows gathered there also give the gradient of w.

    Args:
        x: This device's columns, [T, F/n].
        w: This device's rows, [F/n, D] in the dtype of x.
        axis_name: Axis of the surrounding shard_map, with n devices; T must be a multiple of n.
        implementation: Name in `BACKENDS`; None for the first that fits. A named one never falls back.

    Returns:
        This device's rows of the sum, [T/n, D] in the dtype of x.

    Raises:
        ValueError: An argument breaks a rule; `NotSupported` (a ValueError) for an implementation that is unknown or
            cannot compute this.
    """
    request = make_request("matmul_reduce_scatter", x, (w,), axis_name)
    multiplier = select("matmul_reduce_scatter", BACKENDS, implementation, request).call(request)
    return gradients.multiply_scatter(multiplier, axis_name, x, w)


def reason_against_kernels(request: CollectiveRequest, *, support_only: bool = False) -> str | None:
    """Return why the Hopper kernels would not be chosen by default, or None; can be called outside `shard_map`.

    Args:
        request: The checked arguments of a call.
        support_only: Leave out why another backend is faster.
    """
    kernels = BACKENDS[0]
    return kernels.unsupported_reason(request) or (None if support_only else kernels.lower_priority_reason(request))
