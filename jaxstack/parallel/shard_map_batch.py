"""A `shard_map` island for two operations that XLA's partitioner lays out badly: embedding lookup, vocabulary loss.

Each device works on its own rows of the batch with a weight that is gathered once, in the compute dtype. Left to
itself XLA reduces the head's float32 gradient whole to every device, and gathers tokens for the embedding's gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jaxstack.parallel.exchange import Exchange, exchange
from jaxstack.parallel.rules import current_rules, logical_axis_rules, restrict
from jaxstack.parallel.weights import dims_of, gather_parameter


def with_local_batch(
    function: Callable[..., jax.Array],
    parameter: nnx.Variable,
    dtype: Any,
    *batched: jax.Array,
    tensor: bool = False,
    as_stored: bool = False,
) -> jax.Array:
    """`function(weight, *batched)`, computed on each device's rows of the batch and part of the length.

    Args:
      function: gets the weight in `dtype`, whole over `weight_axes`, and arrays with this device's tokens; returns an
        array [b, t, ...] of these, or [1, 1] for something of all of them, as a sum. With `tensor`, its weight is this
        device's part along the tensor axis, and its result must be equal on all devices of that axis. With `as_stored`
        its weight has the stored dtype unless it is gathered, so that the gradient need not be rounded to `dtype`.
      parameter: a stored parameter with `logical_axes`.
      batched: arrays [B, T, ...].
    """
    rules = current_rules()
    if rules is None:
        return function(parameter[...] if as_stored else gather_parameter(parameter, dtype), *batched)
    known = parameter.get_metadata()
    stored = rules.parameter_spec(known["logical_axes"], known.get("whole_shape", parameter.shape))
    gathered = dims_of(stored, rules.weight_axes)
    if as_stored and not gathered:
        dtype = parameter[...].dtype
    wanted = ("data", "fsdp", "expert", "context", *(["tensor"] if tensor else []))
    axes = [a for a in wanted if rules.splits(a)]
    # A gather in the island would first make the weight whole over a tensor axis that XLA still partitions.
    inside = bool(gathered) and set(rules.weight_axes) <= set(axes) and (tensor or not rules.splits("tensor"))
    weight = parameter[...] if inside else gather_parameter(parameter, dtype)
    if not axes:
        return function(weight, *batched)
    held = restrict(stored, [a for a in axes if inside or a not in rules.weight_axes])
    rows = restrict(rules.spec(("batch", "length")), axes)
    inner = rules.within(axes)

    def local(weight: jax.Array, *batched: jax.Array) -> jax.Array:
        if inside:
            weight = exchange(weight, Exchange(str(jax.numpy.dtype(dtype)), rules.reduce, gathered))
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
