"""Checked arguments of a call that computes an activation and the matmul after it."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from pallas_kernels.fused_mlp.activations import ACTIVATIONS
from pallas_kernels.target import Target, current_target


@dataclass(frozen=True)
class ActivatedMatmulRequest:
    """Checked arguments of one call that computes an activation and the matmul after it.

    Attributes:
        inputs: arrays [..., F].
        weight: [F, D].
        activation: a key of `ACTIVATIONS`.
        target: the device that the call is lowered for.
    """

    inputs: tuple[jax.Array, ...]
    weight: jax.Array
    activation: str
    target: Target

    @property
    def rows(self) -> int:
        """Number of rows of each input of the activation, with leading dims merged."""
        return self.inputs[0].size // self.weight.shape[0]

    def __str__(self) -> str:
        x = self.inputs[0]
        return f"{self.activation} of {list(x.shape)} {x.dtype.name} times {list(self.weight.shape)} on {self.target}"


def make_request(inputs: Sequence[jax.Array], weight: jax.Array, activation: str) -> ActivatedMatmulRequest:
    """Check the arguments of a call of `activated_matmul`, and return them in one object.

    Raises:
        ValueError: an argument breaks a rule; the message gives the rule, the values and the way out.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(map(repr, ACTIVATIONS))}; got {activation!r}")
    wanted = ACTIVATIONS[activation].inputs
    shown = f"got inputs {', '.join(f'{x.dtype} {list(x.shape)}' for x in inputs)}, weight {weight.dtype} "
    shown += f"{list(weight.shape)}"
    if len(inputs) != wanted:
        raise ValueError(f"{activation} takes {wanted} input{'s' * (wanted > 1)}; {shown}")
    if len({(x.shape, x.dtype) for x in inputs}) > 1 or inputs[0].dtype != weight.dtype:
        raise ValueError(f"the inputs must have one shape, and they and weight one dtype; {shown}")
    if weight.ndim != 2 or not weight.size or inputs[0].ndim < 1 or inputs[0].shape[-1] != weight.shape[0]:
        raise ValueError(f"weight [F, D] must have as many rows as the last dim of the inputs [..., F]; {shown}")
    return ActivatedMatmulRequest(tuple(inputs), weight, activation, current_target())
