"""A `shard_map` island for two operations that XLA's partitioner lays out badly: embedding lookup, vocabulary loss.

Each device works on its own rows of the batch with a weight that is gathered once, in the compute dtype. Left to
itself XLA reduces the head's float32 gradient whole to every device, and gathers tokens for the embedding's gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from jaxstack.parallel.rules import (
    axes_of,
    current_rules,
    gather_parameter,
    gather_shards,
    logical_axis_rules,
    restrict,
)


def with_local_batch(
    function: Callable[..., jax.Array],
    parameter: nnx.Variable,
    dtype: Any,
    *batched: jax.Array,
    tensor: bool = False,
    as_stored: bool = False,
) -> jax.Array:
    """`function(weight, *batched)`, computed on each device's rows of the batch.

    Args:
      function: gets the weight in `dtype`, whole over `fsdp`, and arrays with this device's rows; returns an array
        whose first dim are these rows, or 1 for something of all of them, as a sum. With `tensor`, its weight is this
        device's part along the tensor axis, and its result must be equal on all devices of that axis. With `as_stored`
        its weight has the stored dtype unless it is gathered, so that the gradient need not be rounded to `dtype`.
      parameter: a stored parameter with `logical_axes`.
      batched: arrays whose first dim is the batch.
    """
    rules = current_rules()
    if rules is None:
        return function(parameter[...] if as_stored else gather_parameter(parameter, dtype), *batched)
    known = parameter.get_metadata()
    stored = rules.parameter_spec(known["logical_axes"], known.get("whole_shape", parameter.shape))
    gathered = any("fsdp" in axes_of(part) for part in stored)
    if as_stored and not gathered:
        dtype = parameter[...].dtype
    wanted = ("data", "fsdp", "expert", *(["tensor"] if tensor else []))
    axes = [a for a in wanted if rules.splits(a)]
    # A gather in the island would first make the weight whole over a tensor axis that XLA still partitions.
    inside = gathered and "fsdp" in axes and (tensor or not rules.splits("tensor"))
    weight = parameter[...] if inside else gather_parameter(parameter, dtype)
    if not axes:
        return function(weight, *batched)
    held = restrict(stored, [a for a in axes if a != "fsdp" or inside])
    rows = restrict(rules.spec(("batch",)), axes)
    inner = rules.within(axes)

    def local(weight: jax.Array, *batched: jax.Array) -> jax.Array:
        for dim, part in enumerate(held):
            if "fsdp" in axes_of(part):
                weight = gather_shards(weight, "fsdp", dim, dtype, rules.reduce)
        with logical_axis_rules(inner):
            return function(weight, *batched)

    return jax.shard_map(
        local,
        mesh=None if rules.manual else rules.mesh,
        in_specs=(held, *(rows for _ in batched)),
        out_specs=rows,
        axis_names=set(axes),
        check_vma=False,
    )(weight, *batched)
