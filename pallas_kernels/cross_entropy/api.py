"""A language model's head and its loss in one, without the logits in memory: per token, or as a weighted sum."""

import jax

from pallas_kernels.cross_entropy import mosaic, reference, triton, xla, xla_dense
from pallas_kernels.cross_entropy.request import Options, make_request
from pallas_kernels.dispatch import Backend, select

_DENSE = "small logits: nothing is computed twice"
_REFERENCE = "the contract, logits in float32: only when asked for by name"


def _by_name_only(request: object) -> str:
    return "runs only when asked for by name"


BACKENDS = (
    Backend(
        "xla_dense", _DENSE, xla_dense.unsupported_reason, xla_dense.per_token_loss, xla_dense.lower_priority_reason
    ),
    Backend(
        "xla", "logits of one chunk only, computed again in the backward", xla.unsupported_reason, xla.per_token_loss
    ),
    Backend("reference", _REFERENCE, reference.unsupported_reason, reference.per_token_loss, _by_name_only),
)
SUM_BACKENDS = (
    Backend("xla_dense", _DENSE, xla_dense.unsupported_reason, xla_dense.loss_sum, xla_dense.lower_priority_reason),
    Backend(
        "mosaic",
        "no pass over the logits: their exponentials come from the product",
        mosaic.unsupported_reason,
        mosaic.loss_sum,
        opaque=True,
    ),
    Backend("triton", "a chunk's logits travel once less", triton.unsupported_reason, triton.loss_sum, opaque=True),
    Backend(
        "xla", "logits of one chunk only, the gradients computed beside them", xla.unsupported_reason, xla.loss_sum
    ),
    Backend("reference", _REFERENCE, reference.unsupported_reason, reference.loss_sum, _by_name_only),
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
    axis_name: str | None = None,
) -> jax.Array:
    """The cross-entropy of softmax(hidden @ weight) and the labels, per token.

    loss = lse - logit[label] + z_loss * lse^2 with lse the log-sum-exp over the vocabulary. The product is
    computed in the dtype of `hidden` with float32 accumulation; a float32 `weight` beside bfloat16 `hidden`
    is cast, and its gradient is accumulated and returned in float32. Where only the sum of the losses is wanted,
    `linear_cross_entropy_sum` needs a quarter less work for the gradients.

    Args:
        hidden: [..., D].
        weight: [D, V].
        labels: integers [...]. A label that is neither `ignore_index` nor in 0..V-1 gives the loss nan.
        ignore_index: label of the tokens with loss 0 and no gradient.
        z_loss: factor of the squared log-sum-exp.
        soft_cap: logits become soft_cap * tanh(logit / soft_cap).
        implementation: a name of `BACKENDS`; None takes the first that fits. A named one never falls back.
        axis_name: inside `jax.shard_map`, the axis along which the vocabulary lies in equal parts: `weight` is this
            device's [D, V / n], `hidden` and `labels` (of the whole vocabulary) are the same on all devices of the
            axis, and so is the result. JAX sums the gradient of `hidden` over the axis, as of any operand that
            is the same on its devices: do not sum it again.

    Returns:
        The loss [...] in float32 (float64 for float64 `hidden`), natural logarithm, 0 where ignored.

    Raises:
        ValueError: an argument breaks a rule; `NotSupported` (a ValueError) for an unknown implementation.
    """
    options = Options(ignore_index, z_loss, soft_cap, axis_name)
    request = make_request(hidden, weight, labels, None, options)
    loss = select("linear_cross_entropy", BACKENDS, implementation, request).call(request)
    return loss if axis_name is None else jax.lax.psum(loss, axis_name)


def linear_cross_entropy_sum(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    token_weights: jax.Array | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    implementation: str | None = None,
    axis_name: str | None = None,
) -> jax.Array:
    """The sum over the tokens of token_weight * loss, with the loss of `linear_cross_entropy`.

    What every token's loss is worth is known in the forward pass here, so both gradients are computed there beside the
    logits, which need not be computed again: this is the form to train with.

    Args:
        hidden: [..., D].
        weight: [D, V].
        labels: integers [...]. A label that is neither `ignore_index` nor in 0..V-1 gives nan.
        token_weights: floats [...]; None counts every token that is not ignored once.
        ignore_index, z_loss, soft_cap, axis_name: as of `linear_cross_entropy`.
        implementation: a name of `SUM_BACKENDS`; None takes the first that fits. A named one never falls back.

    Returns:
        The sum [] in float32 (float64 for float64 `hidden`). Its rounding error is in proportion to the sum of
        |token_weight * loss|, which is more than the result where weights of both signs cancel.

    Raises:
        ValueError: an argument breaks a rule; `NotSupported` (a ValueError) for an unknown implementation.
    """
    options = Options(ignore_index, z_loss, soft_cap, axis_name)
    request = make_request(hidden, weight, labels, token_weights, options)
    total = select("linear_cross_entropy_sum", SUM_BACKENDS, implementation, request).call(request)
    return total if axis_name is None else jax.lax.psum(total, axis_name)
