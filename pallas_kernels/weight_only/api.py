"""`packed_matmul`: product of activations and a weight that is stored in few bits."""

import jax
from jaxtyping import Array, Float

from pallas_kernels.dispatch import Backend, select
from pallas_kernels.weight_only import triton, xla
from pallas_kernels.weight_only.packed import PackedWeight
from pallas_kernels.weight_only.request import make_request

BACKENDS = (
    Backend(
        "triton",
        "reads the weight at the speed of the memory; for few rows",
        triton.unsupported_reason,
        triton.multiply,
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
    y = select("packed_matmul", BACKENDS, implementation, request).call(request)
    return y.reshape(*rows, *weight.outputs)
