"""What one call of the fused head and loss asks for, checked.

Dimensions: D model, V vocabulary; the leading dimensions of `hidden` are those of `labels`.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.target import Target, current_target


@dataclass(frozen=True)
class Options:
    """The static part of a call, hashable.

    Attributes:
        ignore_index: a label whose token has loss 0 and no gradient.
        z_loss: factor of the squared log-sum-exp that is added to the loss (PaLM, arXiv:2204.02311).
        soft_cap: logits become soft_cap * tanh(logit / soft_cap); None for no cap.
    """

    ignore_index: int = -100
    z_loss: float = 0.0
    soft_cap: float | None = None


@dataclass(frozen=True)
class Request:
    """One call, its rules already checked: hidden [..., D], weight [D, V], labels int32 [...]."""

    hidden: jax.Array
    weight: jax.Array
    labels: jax.Array
    options: Options
    target: Target

    @property
    def logit_bytes(self) -> int:
        """Bytes that the float32 logits of every token would take."""
        return 4 * math.prod(self.hidden.shape[:-1]) * self.weight.shape[1]

    def __str__(self) -> str:
        return (
            f"hidden {list(self.hidden.shape)} {self.hidden.dtype.name} weight {list(self.weight.shape)} "
            f"{self.weight.dtype.name} on {self.target}"
        )


def make_request(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    ignore_index: int,
    z_loss: float,
    soft_cap: float | None,
) -> Request:
    """Checks the arguments of `linear_cross_entropy`.

    Raises:
        ValueError: a rule is broken; the message names it, the values and the way out.
    """
    hidden, weight, labels = jnp.asarray(hidden), jnp.asarray(weight), jnp.asarray(labels)
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
    for name, value in (("z_loss", z_loss), ("soft_cap", soft_cap)):
        if isinstance(value, jax.Array):
            raise ValueError(f"{name} must be a Python number, known while tracing; got {value}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be greater than 0, got {soft_cap}; give None for no cap")
    options = Options(int(ignore_index), float(z_loss), None if soft_cap is None else float(soft_cap))
    return Request(hidden, weight, labels.astype(jnp.int32), options, current_target())
