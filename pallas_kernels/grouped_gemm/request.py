"""Checked arguments of a grouped matmul. Dims: R rows, G groups, D and F of the matrices."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import AnyArray
from pallas_kernels.target import Target, current_target
from pallas_kernels.weight_only.packed import PackedWeight, is_packed


@dataclass(frozen=True)
class GroupedMatmulRequest:
    """Checked arguments of one grouped matmul: rows, matrices, group sizes and alignment.

    Attributes:
        x: rows [R, D].
        weights: [G, D, F], plain or packed in few bits.
        group_sizes: int32 [G].
        alignment: every group starts at a multiple of this row number.
        target: the device that the call is lowered for.
    """

    x: jax.Array
    weights: jax.Array | PackedWeight
    group_sizes: jax.Array
    alignment: int
    target: Target

    def __str__(self) -> str:
        aligned = f" aligned to {self.alignment}" if self.alignment > 1 else ""
        packed = f" in {self.weights.format.name}" if is_packed(self.weights) else ""
        return (
            f"x {list(self.x.shape)} {self.x.dtype.name} weights {list(self.weights.shape)}{packed}{aligned} "
            f"on {self.target}"
        )


def make_request(
    x: AnyArray, weights: AnyArray | PackedWeight, group_sizes: AnyArray, alignment: int, *, quantized: bool = False
) -> GroupedMatmulRequest:
    """Check the arguments of a grouped matmul, and return them in one object.

    Args:
        x, weights, group_sizes, alignment: as in `grouped_matmul`.
        quantized: True if the weights will be quantized, so that they may be float32 where x is not.

    Raises:
        ValueError: an argument breaks a rule; the message gives the rule, the values and the way out.
    """
    x = jnp.asarray(x)
    weights = weights if is_packed(weights) else jnp.asarray(weights)
    group_sizes = jnp.asarray(group_sizes)
    shapes = f"got x {list(x.shape)}, weights {list(weights.shape)}, group_sizes {list(group_sizes.shape)}"
    if x.ndim != 2 or weights.ndim != 3 or group_sizes.ndim != 1:
        raise ValueError(f"x must be [R, D], weights [G, D, F] and group_sizes [G]; {shapes}")
    if x.shape[1] != weights.shape[1]:
        raise ValueError(f"x [R, D] and weights [G, D, F] must have the same D; {shapes}")
    if weights.shape[0] != group_sizes.shape[0] or 0 in weights.shape:
        raise ValueError(f"weights and group_sizes must have the same G, and neither G, D nor F may be 0; {shapes}")
    if is_packed(weights) and (quantized or len(weights.stack) != 1):
        raise ValueError(f"packed weights must be a stack of G matrices, multiplied as they are; got {shapes}")
    dtype = x.dtype if isinstance(weights, PackedWeight) else weights.dtype
    matching = x.dtype == dtype or (quantized and dtype == jnp.float32)
    if not matching or not jnp.issubdtype(x.dtype, jnp.floating) or jnp.dtype(x.dtype).itemsize < 2:
        raise ValueError(
            f"x and weights must both be bfloat16, float16, float32 or float64, got {x.dtype} and {dtype}; "
            f"cast one of them"
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group_sizes must be integers, got {group_sizes.dtype}")
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1 or x.shape[0] % alignment:
        raise ValueError(f"alignment must be at least 1 and divide the rows of x ({x.shape[0]}), got {alignment!r}")
    return GroupedMatmulRequest(x, weights, group_sizes.astype(jnp.int32), alignment, current_target())
