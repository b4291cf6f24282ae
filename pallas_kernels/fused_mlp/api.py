"""An activation and the product with it: the second half of a feed-forward."""

from collections.abc import Sequence

import jax

from pallas_kernels.dispatch import Backend, select
from pallas_kernels.fused_mlp import mosaic, xla
from pallas_kernels.fused_mlp.request import make_request

BACKENDS = (
    Backend(
        "mosaic",
        "the activation's gradient inside of the backward's product",
        mosaic.unsupported_reason,
        mosaic.multiply,
        opaque=True,
    ),
    Backend("xla", "a product and an elementwise pass, anywhere", xla.unsupported_reason, xla.multiply),
)  # fmt: skip


def activated_matmul(
    inputs: Sequence[jax.Array], weight: jax.Array, activation: str, *, implementation: str | None = None
) -> jax.Array:
    """activation(*inputs) @ weight, differentiable in both.

    Args:
        inputs: each [..., F], as many as the activation takes.
        weight: [F, D], of the dtype of the inputs.
        activation: "gelu_tanh" (one input; Hendrycks & Gimpel, arXiv:1606.08415) or "swiglu" (gate and up; Shazeer,
            arXiv:2002.05202).
        implementation: a name of `BACKENDS`; None takes the first that fits. A named one never falls back.

    Returns:
        [..., D] in the dtype of the inputs.

    Raises:
        ValueError: an argument breaks a rule; `NotSupported` (a ValueError) for an unknown implementation.
    """
    request = make_request(inputs, weight, activation)
    return select("activated_matmul", BACKENDS, implementation, request).call(request)
