"""Pieces that the XLA backends share: log-sum-exp of the logits, the tokens' loss, and the gradient of the logits.

Nothing here gathers along the vocabulary: the label's logit is a masked sum, so that a vocabulary sharded
over devices needs all-reduces of one number a token and no more.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy.request import Options
from pallas_kernels.cross_entropy.shards import axis_size, first_id, on_first_device

Statistics = tuple[jax.Array, jax.Array, jax.Array]
"""Of each token [...]: maximum of the logits, sum of exp(logit - maximum), the label's logit or 0."""
_SMALL_CAP = 40.0
"""exp(-2 * 40) is still a normal float32."""


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def capped(logits: jax.Array, options: Options) -> jax.Array:
    """Logits in the accumulator dtype, under the soft cap where there is one."""
    logits = logits.astype(accumulator_dtype(logits.dtype))
    return logits if options.soft_cap is None else options.soft_cap * jnp.tanh(logits / options.soft_cap)


def slope_of_cap(logits: jax.Array, soft_cap: float) -> jax.Array:
    """Derivative of the soft cap at the logits before it.

    Of the tanh itself: from the capped logits / soft_cap not every version of XLA finds back to it, and one that does
    not writes the capped logits to memory, in float32.
    """
    return 1.0 - jnp.square(jnp.tanh(logits.astype(accumulator_dtype(logits.dtype)) / soft_cap))


def is_label(labels: jax.Array, vocabulary: int, options: Options) -> jax.Array:
    """Boolean [..., V]: whether the entry of this device's vocabulary is the token's label."""
    labels = labels - first_id(options.axis_name, vocabulary)
    return labels[..., None] == jnp.arange(vocabulary, dtype=labels.dtype)


def log_sum_exp(logits: jax.Array, labels: jax.Array, options: Options, group: int = 1) -> tuple[jax.Array, jax.Array]:
    """Log-sum-exp over the whole vocabulary, and the label's logit where this device holds it, else 0: both [...].

    Args:
        logits: [..., V] of this device, before the soft cap.
        group: with more than 1, that many neighbours are reduced together and the logits are read once, not twice.
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
    return jnp.where(is_label(labels, logits.shape[-1], options), logits, 0.0).sum(axis=-1)


def _read_capped(logits: jax.Array, labels: jax.Array, options: Options) -> Statistics:
    """A cap bounds the logits, so that a small one takes the place of their maximum, and they are read once.

    Every logit has its tanh in one place only: XLA writes a tanh with two readers to memory, in float32.
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
    """One reduction of (maximum, sum of exponentials, label's logit), which XLA makes one kernel.

    The sum is rescaled once a group and not once a logit: exponentials would bound the speed, not memory.
    """
    vocabulary = logits.shape[-1]
    grouped = logits.reshape(*logits.shape[:-1], vocabulary // group, group)
    grouped = grouped.astype(accumulator_dtype(logits.dtype))
    members = [grouped[..., i] for i in range(group)]
    maximum = functools.reduce(jnp.maximum, members)
    total = functools.reduce(jnp.add, (jnp.exp(x - maximum) for x in members))
    here = labels - first_id(options.axis_name, vocabulary)
    place, chosen = (here % group)[..., None], members[0]
    for i in range(1, group):
        chosen = jnp.where(place == i, members[i], chosen)
    chosen = jnp.where(is_label(here // group, vocabulary // group, Options()), chosen, 0.0)

    def merge(a: Statistics, b: Statistics) -> Statistics:
        top = jnp.maximum(a[0], b[0])
        return top, a[1] * jnp.exp(a[0] - top) + b[1] * jnp.exp(b[0] - top), a[2] + b[2]

    # Not -inf: the difference of two such maxima would be nan.
    dtype = maximum.dtype
    start = (jnp.asarray(jnp.finfo(dtype).min, dtype), jnp.zeros((), dtype), jnp.zeros((), dtype))
    return jax.lax.reduce((maximum, total, chosen), start, merge, (maximum.ndim - 1,))


def loss_shares(lse: jax.Array, chosen: jax.Array, labels: jax.Array, vocabulary: int, options: Options) -> jax.Array:
    """Per-token loss [...], or this device's share of it where the vocabulary is sharded.

    nan where a label is out of range and not the ignored one.
    """
    loss = on_first_device(options.axis_name, lse + options.z_loss * jnp.square(lse)) - chosen
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
    """The gradient [..., V] of hidden @ weight, in the accumulator dtype, from the gradient d_loss [...].

    exponentials / total is the softmax. `logits` (capped) are only read where there is a soft cap; with None the
    caller multiplies by `slope_of_cap`.
    """
    d_loss = jnp.where(labels == options.ignore_index, 0.0, d_loss)
    d_lse = d_loss * (1.0 + 2.0 * options.z_loss * lse)
    label = is_label(labels, exponentials.shape[-1], options)
    gradient = exponentials * (d_lse / total)[..., None] - jnp.where(label, d_loss[..., None], 0.0)
    if options.soft_cap is not None and logits is not None:
        gradient = gradient * (1.0 - jnp.square(logits / options.soft_cap))
    return gradient
