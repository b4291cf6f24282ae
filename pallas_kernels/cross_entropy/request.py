"""Checked arguments of a call that computes a language model's head and loss.

Dims: D model, V vocabulary (of this device, if an axis name shards it). The leading dims of `hidden` are those of
`labels`.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import AnyArray
from pallas_kernels.cross_entropy.vocabulary_shards import axis_size, match_varying_axes
from pallas_kernels.target import Target, current_target


@dataclass(frozen=True)
class Options:
    """Static arguments (hashable, not differentiated) of a cross-entropy call: z-loss, soft cap and the like.

    Attributes:
        ignore_index: a label whose token has loss 0 and no gradient.
        z_loss: factor of the squared log-sum-exp that is added to the loss (PaLM, arXiv:2204.02311).
        soft_cap: logits become soft_cap * tanh(logit / soft_cap); None for no cap.
        axis_name: axis of a surrounding shard_map over which the vocabulary is sharded; None if it is not sharded.
    """

    ignore_index: int = -100
    z_loss: float = 0.0
    soft_cap: float | None = None
    axis_name: str | None = None


@dataclass(frozen=True)
class CrossEntropyRequest:
    """Checked arguments of one call that computes a language model's head and cross-entropy.

    Attributes:
        hidden: [..., D].
        weight: [D, V].
        labels: int32 [...].
        token_weights: floats [...], or None if every token has the weight 1.
        options: the static arguments.
        target: the device that the call is lowered for.
    """

    hidden: jax.Array
    weight: jax.Array
    labels: jax.Array
    token_weights: jax.Array | None
    options: Options
    target: Target

    @property
    def logit_count(self) -> int:
        """Number of logits of all tokens: tokens times vocabulary entries."""
        return math.prod(self.hidden.shape[:-1]) * self.weight.shape[1]

    def __str__(self) -> str:
        along = f" along {self.options.axis_name!r}" if self.options.axis_name else ""
        return (
            f"hidden {list(self.hidden.shape)} {self.hidden.dtype.name} weight {list(self.weight.shape)} "
            f"{self.weight.dtype.name}{along} on {self.target}"
        )


def make_request(
    hidden: AnyArray,
    weight: AnyArray,
    labels: AnyArray,
    token_weights: AnyArray | None,
    options: Options,
) -> CrossEntropyRequest:
    """Check the arguments of a call that computes head and cross-entropy, and return them in one object.

    Raises:
        ValueError: an argument breaks a rule; the message gives the rule, the values and the way out.
    """
    hidden = jnp.asarray(hidden)
    weight = jnp.asarray(weight)
    labels = jnp.asarray(labels)
    shapes = f"got hidden {list(hidden.shape)}, weight {list(weight.shape)}, labels {list(labels.shape)}"
    if hidden.ndim < 1 or weight.ndim != 2:
        raise ValueError(f"hidden must be [..., D] and weight [D, V]; {shapes}")
    if hidden.shape[-1] != weight.shape[0]:
        way_out = "; transpose the weight" if hidden.shape[-1] == weight.shape[1] else ""
        raise ValueError(f"hidden [..., D] and weight [D, V] must have the same D; {shapes}{way_out}")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels must have the shape of hidden without its last dim; {shapes}")
    if 0 in weight.shape:
        raise ValueError(f"neither D nor V may be 0; {shapes}")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels must be integers, got {labels.dtype}")
    for name, dtype in (("hidden", hidden.dtype), ("weight", weight.dtype)):
        if not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize < 2:
            raise ValueError(f"{name} must be bfloat16, float16, float32 or float64, got {dtype}; cast it first")
    if token_weights is not None:
        token_weights = jnp.asarray(token_weights)
        if token_weights.shape != labels.shape or not jnp.issubdtype(token_weights.dtype, jnp.floating):
            raise ValueError(
                f"token_weights must be floats of the shape of labels {list(labels.shape)}; "
                f"got {token_weights.dtype} {list(token_weights.shape)}"
            )
    return _request(hidden, weight, labels, token_weights, _checked(options))


def _checked(options: Options) -> Options:
    for name in ("z_loss", "soft_cap"):
        if isinstance(value := getattr(options, name), jax.Array):
            raise ValueError(f"{name} must be a Python number, known while tracing; got {value}")
    cap = options.soft_cap
    if cap is not None and not cap > 0:
        raise ValueError(f"soft_cap must be greater than 0, got {cap}; give None for no cap")
    axis_size(options.axis_name)
    cap = None if cap is None else float(cap)
    return Options(int(options.ignore_index), float(options.z_loss), cap, options.axis_name)


def _request(
    hidden: jax.Array, weight: jax.Array, labels: jax.Array, token_weights: jax.Array | None, options: Options
) -> CrossEntropyRequest:
    labels = labels.astype(jnp.int32)
    hidden, weight, labels, token_weights = match_varying_axes(options.axis_name, hidden, weight, labels, token_weights)
    return CrossEntropyRequest(hidden, weight, labels, token_weights, options, current_target())
