"""A mixture of experts inside a `shard_map`: each device routes its own tokens and computes its own experts.

XLA alone would sort, gather and scatter the tokens of all devices on each of them.

Dims: B batch, T sequence, D model.
"""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from jaxstack.parallel.rules import Names, axes_of
from jaxstack.parallel.sharding_context import ShardingContext, current_context
from jaxstack.parallel.weight_gather import dims_of

Parameters = Mapping[str, tuple[jax.Array, Names]]
"""Name -> (stored array, its logical axes)."""


class TokenSplit(NamedTuple):
    """Mesh axes over which the tokens of a mixture of experts are split."""

    sequence_axes: tuple[str, ...] = ()
    """Mesh axes over which sequences are split."""
    summed: int = 1
    """Number of devices whose results for the same tokens are summed, each from its part of the experts' width."""


LocalFunction = Callable[[jax.Array, dict[str, jax.Array], TokenSplit], tuple[jax.Array, jax.Array]]


def with_local_tokens(
    function: LocalFunction,
    x: jax.Array,
    parameters: Parameters,
    dtype: jax.typing.DTypeLike,
    as_stored: Collection[str] = (),
) -> tuple[jax.Array, jax.Array]:
    """Apply a mixture of experts inside a `shard_map`, on each device's tokens with the experts that it stores.

    Parameters stay sharded over `expert`, and along `mlp` over `tensor`; they are gathered over the `weight_axes`.
    The devices of `tensor` get the same tokens, and their results are summed.

    Args:
      function: returns (the results [B, T, D] of its tokens, [] float32). The scalar is this device's term of a sum
        over all tokens. It takes parameters with a logical axis `expert` in `dtype`, others in their stored dtype.
      x: [B, T, D].
      parameters: name -> (stored array, its logical axes).
      dtype: the compute dtype.
      as_stored: names of parameters that stay in their stored dtype if they need not be gathered.

    Returns:
      The results [B, T, D] of all tokens, and the sum of the scalars.
    """
    context = current_context()
    if context is None:
        whole = {name: p if name in as_stored else _cast(p, names, dtype) for name, (p, names) in parameters.items()}
        return function(x, whole, TokenSplit())
    rules = context.rules
    layout = _Layout.of(context, x, parameters)
    if not layout.free:
        return _local(function, layout, dtype, as_stored, x, {name: p for name, (p, _) in parameters.items()})
    inner = context.within(tuple(layout.free))

    def local(x: jax.Array, stored: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        with inner.entered():
            out, share = _local(function, layout, dtype, as_stored, x, stored)
            return out, share[None]

    out, shares = jax.shard_map(
        local,
        mesh=None if rules.manual else rules.mesh,
        in_specs=(layout.tokens, layout.specs),
        out_specs=(layout.tokens, PartitionSpec(layout.split or None)),
        axis_names=layout.free,
        check_vma=False,
    )(x, {name: p for name, (p, _) in parameters.items()})
    return out, shares.sum()


class _Layout(NamedTuple):
    """Sharding of the tokens and parameters of a mixture of experts inside its `shard_map`."""

    free: set[str]
    """Axes that the `shard_map` is manual over."""
    tokens: PartitionSpec
    """Spec of x and of the results, [B, T, D]."""
    specs: dict[str, PartitionSpec]
    """Spec of each parameter."""
    names: dict[str, Names]
    """Logical axes of each parameter."""
    split: tuple[str, ...]
    """Free axes over which tokens are split, without `gathered`."""
    gathered: tuple[str, ...]
    """Axes over which the residual stream alone is split along the length (Megatron's sequence parallelism)."""
    sequence: tuple[str, ...]
    """Axes over which the function's tokens are split along the length."""
    partial_sums: bool
    """True if experts are split along `tensor`, so that the results of its devices must be summed."""
    weight_axes: tuple[str, ...]
    """Axes over which parameters are gathered."""

    @classmethod
    def of(cls, context: ShardingContext, x: jax.Array, parameters: Parameters) -> "_Layout":
        """Return how the sharding rules in `context` split the tokens x [B, T, D] and the experts' parameters."""
        rules = context.rules
        sizes = context.rules.mesh.shape
        free = set(rules.mesh.axis_names) - rules.manual
        free = free if any(sizes[a] > 1 for a in free) else set()
        batch, residual, _ = (axes_of(part) for part in rules.spec(("batch", "residual_length", "act_embed"), x.shape))
        length = axes_of(rules.spec(("length",), (x.shape[1],))[0])
        kept = tuple(a for a in residual if a in length)
        gathered = tuple(a for a in residual if a not in length)
        manual = tuple(a for a in rules.table["length"] if a in rules.manual and sizes[a] > 1)
        specs = {
            name: PartitionSpec(*(tuple(a for a in axes_of(part) if a in free) or None for part in spec))
            for name, spec in (
                (name, context.parameter_spec(names, p.shape)) for name, (p, names) in parameters.items()
            )
        }
        named = {name: names for name, (_, names) in parameters.items()}
        summed = any(
            axis == "mlp" and "tensor" in axes_of(part)
            for name in named
            for axis, part in zip(named[name], specs[name], strict=True)
        )
        tokens = PartitionSpec(batch or None, residual or None, None)
        return cls(free, tokens, specs, named, (*batch, *kept), gathered, (*kept, *manual), summed, rules.weight_axes)


def _local(
    function: LocalFunction,
    layout: _Layout,
    dtype: jax.typing.DTypeLike,
    as_stored: Collection[str],
    x: jax.Array,
    stored: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    parameters = {}
    for name, value in stored.items():
        gathers = dims_of(layout.specs[name], layout.weight_axes)
        if gathers or name not in as_stored:
            value = _cast(value, layout.names[name], dtype)
        for axes, dim in gathers:
            value = jax.lax.all_gather(value, axes, axis=dim, tiled=True)
        parameters[name] = value
    if layout.gathered:
        x = jax.lax.all_gather(x, layout.gathered, axis=1, tiled=True)
    summed = jax.lax.axis_size("tensor") if layout.partial_sums else 1
    out, share = function(x, parameters, TokenSplit(layout.sequence, summed))
    if layout.partial_sums and "tensor" in layout.gathered:
        out = jax.lax.psum_scatter(out, "tensor", scatter_dimension=1, tiled=True)
    elif layout.partial_sums:
        out = jax.lax.psum(out, "tensor")
    elif layout.gathered:
        rows = out.shape[1] // jax.lax.axis_size(layout.gathered)
        out = jax.lax.dynamic_slice_in_dim(out, jax.lax.axis_index(layout.gathered) * rows, rows, axis=1)
    return out, share


def _cast(x: jax.Array, names: Names, dtype: jax.typing.DTypeLike) -> jax.Array:
    return x.astype(dtype) if "expert" in names else x
