"""A `shard_map` island for a mixture of experts: each device routes its own tokens and computes its own experts.

Left to itself XLA would sort, gather and scatter the tokens of all devices on each of them.

Dims: B batch, T sequence, D model.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jaxstack.parallel.rules import AxisRules, Names, current_rules, logical_axis_rules
from jaxstack.parallel.weights import dims_of

Parameters = Mapping[str, tuple[jax.Array, Names]]
"""Name -> (stored array, its logical axes)."""


class TokenSplit(NamedTuple):
    """How the tokens that a function gets are a part of all."""

    sequence_axes: tuple[str, ...] = ()
    """Mesh axes over which sequences are split."""


LocalFunction = Callable[[jax.Array, dict[str, jax.Array], TokenSplit], tuple[jax.Array, jax.Array]]


def with_local_tokens(
    function: LocalFunction, x: jax.Array, parameters: Parameters, dtype: Any
) -> tuple[jax.Array, jax.Array]:
    """`function(x, parameters, split)`, computed on each device's tokens with the parameters that it holds.

    Along the axis `expert`, parameters with that logical axis stay apart; they are gathered over the `weight_axes`.
    Along `tensor` they keep their part of `mlp`, every device has the same tokens, and the results are summed.

    Args:
      function: returns ([B, T, D] for the tokens that it gets, [] float32). Its scalar is this device's share of a sum
        over all tokens. It gets parameters with a logical axis `expert` in `dtype`, others as they are stored.
      x: [B, T, D].

    Returns:
      The results [B, T, D] of all tokens, and the sum of the scalars.
    """
    rules = current_rules()
    if rules is None:
        return function(x, {name: _cast(p, names, dtype) for name, (p, names) in parameters.items()}, TokenSplit())
    layout = _Layout.of(rules, x, parameters)
    if not layout.free:
        return _local(function, layout, dtype, x, {name: p for name, (p, _) in parameters.items()})
    inner = rules.within(tuple(layout.free))

    def local(x: jax.Array, stored: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        with logical_axis_rules(inner):
            out, share = _local(function, layout, dtype, x, stored)
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
    free: set[str]
    """Axes that the island takes."""
    tokens: PartitionSpec
    specs: dict[str, PartitionSpec]
    names: dict[str, Names]
    split: tuple[str, ...]
    """Free axes over which tokens are split, but for those that are gathered."""
    gathered: tuple[str, ...]
    """Axes over which only the residual stream's sequences are split (Megatron's sequence parallelism)."""
    sequence: tuple[str, ...]
    partial_sums: bool
    """Whether experts are split along `tensor`."""
    weight_axes: tuple[str, ...]

    @classmethod
    def of(cls, rules: AxisRules, x: jax.Array, parameters: Parameters) -> "_Layout":
        sizes = rules.mesh.shape
        free = set(rules.mesh.axis_names) - rules.manual
        free = free if any(sizes[a] > 1 for a in free) else set()
        batch, residual, _ = (_axes(part) for part in rules.spec(("batch", "residual_length", "act_embed"), x.shape))
        length = _axes(rules.spec(("length",), (x.shape[1],))[0])
        kept = tuple(a for a in residual if a in length)
        gathered = tuple(a for a in residual if a not in length)
        held = tuple(a for a in rules.table["length"] if a in rules.manual and sizes[a] > 1)
        specs = {
            name: PartitionSpec(*(tuple(a for a in _axes(part) if a in free) or None for part in spec))
            for name, spec in ((name, rules.parameter_spec(names, p.shape)) for name, (p, names) in parameters.items())
        }
        named = {name: names for name, (_, names) in parameters.items()}
        summed = any(
            axis == "mlp" and "tensor" in _axes(part)
            for name in named
            for axis, part in zip(named[name], specs[name], strict=True)
        )
        tokens = PartitionSpec(batch or None, residual or None, None)
        return cls(free, tokens, specs, named, (*batch, *kept), gathered, (*kept, *held), summed, rules.weight_axes)


def _local(
    function: LocalFunction, layout: _Layout, dtype: Any, x: jax.Array, stored: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    parameters = {}
    for name, value in stored.items():
        value = _cast(value, layout.names[name], dtype)
        for axes, dim in dims_of(layout.specs[name], layout.weight_axes):
            value = jax.lax.all_gather(value, axes, axis=dim, tiled=True)
        parameters[name] = value
    if layout.gathered:
        x = jax.lax.all_gather(x, layout.gathered, axis=1, tiled=True)
    out, share = function(x, parameters, TokenSplit(layout.sequence))
    if layout.partial_sums and "tensor" in layout.gathered:
        out = jax.lax.psum_scatter(out, "tensor", scatter_dimension=1, tiled=True)
    elif layout.partial_sums:
        out = jax.lax.psum(out, "tensor")
    elif layout.gathered:
        rows = out.shape[1] // jax.lax.axis_size(layout.gathered)
        out = jax.lax.dynamic_slice_in_dim(out, jax.lax.axis_index(layout.gathered) * rows, rows, axis=1)
    return out, share


def _cast(x: jax.Array, names: Names, dtype: Any) -> jax.Array:
    return x.astype(dtype) if "expert" in names else x


def _axes(part: Any) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else tuple(part or ())
