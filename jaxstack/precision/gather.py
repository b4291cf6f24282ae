"""Weights gathered over `fsdp` as FP8 bytes: each device quantises its shard before it is moved."""

import math
from typing import Any

import jax
from flax import nnx

from jaxstack.parallel.rules import current_rules, fsdp_dim, gather_parameter, gather_values, maximum_over_shards
from pallas_kernels import QuantizedWeight
from pallas_kernels.fp8.blockwise import BLOCK, quantize_weight
from pallas_kernels.fp8.formats import E4M3, Quantized, absolute_maximum, quantize


def gather_quantized(parameter: nnx.Variable, dtype: Any, *, blockwise: bool) -> jax.Array | QuantizedWeight:
    """A stored weight as an FP8 product wants it; what is whole on each device comes in `dtype`, not quantised.

    Its gradient goes the way of `gather_parameter`: summed over the axis to where the weight is stored. With one scale
    a tensor the largest value is exchanged first (a scalar), blocks' scales are gathered beside the bytes.

    Args:
      parameter: a weight whose metadata has its logical axes and `contracted`, the number of its summed dims.
    """
    carrier = gather_parameter(parameter, dtype)
    known, own = parameter.get_metadata(), jax.lax.stop_gradient(parameter[...])
    names, shape = known.get("logical_axes"), known.get("whole_shape", own.shape)
    dim = fsdp_dim(names, shape)
    if dim is None:
        return carrier
    own = own.astype(dtype)
    if not blockwise:
        values, inverse_scale = quantize(own, E4M3, maximum_over_shards(absolute_maximum(own)))
        return QuantizedWeight(carrier, Quantized(gather_values(values, names, shape), inverse_scale))
    blocks = _gather_blocks(own, dim, known.get("contracted", 1))
    return carrier if blocks is None else QuantizedWeight(carrier, Quantized(blocks[0].reshape(shape), blocks[1]))


def _gather_blocks(own: jax.Array, dim: int, contracted: int) -> tuple[jax.Array, jax.Array] | None:
    """Values [D, outputs] and scales of the whole; None where a device's shard is not one of whole blocks."""
    rules = current_rules()
    if rules is None or "fsdp" not in rules.manual or dim not in (0, contracted):
        return None
    matrix = own.reshape(math.prod(own.shape[:contracted]), -1)
    axis = 0 if dim < contracted else 1
    if matrix.shape[axis] % BLOCK:
        return None
    values, inverse_scale = (
        jax.lax.all_gather(x, "fsdp", axis=axis, tiled=True) for x in quantize_weight(matrix)
    )
    return values, inverse_scale
