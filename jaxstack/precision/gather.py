"""All-gather of weights as FP8 bytes: each device quantizes its shard before the transfer.

The gradient of such a weight is reduced as `gather_parameter` reduces it: summed onto the shard that is stored.
"""

import math

import jax
from flax import nnx

from jaxstack.parallel.collectives import gather
from jaxstack.parallel.rules import Names, restrict
from jaxstack.parallel.shard_map_weights import WorkingCopy
from jaxstack.parallel.sharding_context import ShardingContext, current_context, placed
from jaxstack.parallel.weight_gather import dims_of, gather_parameter, on_tensor_shards
from pallas_kernels import QuantizedWeight
from pallas_kernels.fp8.blockwise import BLOCK, quantize_weight
from pallas_kernels.fp8.formats import E4M3, Quantized, absolute_maximum, quantize


def gather_quantized(
    parameter: nnx.Variable, dtype: jax.typing.DTypeLike, *, blockwise: bool
) -> jax.Array | QuantizedWeight:
    """All-gather a sharded weight as FP8 values for an FP8 matmul; a weight that is not sharded is left unquantized.

    With one scale per tensor, its largest magnitude is reduced over the devices first (a scalar). Scales of blocks are
    gathered with the bytes. A weight whose shards are not whole blocks is gathered in `dtype`.

    Args:
      parameter: a weight whose metadata has its `logical_axes` and `contracted`, the number of its summed dims.
      dtype: compute dtype, in which a weight is gathered that is not quantized.
      blockwise: scale blocks of 128 x 128 values instead of the whole tensor.
    """
    context = current_context()
    known = parameter.get_metadata()
    own = parameter.get_raw_value()
    is_working_copy = isinstance(own, WorkingCopy)
    own = own.copy if isinstance(own, WorkingCopy) else own
    names = known.get("logical_axes")
    shape = tuple(known.get("whole_shape", own.shape))
    if context is None or not dims_of(context.parameter_spec(names, shape), context.rules.weight_axes):
        # The FP8 matmul quantizes the stored values. Converting them to `dtype` first would write a copy for nothing.
        return gather_parameter(parameter, dtype if is_working_copy else None)
    carrier = gather_parameter(parameter, dtype)
    own = jax.lax.stop_gradient(own).astype(dtype)
    if blockwise:
        found = _gather_blocks(own, context, names, shape, known.get("contracted", 1))
    else:
        found = _gather_whole(own, context, names, shape)
    return carrier if found is None else QuantizedWeight(carrier, found)


def _gather_whole(own: jax.Array, context: ShardingContext, names: Names | None, shape: tuple[int, ...]) -> Quantized:
    """Quantize a weight with one scale, equal on every device, and all-gather the FP8 values."""
    rules = context.rules
    spec = context.parameter_spec(names, shape)
    if "fsdp" in rules.manual:
        ((axes, dim),) = dims_of(spec, rules.weight_axes)
        amax = jax.lax.pmax(absolute_maximum(own), axes)
        values, inverse_scale = quantize(own, E4M3, amax)

        def whole_shard(x: jax.Array) -> jax.Array:
            return gather(x, axes, dim, peer_copies=context.layout.peer_copies)

        return Quantized(on_tensor_shards(whole_shard, spec, rules)(values), inverse_scale)
    stored = restrict(spec, rules.free)
    whole = restrict(spec, set(rules.free) - set(rules.weight_axes))
    # Both constraints are needed, as for a plain all-gather: without them XLA moves the values before it rounds them.
    values, inverse_scale = quantize(jax.lax.with_sharding_constraint(own, placed(rules, stored)), E4M3)
    for layout in (stored, whole):
        values = jax.lax.with_sharding_constraint(values, placed(rules, layout))
    return Quantized(values, inverse_scale)


def _gather_blocks(
    own: jax.Array, context: ShardingContext, names: Names | None, shape: tuple[int, ...], contracted: int
) -> Quantized | None:
    """Quantize a weight's shard in blocks and all-gather values and scales; None if the shard is not whole blocks."""
    rules = context.rules
    ((axes, dim),) = dims_of(context.parameter_spec(names, shape), rules.weight_axes)
    if "fsdp" not in rules.manual or rules.xla_splits("tensor") or dim not in (0, contracted):
        return None
    matrix = own.reshape(math.prod(own.shape[:contracted]), -1)
    axis = 0 if dim < contracted else 1
    if matrix.shape[axis] % BLOCK:
        return None
    values, inverse_scale = (
        gather(x, axes, axis, peer_copies=context.layout.peer_copies) for x in quantize_weight(matrix)
    )
    return Quantized(values.reshape(shape), inverse_scale)
