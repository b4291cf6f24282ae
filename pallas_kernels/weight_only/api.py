"""`packed_matmul`: product of activations and a weight that is stored in few bits."""

import functools
import math
import warnings
from collections.abc import Mapping, Sequence

import jax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Backend, select
from pallas_kernels.target import current_target
from pallas_kernels.weight_only import mosaic, triton, widened, xla
from pallas_kernels.weight_only.formats import RoundedInputFloat8Format, RoundedInputFormat
from pallas_kernels.weight_only.packed import PackedWeight
from pallas_kernels.weight_only.request import PackedMatmulRequest, make_request

BACKENDS = (
    Backend(
        "triton",
        "reads the weight at the speed of the memory; for few rows",
        triton.unsupported_reason,
        triton.multiply,
        opaque=True,
    ),
    Backend(
        "mosaic",
        "converts the weight on its way to the tensor cores; for many rows, by name only until it has run on a GPU",
        mosaic.unsupported_reason,
        mosaic.multiply,
        lower_priority_reason=mosaic.lower_priority_reason,
        opaque=True,
    ),
    Backend(
        "widened",
        "writes the weight in the dtype of x at the speed of the memory; for many rows",
        widened.unsupported_reason,
        widened.multiply,
        lower_priority_reason=widened.lower_priority_reason,
        opaque=True,
    ),
    Backend("xla", "reads the weight as stored on GPUs; on every device", xla.unsupported_reason, xla.multiply),
)


def packed_matmul(
    x: Float[Array, "..."],
    weight: PackedWeight,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "..."]:
    """Multiply x [..., inputs] with a weight [inputs, outputs] that is stored in few bits, summed in float32.

    The weight is converted to the dtype of x where it is multiplied. On a GPU, jit the caller with the compiler options
    `pallas_kernels.weight_only.xla.COMPILER_OPTIONS`, so that it is read as stored.

    Args:
        x: activations, whose last dims are `weight.inputs`.
        weight: the packed weight.
        out_dtype: dtype of the result; default: that of x.
        implementation: name of a backend in `BACKENDS`; None takes the first that supports the call.

    Returns:
        y, the leading dims of x and `weight.outputs`.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    request, rows = make_request(x, weight, out_dtype)
    chosen = select("packed_matmul", BACKENDS, implementation, request)
    if implementation is None and chosen.name == "xla" and (reason := triton.fallback_reason(request)):
        _tell_fallback(reason)
    y = chosen.call(request)
    return y.reshape(*rows, *weight.outputs)


def most_kernel_rows(weight: PackedWeight) -> float:
    """Return the most rows that a kernel multiplies with a part of a weight; 0 if none takes parts.

    On several devices, products of so many rows are best called inside `jax.shard_map`, for each device's part of the
    weight: XLA cannot partition kernels. W8A8 rounds the inputs with one scale for all parts, so it has no parts.
    """
    if widened.unsupported_format(weight) is None:
        return math.inf
    has_parts = not isinstance(weight.format, RoundedInputFormat) and triton.unsupported_format(weight) is None
    return triton.most_rows(weight) if has_parts else 0


def many_row_options(
    weights: Sequence[PackedWeight], dtype: jax.typing.DTypeLike, *, partitioned: bool
) -> Mapping[str, bool]:
    """Return XLA's options, beside those of `xla.COMPILER_OPTIONS`, for a GPU program whose products have many rows.

    Where all weights are FP8 and the inputs of many rows are rounded to FP8, cuBLASLt multiplies FP8 by FP8. Triton's
    matmuls, which would take these products, are then not needed to read weights as stored.

    Args:
      weights: all packed weights of the program.
      dtype: dtype of the activations.
      partitioned: True if XLA partitions the products of many rows over several devices.
    """
    only_float8 = bool(weights) and not partitioned and all(_is_read_as_stored(weight, dtype) for weight in weights)
    return xla.FLOAT8_OPTIONS if only_float8 else {}


def _is_read_as_stored(weight: PackedWeight, dtype: jax.typing.DTypeLike) -> bool:
    """Return True if XLA multiplies with a weight in FP8 only, as the Triton kernel takes the products of few rows."""
    if not isinstance(weight.format, RoundedInputFloat8Format):
        return False
    x = jax.ShapeDtypeStruct((1, math.prod(weight.inputs)), dtype)
    request = PackedMatmulRequest(x, weight, dtype, current_target())  # type: ignore[arg-type]
    return triton.unsupported_reason(request) is None


@functools.cache
def _tell_fallback(reason: str) -> None:
    """Warn, once for each reason, that a GPU computes products with packed weights without their kernel."""
    warnings.warn(
        f"packed_matmul: XLA computes products with packed weights of up to 4 bits ({reason}), at 0.4 to 0.65 of the "
        "speed of bfloat16 weights on an H200",
        stacklevel=3,
    )
