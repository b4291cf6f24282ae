"""Checks the arguments of `packed_matmul`, and holds them for its backends."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import AnyArray
from pallas_kernels.target import Target, current_target
from pallas_kernels.weight_only.packed import PackedWeight


@dataclass(frozen=True)
class PackedMatmulRequest:
    """Checked arguments of a matmul with a packed weight, as its backends receive them.

    Attributes:
        x: inputs [rows, in].
        weight: the packed matrix [out, in].
        out_dtype: dtype of the result.
        target: the device that the call is lowered for.
    """

    x: jax.Array
    weight: PackedWeight
    out_dtype: jax.typing.DTypeLike
    target: Target

    def __str__(self) -> str:
        weight = self.weight
        return (
            f"x {list(self.x.shape)} {self.x.dtype.name} weight {weight.format} "
            f"[{math.prod(weight.outputs)}, {math.prod(weight.inputs)}] on {self.target}"
        )


def make_request(
    x: AnyArray, weight: PackedWeight, out_dtype: jax.typing.DTypeLike | None
) -> tuple[PackedMatmulRequest, tuple[int, ...]]:
    """Check the arguments of `packed_matmul`; return them for its backends, and the dims of x that are not contracted.

    Raises:
        ValueError: an argument breaks a rule; the message gives the rule and the values.
    """
    x = jnp.asarray(x)
    if weight.stack:
        raise ValueError(f"the weight must be one matrix, got a stack {list(weight.stack)}; call `grouped_matmul`")
    contracted = len(weight.inputs)
    if x.shape[x.ndim - contracted :] != weight.inputs:
        raise ValueError(f"the last dims of x {list(x.shape)} must be the weight's inputs {list(weight.inputs)}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be floating-point, got {x.dtype}")
    rows = x.shape[: x.ndim - contracted]
    flat = x.reshape(math.prod(rows), math.prod(weight.inputs))
    return PackedMatmulRequest(flat, weight, out_dtype or x.dtype, current_target()), rows
