"""`activated_matmul`: an activation function and the matmul after it, the second half of a feed-forward layer."""

from collections.abc import Sequence

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Backend, select
from pallas_kernels.fused_mlp import mosaic, xla
from pallas_kernels.fused_mlp.request import BiasedProduct, make_request

BACKENDS = (
    Backend(
        "mosaic",
        "matmuls compute the activation of a given product, and its gradient",
        mosaic.unsupported_reason,
        mosaic.multiply,
        mosaic.lower_priority_reason,
        opaque=True,
    ),
    Backend("xla", "an elementwise pass and a matmul, on every device", xla.unsupported_reason, xla.multiply),
)


def activated_matmul(
    inputs: Sequence[Float[Array, "*rows F"]] | BiasedProduct,
    weight: Float[Array, "F D"],
    activation: str,
    *,
    implementation: str | None = None,
) -> Float[Array, "*rows D"]:
    """Compute activation(*inputs) @ weight, differentiable in the inputs and the weight.

    With a product as the input the whole feed-forward is computed, activation(x @ first_weight + bias) @ weight.

    Args:
        inputs: arrays [..., F], as many as the activation takes, or one `BiasedProduct` for an activation of one input.
        weight: [F, D] in the dtype of the inputs.
        activation: "gelu_tanh" (one input; Hendrycks and Gimpel, arXiv:1606.08415) or "swiglu" (gate and up; Shazeer,
            arXiv:2002.05202).
        implementation: name of a backend in `BACKENDS`; None takes the first that supports the call. A named backend
            never falls back.

    Returns:
        [..., D] in the dtype of the inputs.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    request = make_request(inputs, weight, activation)
    return select("activated_matmul", BACKENDS, implementation, request).call(request)
