"""Embedding lookup and vocabulary loss inside a `shard_map`, which communicates less than XLA's own partitioning.

Each device computes its own rows of the batch with a weight that is gathered once, in the compute dtype. XLA alone
would all-reduce the head's float32 gradient, and all-gather tokens for the embedding's gradient.
"""

from collections.abc import Callable

import jax
from flax import nnx

from jaxstack.parallel.rules import restrict
from jaxstack.parallel.shard_map_weights import Exchange, exchange
from jaxstack.parallel.sharding_context import current_context
from jaxstack.parallel.weight_gather import dims_of, gather_parameter


def with_local_batch(
    function: Callable[..., jax.Array],
    parameter: nnx.Variable,
    dtype: jax.typing.DTypeLike | None,
    *batched: jax.Array,
    tensor: bool = False,
    as_stored: bool = False,
) -> jax.Array:
    """Return function(weight, *batched), computed in a `shard_map` on each device's own rows and tokens of the batch.

    Args:
      function: takes the weight, gathered over the `weight_axes`, and this device's part [b, t, ...] of each array of
        `batched`; returns an array [b, t, ...], or [1, 1] for a value of all its tokens, which the caller sums.
      parameter: a stored parameter with `logical_axes`.
      dtype: dtype of the weight that `function` takes; None: the stored dtype.
      batched: arrays [B, T, ...].
      tensor: True leaves the weight sharded over the axis `tensor`; `function` must return the same on all devices of
        that axis.
      as_stored: True casts the weight only if it is gathered, so that its gradient need not be rounded to `dtype`.
    """
    context = current_context()
    if context is None:
        return function(parameter[...] if as_stored else gather_parameter(parameter, dtype), *batched)
    rules = context.rules
    known = parameter.get_metadata()
    stored = context.parameter_spec(known["logical_axes"], known.get("whole_shape", parameter.shape))
    gathered = dims_of(stored, rules.weight_axes)
    if as_stored and not gathered:
        dtype = parameter[...].dtype
    wanted = ("data", "fsdp", "expert", "context", *(["tensor"] if tensor else []))
    axes = [a for a in wanted if rules.xla_splits(a)]
    # A gather inside the shard_map would first replicate the weight over a tensor axis that XLA still partitions.
    inside = bool(gathered) and set(rules.weight_axes) <= set(axes) and (tensor or not rules.xla_splits("tensor"))
    weight = parameter[...] if inside else gather_parameter(parameter, dtype)
    if not axes:
        return function(weight, *batched)
    weight_spec = restrict(stored, [a for a in axes if inside or a not in rules.weight_axes])
    rows = restrict(rules.spec(("batch", "length")), axes)
    inner = context.within(axes)

    def local(weight: jax.Array, *batched: jax.Array) -> jax.Array:
        if inside:
            weight = exchange(weight, Exchange(str(jax.numpy.dtype(dtype)), context.layout.reduce_dtype, gathered))
        with inner.entered():
            return function(weight, *batched)

    return jax.shard_map(
        local,
        mesh=None if rules.manual else rules.mesh,
        in_specs=(weight_spec, *(rows for _ in batched)),
        out_specs=rows,
        axis_names=set(axes),
        check_vma=False,
    )(weight, *batched)
