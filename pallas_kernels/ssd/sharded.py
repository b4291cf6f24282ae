"""`ssd` for sequences that are sharded over a mesh axis, whose devices exchange the states after their parts.

Each part is computed from a state of zeros. The state before it then adds exp(L_t) h C_t to the output of token t,
where L is the sum of dt a from the start of the part; the states before all parts follow from those after them and the
parts' decays.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.array_types import AnyArray
from pallas_kernels.sequence_shards import SequenceShards, continues, own_documents
from pallas_kernels.ssd.api import ssd


def ssd_over_shards(
    x: Float[AnyArray, "B T N P"],
    dt: Float[AnyArray, "B T N"],
    a: Float[AnyArray, " N"],
    b: Float[AnyArray, "B T G S"],
    c: Float[AnyArray, "B T G S"],
    *,
    axis_name: str,
    layout: str = "zigzag",
    segment_ids: Int[AnyArray, "B T"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N P"]:
    """Return the outputs of `ssd` for this device's shard of each sequence. To be called inside `jax.shard_map`.

    Devices gather the state after each of their parts, 4 N P S bytes for each part and sequence.

    Args:
        x, dt, a, b, c: as for `ssd`, of T tokens on this device.
        axis_name: mesh axis that the sequences are sharded over.
        layout: "zigzag" or "contiguous", the order in which devices hold a sequence.
        segment_ids: as for `ssd`.
        implementation: name of the backend of `ssd` that computes the parts.
    """
    shards = SequenceShards(axis_name, layout)
    x, dt, b, c = (shards.split(jnp.asarray(z)) for z in (x, dt, b, c))
    wide = jnp.promote_types(x.dtype, jnp.float32)
    dt = dt.astype(wide)
    documents = None
    ids = None if segment_ids is None else shards.split(jnp.asarray(segment_ids))
    if ids is not None:
        documents, padding = own_documents(ids)
        dt = jnp.where(padding[..., None], 0, dt)
    y, last = ssd(x, dt, a, b, c, segment_ids=documents, implementation=implementation)
    seen = jnp.exp(jnp.cumsum(dt * a.astype(wide), axis=1))
    if documents is not None:
        seen = jnp.where((documents == 0)[..., None], seen, 0)
    goes_on = jnp.ones(len(x), bool) if ids is None else continues(shards, ids)

    def advance(state: jax.Array, part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        last, keep, goes_on = part
        return last + (keep * goes_on[:, None])[..., None, None] * state

    zeros = jnp.zeros((len(x) // shards.count, *last.shape[1:]), last.dtype)
    starts = shards.start_states(advance, (last, seen[:, -1], goes_on), zeros)
    starts = starts * goes_on[:, None, None, None]
    return shards.join((y + seen[..., None] * _read(c, starts)).astype(y.dtype))


def _read(c: Float[Array, "B T G S"], state: Float[Array, "B N P S"]) -> Float[Array, "B T N P"]:
    """Return h C for every token, of the state of each head, in the dtype of the state."""
    by_group = state.reshape(len(c), c.shape[2], -1, *state.shape[2:])
    precision = "highest" if c.dtype == state.dtype else None
    found = jnp.einsum(
        "btgs,bgrps->btgrp", c, by_group.astype(c.dtype), preferred_element_type=state.dtype, precision=precision
    )
    return found.reshape(*c.shape[:2], *state.shape[1:3])
