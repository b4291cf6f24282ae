"""Gradients within the chunks of the gated delta rule, from the states and the states' gradients, without a recurrence.

With the notation of `mosaic_backward`, D_ij = e^(G_i - G_j) of visible tokens, and for each token

    d_scores = D scale (d_out new^T),  d_below = -D (y new^T) below the diagonal
    d_q  = e^G scale (d_out S^T) + d_scores k
    read = d_below k - e^G (y S^T),  wrote = d_scores^T q + (beta d_below)^T k,  kept = e^(G_C - G) (new d_S'^T)
    d_k  = beta read + wrote + kept,  d_v = beta y,  d_beta = k . read + y . v
    d_G  = q . d_q + beta k . read - k . wrote - k . kept;  to d_G_C are added sum(k . kept) and e^(G_C) <S, d_S'>.

Dims: B batch, T tokens, n chunks of C tokens, K key heads, N value heads, D key width, V value width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.delta_rule.mosaic_forward import BETA, CHUNK, GROWN, REST, TOTAL
from pallas_kernels.sequence_parts import in_chunks


class ChunkInputs(NamedTuple):
    """Arrays that the gradients within chunks are computed from; `states`, `d_states` and `new` are transposed."""

    q: Float[Array, "B T K D"]
    k: Float[Array, "B T K D"]
    v: Float[Array, "B T N V"]
    d_out: Float[Array, "B T N V"]
    states: Float[Array, "B N n V D"]
    d_states: Float[Array, "B N n V D"]
    new: Float[Array, "B N n V C"]
    y: Float[Array, "B T N V"]
    gates: Float[Array, "B N n 6 C"]
    factor: Float[Array, " 1"]


def chunk_gradients(
    inputs: ChunkInputs, first: Int[Array, "B n C"] | None, *, scale: float
) -> tuple[Float[Array, "B T K D"], Float[Array, "B T K D"], Float[Array, "B T N V"], Float[Array, "2 B N n C"]]:
    """Return the gradients of q, k and v in their dtype, and those of G and beta times `factor`, by XLA."""
    batch, tokens, heads, _ = inputs.v.shape
    key_heads = inputs.k.shape[2]
    gates = inputs.gates

    def split(x: jax.Array) -> jax.Array:
        """[B, T, K or N, ...] -> [B, N, n, C, ...]."""
        x = jnp.moveaxis(in_chunks(x, CHUNK), 3, 1).astype(jnp.float32)
        return jnp.repeat(x, heads // x.shape[1], axis=1)

    q, k, v, d_out, y = (split(x) for x in (inputs.q, inputs.k, inputs.v, inputs.d_out, inputs.y))
    d_out = d_out * inputs.factor
    states, d_states, new = (x.astype(jnp.float32) for x in (inputs.states, inputs.d_states, inputs.new.mT))
    total, beta, grown, rest = (gates[..., row, :] for row in (TOTAL, BETA, GROWN, REST))
    index = jnp.arange(CHUNK)
    visible = index[:, None] >= index
    if first is not None:
        visible = visible & (first[:, None, :, :, None] <= index)
    decay = jnp.where(visible, jnp.exp(jnp.where(visible, total[..., :, None] - total[..., None, :], 0)), 0)
    d_scores = decay * scale * (d_out @ new.mT)
    d_below = -jnp.tril(decay * (y @ new.mT), -1)
    d_q = (grown * scale)[..., None] * (d_out @ states) + d_scores @ k
    read = d_below @ k - grown[..., None] * (y @ states)
    wrote = d_scores.mT @ q + (beta[..., None] * d_below).mT @ k
    kept = rest[..., None] * (new @ d_states)
    d_k = beta[..., None] * read + wrote + kept
    d_beta = (k * read).sum(-1) + (y * v).sum(-1)
    k_kept = (k * kept).sum(-1)
    d_total = (q * d_q).sum(-1) + beta * (k * read).sum(-1) - (k * wrote).sum(-1) - k_kept
    d_total = d_total.at[..., -1].add(k_kept.sum(-1) + grown[..., -1] * (states * d_states).sum((-2, -1)))

    def join(x: jax.Array, count: int, dtype: jnp.dtype) -> jax.Array:
        """[B, N, n, C, ...] -> [B, T, count, ...], summed over the heads of a group."""
        x = x.reshape(batch, count, -1, *x.shape[2:]).sum(2) / inputs.factor
        return jnp.moveaxis(x, 1, 3).reshape(batch, -1, count, x.shape[-1])[:, :tokens].astype(dtype)

    d_q, d_k = (join(x, key_heads, inputs.v.dtype) for x in (d_q, d_k))
    d_v = join(beta[..., None] * y, heads, inputs.v.dtype)
    return d_q, d_k, d_v, jnp.stack((d_total, d_beta))
