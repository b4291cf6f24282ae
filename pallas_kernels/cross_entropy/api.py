"""A language model's output head and cross-entropy loss in one operation, per token or summed over the tokens."""

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.array_types import AnyArray
from pallas_kernels.cross_entropy import mosaic, reference, triton, xla, xla_dense
from pallas_kernels.cross_entropy.request import CrossEntropyRequest, Options, make_request
from pallas_kernels.dispatch import Backend, select
from pallas_kernels.target import automatic_axes

_DENSE = "fastest for small logits: nothing is recomputed"
_REFERENCE = "the definition that backends are tested against, logits in float32: only if asked for by name"


def _by_name_only(request: object) -> str:
    return "runs only if asked for by name"


def _sharded_vocabulary(request: CrossEntropyRequest) -> str | None:
    """Return why XLA is preferred to a GPU kernel: the vocabulary is, or may be, sharded. None if it is not."""
    if request.options.axis_name is not None:
        return f"the vocabulary is sharded over {request.options.axis_name!r}"
    axes = automatic_axes()
    return f"XLA may shard the vocabulary over the mesh in context ({', '.join(axes)})" if axes else None


BACKENDS = (
    Backend(
        "xla_dense", _DENSE, xla_dense.unsupported_reason, xla_dense.per_token_loss, xla_dense.lower_priority_reason
    ),
    Backend(
        "xla", "logits of one chunk at a time, recomputed in the backward", xla.unsupported_reason, xla.per_token_loss
    ),
    Backend("reference", _REFERENCE, reference.unsupported_reason, reference.per_token_loss, _by_name_only),
)
SUM_BACKENDS = (
    Backend("xla_dense", _DENSE, xla_dense.unsupported_reason, xla_dense.loss_sum, xla_dense.lower_priority_reason),
    Backend(
        "mosaic",
        "no pass over the logits: the matmul writes their exponentials",
        mosaic.unsupported_reason,
        mosaic.loss_sum,
        _sharded_vocabulary,
        opaque=True,
    ),
    Backend(
        "triton",
        "one pass less over a chunk's logits",
        triton.unsupported_reason,
        triton.loss_sum,
        _sharded_vocabulary,
        opaque=True,
    ),
    Backend(
        "xla",
        "logits of one chunk at a time, gradients in the same pass",
        xla.unsupported_reason,
        xla.loss_sum,
    ),
    Backend("reference", _REFERENCE, reference.unsupported_reason, reference.loss_sum, _by_name_only),
)


def linear_cross_entropy(
    hidden: Float[AnyArray, "*tokens D"],
    weight: Float[AnyArray, "D V"],
    labels: Int[AnyArray, "*tokens"],
    *,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    implementation: str | None = None,
    axis_name: str | None = None,
) -> Float[Array, "*tokens"]:
    """Compute each token's cross-entropy of softmax(hidden @ weight) and its label: output head and loss in one.

    loss = lse - logit[label] + z_loss * lse^2 with lse the log-sum-exp over the vocabulary. The product is computed in
    the dtype of `hidden` with float32 accumulation. A float32 `weight` with bfloat16 `hidden` is cast, and its gradient
    is accumulated and returned in float32. If only the sum of the losses is needed, `linear_cross_entropy_sum` computes
    the gradients with a quarter less work.

    Args:
        hidden: hidden states [..., D].
        weight: head [D, V].
        labels: integers [...]. A label that is neither `ignore_index` nor in 0..V-1 gives the loss nan.
        ignore_index: label of the tokens with loss 0 and no gradient.
        z_loss: factor of the squared log-sum-exp.
        soft_cap: logits become soft_cap * tanh(logit / soft_cap).
        implementation: name of a backend in `BACKENDS`; None takes the first that supports the call. A named backend
            never falls back.
        axis_name: inside `jax.shard_map`, the mesh axis over which the vocabulary is sharded evenly: `weight` is this
            device's [D, V / n]; `hidden`, `labels` (of the whole vocabulary) and the result are the same on all devices
            of the axis. JAX sums the gradient of `hidden` over the axis, as for any replicated operand: do not sum it
            again.

    Returns:
        The loss [...] in float32 (float64 for float64 `hidden`), natural logarithm, 0 for ignored tokens.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    options = Options(ignore_index, z_loss, soft_cap, axis_name)
    request = make_request(hidden, weight, labels, None, options)
    loss = select("linear_cross_entropy", BACKENDS, implementation, request).call(request)
    return loss if axis_name is None else jax.lax.psum(loss, axis_name)


def linear_cross_entropy_sum(
    hidden: Float[AnyArray, "*tokens D"],
    weight: Float[AnyArray, "D V"],
    labels: Int[AnyArray, "*tokens"],
    *,
    token_weights: Float[AnyArray, "*tokens"] | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    implementation: str | None = None,
    axis_name: str | None = None,
) -> Float[Array, ""]:
    """Compute the sum over tokens of token_weight * cross-entropy loss, from hidden states and the head's weight.

    The weight of each token's loss is known in the forward here, so both gradients are computed there, while the logits
    exist, and the backward does not recompute them: this is the form for training.

    Args:
        hidden: hidden states [..., D].
        weight: head [D, V].
        labels: integers [...]. A label that is neither `ignore_index` nor in 0..V-1 gives nan.
        token_weights: floats [...]; None weighs every token that is not ignored by 1.
        ignore_index, z_loss, soft_cap, axis_name: as in `linear_cross_entropy`.
        implementation: name of a backend in `SUM_BACKENDS`; None takes the first that supports the call. A named
            backend never falls back.

    Returns:
        The sum [] in float32 (float64 for float64 `hidden`). Its rounding error is in proportion to the sum of
        |token_weight * loss|, which exceeds the result if weights of both signs cancel.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named backend cannot compute the call (a ValueError).
    """
    options = Options(ignore_index, z_loss, soft_cap, axis_name)
    request = make_request(hidden, weight, labels, token_weights, options)
    total = select("linear_cross_entropy_sum", SUM_BACKENDS, implementation, request).call(request)
    return total if axis_name is None else jax.lax.psum(total, axis_name)
