"""`linear_cross_entropy`: a language model's head and its loss in one, without the logits in memory."""

import jax

from pallas_kernels.cross_entropy import reference, xla, xla_dense
from pallas_kernels.cross_entropy.request import make_request
from pallas_kernels.dispatch import Backend, select

BACKENDS = (
    Backend(
        "xla_dense",
        "small logits: nothing is computed twice",
        xla_dense.refuses,
        xla_dense.per_token_loss,
        xla_dense.yields,
    ),
    Backend("xla", "everything on every device, logits of one chunk only", xla.refuses, xla.per_token_loss),
    Backend(
        "reference",
        "the contract, logits in float32: only when asked for by name",
        lambda request: None,
        reference.per_token_loss,
        lambda request: "runs only when asked for by name",
    ),
)


def linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The cross-entropy of softmax(hidden @ weight) and the labels, per token.

    loss = lse - logit[label] + z_loss * lse^2 with lse the log-sum-exp over the vocabulary. The product is
    computed in the dtype of `hidden` with float32 accumulation; a float32 `weight` beside bfloat16 `hidden`
    is cast, and its gradient is accumulated and returned in float32.

    Args:
        hidden: [..., D].
        weight: [D, V].
        labels: integers [...]. A label that is neither `ignore_index` nor in 0..V-1 gives the loss nan.
        ignore_index: label of the tokens with loss 0 and no gradient.
        z_loss: factor of the squared log-sum-exp.
        soft_cap: logits become soft_cap * tanh(logit / soft_cap).
        implementation: a name of `BACKENDS`; None takes the first that fits. A named one never falls back.

    Returns:
        The loss [...] in float32 (float64 for float64 `hidden`), natural logarithm, 0 where ignored.

    Raises:
        ValueError: an argument breaks a rule; `NotSupported` (a ValueError) for an unknown implementation.
    """
    request = make_request(hidden, weight, labels, ignore_index, z_loss, soft_cap)
    return select("linear_cross_entropy", BACKENDS, implementation, request).call(request)
