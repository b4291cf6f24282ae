"""Token and position tables, and a lookup that stays local when the vocabulary is sharded."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxstack.models.initialization import Initializer
from jaxstack.parallel import current_rules, gather_weight


class Embedding(nnx.Module):
    """A table [rows, D]."""

    def __init__(self, rows: int, size: int, axes: tuple[str, str], initialize: Initializer, rngs: nnx.Rngs):
        self.table = nnx.Param(initialize(rngs.params(), (rows, size), rows), logical_axes=axes)
        self.axes = axes

    def weight(self, dtype: Any) -> jax.Array:
        """The table in the compute dtype, whole over `fsdp`."""
        return gather_weight(self.table[...], self.axes, dtype)


def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """table [V, D], tokens int32 [...] -> [..., D].

    With the vocabulary on the tensor axis each device looks up the rows that it holds and one sum joins them
    (Megatron-LM, Shoeybi et al. 2019): left to itself XLA moves the table or the activations by all-to-alls.
    """
    rules = current_rules()
    axis = "tensor"
    if rules is None or rules.mesh.shape[axis] == 1 or table.shape[0] % rules.mesh.shape[axis]:
        return table[tokens]

    def local(part: jax.Array, tokens: jax.Array) -> jax.Array:
        rows = part.shape[0]
        index = tokens - jax.lax.axis_index(axis) * rows
        held = (index >= 0) & (index < rows)
        found = jnp.where(held[..., None], part[jnp.clip(index, 0, rows - 1)], 0)
        return jax.lax.psum(found, axis)

    mesh = None if rules.manual else rules.mesh
    spec = PartitionSpec
    return jax.shard_map(
        local, mesh=mesh, in_specs=(spec(axis), spec()), out_specs=spec(), axis_names={axis}, check_vma=True
    )(table, tokens)
