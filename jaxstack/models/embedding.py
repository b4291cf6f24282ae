"""Token and position tables, and a lookup that stays local when the vocabulary is sharded."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxstack.models.initialization import Initializer
from jaxstack.parallel import gather_parameter, with_local_batch


class Embedding(nnx.Module):
    """A table [rows, D]."""

    def __init__(self, rows: int, size: int, axes: tuple[str, str], initialize: Initializer, rngs: nnx.Rngs):
        self.table = nnx.Param(initialize(rngs.params(), (rows, size), rows), logical_axes=axes)
        self.axes = axes

    def weight(self, dtype: Any) -> jax.Array:
        """The table in the compute dtype, whole over `fsdp`."""
        return gather_parameter(self.table, dtype)

    def __call__(self, ids: jax.Array, dtype: Any) -> jax.Array:
        """Rows of int32 ids [B, T] -> [B, T, D] in the compute dtype.

        With the rows on the tensor axis each device looks up those that it holds, and one sum joins them (Megatron-LM,
        Shoeybi et al. 2019).
        """
        rows = self.table.get_metadata().get("whole_shape", self.table.shape)[0]  # not those of this device's shard

        def local(part: jax.Array, ids: jax.Array) -> jax.Array:
            if part.shape[0] == rows:
                return part[ids]
            index = ids - jax.lax.axis_index("tensor") * part.shape[0]
            held = (index >= 0) & (index < part.shape[0])
            found = jnp.where(held[..., None], part[jnp.clip(index, 0, part.shape[0] - 1)], 0)
            return _sum_over_tensor(found)

        return with_local_batch(local, self.table, dtype, ids, tensor=True)


@jax.custom_vjp
def _sum_over_tensor(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, "tensor")


def _sum_forward(x: jax.Array) -> tuple[jax.Array, None]:
    return _sum_over_tensor(x), None


def _sum_backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    # The gradients that arrive are equal on all devices: their sum needs no second all-reduce.
    return (gradient * jax.lax.axis_size("tensor"),)


_sum_over_tensor.defvjp(_sum_forward, _sum_backward)
