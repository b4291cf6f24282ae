"""An embedding table, whose rows may be shards of several devices."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxstack.models.initialization import Initializer
from jaxstack.parallel import gather_parameter, sum_over_tensor, with_local_batch
from pallas_kernels import PackedWeight


class Embedding(nnx.Module):
    """Learned embedding table [rows, D]; a packed low-bit table is stored transposed, like an output head's weight."""

    def __init__(self, rows: int, size: int, axes: tuple[str, str], initialize: Initializer, rngs: nnx.Rngs):
        self.table = nnx.Param(initialize(rngs.params(), (rows, size), rows), logical_axes=axes)
        self.axes = axes

    def weight(self, dtype: jax.typing.DTypeLike) -> Float[Array, "rows D"]:
        """Return the whole table in the compute dtype, all-gathered over the mesh axis `fsdp`."""
        if isinstance(packed := self.table.get_raw_value(), PackedWeight):
            return packed.matrix().astype(dtype)
        return gather_parameter(self.table, dtype)

    def __call__(self, ids: Int[Array, "B T"], dtype: jax.typing.DTypeLike) -> Float[Array, "B T D"]:
        """Look up the embeddings of int32 ids, in the compute dtype.

        If the rows are sharded over the tensor axis, each device looks up its own rows, and an all-reduce joins them
        (Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053).
        """
        if isinstance(packed := self.table.get_raw_value(), PackedWeight):
            return packed.rows(ids).astype(dtype)
        # Rows of the whole table, not of this device's shard.
        rows = self.table.get_metadata().get("whole_shape", self.table.shape)[0]

        def local(part: jax.Array, ids: jax.Array) -> jax.Array:
            if part.shape[0] == rows:
                return part[ids]
            index = ids - jax.lax.axis_index("tensor") * part.shape[0]
            own = (index >= 0) & (index < part.shape[0])
            found = jnp.where(own[..., None], part[jnp.clip(index, 0, part.shape[0] - 1)], 0)
            return _sum_over_tensor(found)

        return with_local_batch(local, self.table, dtype, ids, tensor=True)


@jax.custom_vjp
def _sum_over_tensor(x: jax.Array) -> jax.Array:
    return sum_over_tensor(x)


def _sum_forward(x: jax.Array) -> tuple[jax.Array, None]:
    return _sum_over_tensor(x), None


def _sum_backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    # The incoming gradients are equal on all devices, so their sum needs no second all-reduce.
    return (gradient * jax.lax.axis_size("tensor"),)


_sum_over_tensor.defvjp(_sum_forward, _sum_backward)
