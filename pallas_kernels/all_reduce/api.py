"""All-reduces for tensor parallelism whose latency matters more than bandwidth: a decoding step has two a layer."""

import functools

import jax
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.all_reduce import mosaic, xla
from pallas_kernels.all_reduce.request import AllReduceRequest, NormSettings, Reducer, make_request
from pallas_kernels.dispatch import Backend, select

BACKENDS = (
    Backend(
        "mosaic",
        "one kernel reads the other devices' memory, within a CUDA graph",
        mosaic.unsupported_reason,
        mosaic.KernelReducer,
        mosaic.lower_priority_reason,
        opaque=True,
    ),
    Backend("xla", "on every device and for every size", xla.unsupported_reason, xla.PlainReducer),
)


def all_reduce(x: Float[Array, "*dims"], *, axis_name: str, implementation: str | None = None) -> Float[Array, "*dims"]:
    """Sum x over the devices of a mesh axis.

    For use inside `jax.shard_map`. With the kernel all devices get equal bits: parts are added in float32 in the order
    of the devices, and rounded once.

    Args:
        x: This device's part, of the same shape on all devices.
        axis_name: Axis of the surrounding shard_map.
        implementation: Name in `BACKENDS`; None for the first that fits. A named one never falls back.

    Returns:
        The sum, in the shape and dtype of x.

    Raises:
        ValueError: An argument breaks a rule; `NotSupported` (a ValueError) for an implementation that is unknown or
            cannot compute this.
    """
    request = make_request("all_reduce", x, axis_name)
    return _add_up(select("all_reduce", BACKENDS, implementation, request).call(request), axis_name, x)


def reason_against_kernel(request: AllReduceRequest) -> str | None:
    """Return why the kernel would not be chosen by default, or None; can be called outside `shard_map`."""
    kernel = BACKENDS[0]
    return kernel.unsupported_reason(request) or kernel.lower_priority_reason(request)


def all_reduce_rms_norm(
    x: Float[Array, "*rows D"],
    residual: Float[Array, "*rows D"],
    weight: Float[Array, " D"],
    *,
    axis_name: str,
    epsilon: float = 1e-6,
    weight_offset: float = 0.0,
    implementation: str | None = None,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """Add the sum of x over a mesh axis to the residual stream, and normalize the result.

    For use inside `jax.shard_map`: `all_reduce`, an addition and `rms_norm` in one kernel, which rounds where the
    separate operations would round. It is not differentiable where the kernel computes it.

    Args:
        x: This device's part of what is added to the residual stream, [..., D].
        residual: The residual stream, [..., D] in the dtype of x, equal on all devices.
        weight: Weight of the norm, [D].
        axis_name: Axis of the surrounding shard_map.
        epsilon: Number added to the mean square.
        weight_offset: Number added to the weight.
        implementation: Name in `BACKENDS`; None for the first that fits. A named one never falls back.

    Returns:
        The normalized sum and the sum, each [..., D] in the dtype of x.

    Raises:
        ValueError: An argument breaks a rule; `NotSupported` (a ValueError) for an implementation that is unknown or
            cannot compute this.
    """
    if residual.shape != x.shape or residual.dtype != x.dtype or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"all_reduce_rms_norm takes x and residual [..., D] of one dtype and weight [D]; got {list(x.shape)} "
            f"{x.dtype}, {list(residual.shape)} {residual.dtype} and {list(weight.shape)}"
        )
    request = make_request("all_reduce_rms_norm", x, axis_name, NormSettings(epsilon, weight_offset))
    chosen = select("all_reduce_rms_norm", BACKENDS, implementation, request)
    return chosen.call(request).add_up_and_normalize(x, residual, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _add_up(reducer: Reducer, axis_name: str, x: jax.Array) -> jax.Array:
    return reducer.add_up(x)


# The derivative of a psum whose devices hold equal cotangents, as those of a `shard_map` with check_vma=False do.
_add_up.defvjp(lambda reducer, _, x: (reducer.add_up(x), None), lambda _, axis, __, d: (lax.psum(d, axis),))
