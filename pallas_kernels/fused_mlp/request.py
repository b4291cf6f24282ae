"""Checked arguments of a call that computes an activation and the matmul after it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.fused_mlp.activations import ACTIVATIONS
from pallas_kernels.target import Target, current_target


class BiasedProduct(NamedTuple):
    """The input of an activation as the result of the dense layer before it: x @ weight + bias.

    Attributes:
        x: [..., D].
        weight: [D, F] in the dtype of x.
        bias: [F] in any float dtype.
    """

    x: Float[Array, "*rows D"]
    weight: Float[Array, "D F"]
    bias: Float[Array, " F"]


@dataclass(frozen=True)
class ActivatedMatmulRequest:
    """Checked arguments of one call that computes an activation and the matmul after it.

    Attributes:
        inputs: arrays [..., F], or the product that is the only input.
        weight: [F, D].
        activation: a key of `ACTIVATIONS`.
        target: the device that the call is lowered for.
    """

    inputs: tuple[jax.Array, ...] | BiasedProduct
    weight: jax.Array
    activation: str
    target: Target

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each input of the activation."""
        return (*self.inputs[0].shape[:-1], self.weight.shape[0])

    @property
    def rows(self) -> int:
        """Number of rows of each input of the activation, with leading dims merged."""
        return math.prod(self.shape[:-1])

    def compute_inputs(self) -> tuple[jax.Array, ...]:
        """Return the inputs of the activation, computed by XLA where a product is given."""
        if not isinstance(self.inputs, BiasedProduct):
            return self.inputs
        x, weight, bias = self.inputs
        # With the matmul's own two dims XLA fuses the addition into the matmul.
        product = jnp.dot(x.reshape(-1, x.shape[-1]), weight) + bias.astype(x.dtype)
        return (product.reshape(self.shape),)

    def __str__(self) -> str:
        shapes = f"{list(self.shape)} {self.weight.dtype.name} times {list(self.weight.shape)}"
        return f"{self.activation} of {shapes} on {self.target}"


def make_request(
    inputs: Sequence[jax.Array] | BiasedProduct, weight: jax.Array, activation: str
) -> ActivatedMatmulRequest:
    """Check the arguments of a call of `activated_matmul`, and return them in one object.

    Raises:
        ValueError: an argument breaks a rule; the message gives the rule, the values and the way out.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}; got {activation!r}")
    wanted = ACTIVATIONS[activation].inputs
    if isinstance(inputs, BiasedProduct):
        _check_product(inputs, weight, activation)
        return ActivatedMatmulRequest(inputs, weight, activation, current_target())
    shown = f"got inputs {', '.join(f'{x.dtype} {list(x.shape)}' for x in inputs)}, weight {weight.dtype} "
    shown += f"{list(weight.shape)}"
    if len(inputs) != wanted:
        raise ValueError(f"{activation} takes {wanted} input{'s' * (wanted > 1)}; {shown}")
    if len({(x.shape, x.dtype) for x in inputs}) > 1 or inputs[0].dtype != weight.dtype:
        raise ValueError(f"the inputs must have one shape, and they and weight one dtype; {shown}")
    if weight.ndim != 2 or not weight.size or inputs[0].ndim < 1 or inputs[0].shape[-1] != weight.shape[0]:
        raise ValueError(f"weight [F, D] must have as many rows as the last dim of the inputs [..., F]; {shown}")
    return ActivatedMatmulRequest(tuple(inputs), weight, activation, current_target())


def _check_product(product: BiasedProduct, weight: jax.Array, activation: str) -> None:
    x, first, bias = product
    shown = f"got x {x.dtype} {list(x.shape)}, weights {first.dtype} {list(first.shape)} and {weight.dtype} "
    shown += f"{list(weight.shape)}, bias {list(bias.shape)}"
    if ACTIVATIONS[activation].inputs != 1:
        raise ValueError(f"a product can be the input of an activation with one input, not of {activation}; {shown}")
    if not x.dtype == first.dtype == weight.dtype:
        raise ValueError(f"x and both weights must have one dtype; {shown}")
    if first.ndim != 2 or weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != first.shape[0]:
        raise ValueError(f"the first weight [D, F] must have as many rows as the last dim of x [..., D]; {shown}")
    if not weight.size or weight.shape[0] != first.shape[1] or bias.shape != first.shape[1:]:
        raise ValueError(f"bias [F] and the last weight [F, D] must fit the first weight's columns; {shown}")
