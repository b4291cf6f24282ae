"""Building blocks of the XLA backends: log-sum-exp of the logits, loss per token, gradient of the logits.

Nothing here gathers over the vocabulary: the label's logit is a masked sum, so a vocabulary that is sharded over
devices needs only all-reduces of one number per token.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy.request import Options
from pallas_kernels.cross_entropy.vocabulary_shards import axis_size, first_vocabulary_id, mask_to_first_device

Statistics = tuple[jax.Array, jax.Array, jax.Array]
"""Three arrays [...], per token: maximum of the logits, sum of exp(logit - maximum), and the label's logit or 0."""
_SMALL_CAP = 40.0
"""Largest soft cap that can replace the maximum: exp(-2 * 40) is still a normal float32."""


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype to accumulate sums in: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def capped(logits: jax.Array, options: Options) -> jax.Array:
    """Apply the soft cap, if there is one, to the logits, and convert them to float32 (float64 for float64)."""
    logits = logits.astype(accumulator_dtype(logits.dtype))
    return logits if options.soft_cap is None else options.soft_cap * jnp.tanh(logits / options.soft_cap)


def soft_cap_derivative(logits: jax.Array, soft_cap: float) -> jax.Array:
    """Return the derivative of the logits' soft cap, evaluated at the uncapped logits.

    It is computed from the tanh itself: some versions of XLA do not recognise that the capped logits / soft_cap are
    that tanh, and write the capped logits to memory in float32.
    """
    return 1.0 - jnp.square(jnp.tanh(logits.astype(accumulator_dtype(logits.dtype)) / soft_cap))


def label_mask(labels: jax.Array, vocabulary: int, options: Options) -> jax.Array:
    """Return the one-hot mask of the labels, bool [..., V], over the vocabulary entries that this device holds."""
    labels = labels - first_vocabulary_id(options.axis_name, vocabulary)
    return labels[..., None] == jnp.arange(vocabulary, dtype=labels.dtype)


def log_sum_exp(logits: jax.Array, labels: jax.Array, options: Options, group: int = 1) -> tuple[jax.Array, jax.Array]:
    """Return each token's log-sum-exp over the whole vocabulary, and the logit of its label.

    The label's logit is 0 on devices whose part of the vocabulary lacks the label. Both results are [...].

    Args:
        logits: this device's logits [..., V], before the soft cap.
        labels: integers [...].
        options: soft cap and axis name.
        group: number of neighbouring logits that are reduced together; with more than 1 the logits are read once, not
            twice.
    """
    if options.soft_cap is not None:
        maximum, total, chosen = _read_capped(logits, labels, options)
    elif group > 1:
        maximum, total, chosen = _read_once(logits, labels, options, group)
    else:
        maximum, total, chosen = _read_twice(logits, labels, options)
    if options.axis_name is not None:
        highest = jax.lax.pmax(maximum, options.axis_name)
        total = jax.lax.psum(total * jnp.exp(maximum - highest), options.axis_name)
        maximum = highest
    return maximum + jnp.log(total), chosen


def _label_logit(logits: jax.Array, labels: jax.Array, options: Options) -> jax.Array:
    return jnp.where(label_mask(labels, logits.shape[-1], options), logits, 0.0).sum(axis=-1)


def _read_capped(logits: jax.Array, labels: jax.Array, options: Options) -> Statistics:
    """Return each token's maximum, sum of exponentials and label logit for capped logits, from one pass over them.

    A small cap takes the place of the maximum, which it bounds.

    Every logit's tanh has one reader only: XLA writes a tanh with two readers to memory, in float32.
    """
    raw = logits.astype(accumulator_dtype(logits.dtype))
    chosen = capped(_label_logit(raw, labels, options), options)
    if options.soft_cap is not None and options.soft_cap <= _SMALL_CAP:
        maximum = jnp.full_like(chosen, options.soft_cap)
    else:
        maximum = capped(raw.max(axis=-1), options)
    total = jnp.exp(capped(raw, options) - maximum[..., None]).sum(axis=-1)
    return maximum, total, chosen


def _read_twice(logits: jax.Array, labels: jax.Array, options: Options) -> Statistics:
    logits = logits.astype(accumulator_dtype(logits.dtype))
    maximum = logits.max(axis=-1)
    total = jnp.exp(logits - maximum[..., None]).sum(axis=-1)
    return maximum, total, _label_logit(logits, labels, options)


def _read_once(logits: jax.Array, labels: jax.Array, options: Options, group: int) -> Statistics:
    """Return each token's maximum logit, sum of exponentials and label logit, from one XLA reduction over the logits.

    The sum is rescaled once per group and not once per logit: exponentials, not memory, would limit the speed.
    """
    vocabulary = logits.shape[-1]
    grouped = logits.reshape(*logits.shape[:-1], vocabulary // group, group)
    grouped = grouped.astype(accumulator_dtype(logits.dtype))
    members = [grouped[..., i] for i in range(group)]
    maximum = functools.reduce(jnp.maximum, members)
    total = functools.reduce(jnp.add, (jnp.exp(x - maximum) for x in members))
    here = labels - first_vocabulary_id(options.axis_name, vocabulary)
    place = (here % group)[..., None]
    chosen = members[0]
    for i in range(1, group):
        chosen = jnp.where(place == i, members[i], chosen)
    chosen = jnp.where(label_mask(here // group, vocabulary // group, Options()), chosen, 0.0)

    def merge(a: Statistics, b: Statistics) -> Statistics:
        top = jnp.maximum(a[0], b[0])
        return top, a[1] * jnp.exp(a[0] - top) + b[1] * jnp.exp(b[0] - top), a[2] + b[2]

    # The smallest finite number, because the difference of two maxima of -inf would be nan.
    dtype = maximum.dtype
    start = (jnp.asarray(jnp.finfo(dtype).min, dtype), jnp.zeros((), dtype), jnp.zeros((), dtype))
    return jax.lax.reduce((maximum, total, chosen), start, merge, (maximum.ndim - 1,))


def loss_shares(lse: jax.Array, chosen: jax.Array, labels: jax.Array, vocabulary: int, options: Options) -> jax.Array:
    """Compute each token's loss [...]; if the vocabulary is sharded, this device's term of a sum over all devices.

    With a sharded vocabulary the psum over devices is the loss.

    It is nan if a label is out of range and not `ignore_index`.
    """
    loss = mask_to_first_device(options.axis_name, lse + options.z_loss * jnp.square(lse)) - chosen
    inside = (labels >= 0) & (labels < vocabulary * axis_size(options.axis_name))
    return jnp.where(labels == options.ignore_index, 0.0, jnp.where(inside, loss, jnp.nan))


def logits_gradient(
    exponentials: jax.Array,
    total: jax.Array,
    logits: jax.Array | None,
    lse: jax.Array,
    labels: jax.Array,
    d_loss: jax.Array,
    options: Options,
) -> jax.Array:
    """Return the gradient [..., V] of the logits, in float32 or float64, from the losses' gradient d_loss [...].

    exponentials / total is the softmax. `logits` (capped) are only read with a soft cap; if None, the caller multiplies
    the result by `soft_cap_derivative`.
    """
    d_loss = jnp.where(labels == options.ignore_index, 0.0, d_loss)
    d_lse = d_loss * (1.0 + 2.0 * options.z_loss * lse)
    label = label_mask(labels, exponentials.shape[-1], options)
    gradient = exponentials * (d_lse / total)[..., None] - jnp.where(label, d_loss[..., None], 0.0)
    if options.soft_cap is not None and logits is not None:
        gradient = gradient * (1.0 - jnp.square(logits / options.soft_cap))
    return gradient
