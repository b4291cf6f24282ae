"""`gated_delta_rule` for sequences that are sharded over a mesh axis, whose devices exchange maps of the state.

Each part of a sequence takes the state S before it to M S + b. Its outputs are those from a state of zeros, and those
that the state adds, r S with a row r of D numbers for each token. M and r are what the recurrence makes of the identity
in place of the state, with no values. So one call computes both, with twice the heads, which fills a GPU better than
the few heads that an all-to-all leaves a device.

Dims: B batch, T tokens of a device, K key heads, N = K R value heads, D key width, V value width, W the larger one.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.array_types import AnyArray
from pallas_kernels.delta_rule.api import gated_delta_rule
from pallas_kernels.sequence_shards import SequenceShards, continues, own_documents


def gated_delta_rule_over_shards(
    q: Float[AnyArray, "B T K D"],
    k: Float[AnyArray, "B T K D"],
    v: Float[AnyArray, "B T N V"],
    log_decay: Float[AnyArray, "B T N *channels"],
    beta: Float[AnyArray, "B T N"],
    *,
    axis_name: str,
    layout: str = "zigzag",
    segment_ids: Int[AnyArray, "B T"] | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N V"]:
    """Return the outputs of `gated_delta_rule` for this device's shard of each sequence, inside `jax.shard_map`.

    Devices gather the map of each of their parts, 4 N D (D + V) bytes for each part and sequence.

    Args:
        q, k, v, log_decay, beta, scale: as for `gated_delta_rule`, of T tokens on this device.
        axis_name: mesh axis that the sequences are sharded over.
        layout: "zigzag" or "contiguous", the order in which devices hold a sequence.
        segment_ids: as for `gated_delta_rule`.
        implementation: name of the backend of `gated_delta_rule` that computes the parts.
    """
    shards = SequenceShards(axis_name, layout)
    q, k, v, log_decay, beta = (shards.split(jnp.asarray(x)) for x in (q, k, v, log_decay, beta))
    documents = None
    ids = None if segment_ids is None else shards.split(jnp.asarray(segment_ids))
    if ids is not None:
        documents, padding = own_documents(ids)
        log_decay, beta = (
            jnp.where(padding.reshape(*padding.shape, *(1,) * (x.ndim - 2)), 0, x) for x in (log_decay, beta)
        )
    goes_on = jnp.ones(len(q), bool) if ids is None else continues(shards, ids)
    key_heads, width = k.shape[2:]
    value_width = v.shape[3]
    wide = max(width, value_width)

    def doubled(x: jax.Array, other: jax.Array) -> jax.Array:
        """[B, T, N, ...] twice -> [B, T, 2 N, ...], in which each key head has the value heads of both."""
        both = (z.reshape(*z.shape[:2], key_heads, -1, *z.shape[3:]) for z in (x, other))
        joined = jnp.concatenate(list(both), axis=3)
        return joined.reshape(*x.shape[:2], -1, *x.shape[3:])

    def halves(x: jax.Array, axis: int) -> list[jax.Array]:
        """Reverse `doubled`, for heads in any axis."""
        by_key = x.reshape(*x.shape[:axis], key_heads, 2, -1, *x.shape[axis + 1 :])
        return [
            jax.lax.index_in_dim(by_key, half, axis + 1, keepdims=False).reshape(
                *x.shape[:axis], -1, *x.shape[axis + 1 :]
            )
            for half in (0, 1)
        ]

    values = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, wide - value_width)))
    values = doubled(values, jnp.zeros_like(values))
    sums = jnp.promote_types(v.dtype, jnp.float32)
    identity = jnp.broadcast_to(jnp.eye(width, wide, dtype=sums), (len(v), 1, v.shape[2], width, wide))
    state = doubled(jnp.zeros_like(identity), identity)[:, 0]
    out, last = gated_delta_rule(
        q, k, values, doubled(log_decay, log_decay), doubled(beta, beta),
        segment_ids=documents, state=state, scale=scale, implementation=implementation,
    )  # fmt: skip
    out, rows = halves(out, 2)
    added, transition = halves(last, 1)
    maps = transition[..., :width], added[..., :value_width], goes_on

    def advance(state: jax.Array, part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        transition, added, goes_on = part
        return added + jnp.matmul(transition, state * goes_on[:, None, None, None], precision="highest")

    zeros = jnp.zeros((len(q) // shards.count, *maps[1].shape[1:]), sums)
    starts = shards.start_states(advance, maps, zeros) * goes_on[:, None, None, None]
    precision = "highest" if v.dtype == sums else None
    seen = jnp.einsum(
        "btnd,bndv->btnv", rows[..., :width], starts.astype(v.dtype),
        preferred_element_type=sums, precision=precision,
    )  # fmt: skip
    return shards.join((out[..., :value_width] + seen).astype(v.dtype))
