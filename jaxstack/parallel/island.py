"""A `shard_map` island for two operations that XLA's partitioner lays out badly: embedding lookup, vocabulary loss.

Each device works on its own rows of the batch with a weight that is gathered once, in the compute dtype. Left to
itself XLA reduces the head's float32 gradient whole to every device, and gathers tokens for the embedding's gradient.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxstack.parallel.rules import Names, current_rules, gather_weight, logical_axis_rules


def with_local_batch(
    function: Callable[..., jax.Array],
    weight: jax.Array,
    names: Names,
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
      weight: a stored parameter with logical axes `names`.
      batched: arrays whose first dim is the batch.
    """
    rules = current_rules()
    axes = [a for a in ("data", "fsdp", "expert", *(["tensor"] if tensor else [])) if rules and _is_free(rules, a)]
    if as_stored and (rules is None or not _is_free(rules, "fsdp")):
        dtype = weight.dtype
    if rules is None or not axes:
        return function(gather_weight(weight, names, dtype), *batched)
    stored = rules.parameter_spec(names, weight.shape)
    if _is_free(rules, "tensor") and not tensor:
        # A gather in the island would first make the weight whole over the axis that XLA still partitions.
        weight, stored = gather_weight(weight, names, dtype), PartitionSpec(*(None for _ in stored))
    held = PartitionSpec(*(_only(part, axes) for part in stored))
    rows = PartitionSpec(_only(rules.spec(("batch",))[0], axes))
    inner = rules.within(axes)

    def local(weight: jax.Array, *batched: jax.Array) -> jax.Array:
        weight = weight.astype(dtype)
        for dim, part in enumerate(held):
            if part is not None and "fsdp" in part:
                weight = jax.lax.all_gather(weight, "fsdp", axis=dim, tiled=True)
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


def _is_free(rules: Any, axis: str) -> bool:
    return rules.mesh.shape[axis] > 1 and axis not in rules.manual


def _only(part: str | tuple[str, ...] | None, axes: list[str]) -> tuple[str, ...] | None:
    kept = tuple(a for a in ((part,) if isinstance(part, str) else part or ()) if a in axes)
    return kept or None
