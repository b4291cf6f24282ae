"""The state space layer in chunks of tokens: matmuls within a chunk, a state from chunk to chunk (SSD, section 6).

With L the sum of dt a from the start of the chunk, y_i = sum_(j <= i) (C_i . B_j) exp(L_i - L_j) dt_j x_j
+ exp(L_i) h C_i, where h is the state before the chunk. Only differences of L between tokens of one chunk are
exponentiated, so that nothing overflows. All chunks are computed at once, but for a scan over their states.

Dims: n chunks of C tokens, R = N // G heads of a group.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.sequence_parts import in_chunks
from pallas_kernels.ssd.request import SsdRequest

_SHORTEST_CHUNK = 64
_LONGEST_CHUNK = 256


def compute(request: SsdRequest) -> tuple[Float[Array, "B T N P"], Float[Array, "B N P S"]]:
    """Return the outputs [B, T, N, P] in the dtype of x, and the state after the last token [B, N, P, S]."""

    # The backward recomputes decays, scores and states: saved, they would be many times the size of the inputs.
    @jax.checkpoint
    def run(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _compute(request, *arrays)

    return run(request.x, request.dt, request.decay, request.b, request.c, request.state)


def _compute(
    request: SsdRequest,
    x: jax.Array,
    dt: jax.Array,
    decay: jax.Array,
    b: jax.Array,
    c: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    shape = x.shape
    wide = dt.dtype
    size = min(request.chunk or _chunk(shape[-1], b.shape[-1]), shape[1])
    # On a CPU XLA does not support some of the matmuls in bfloat16.
    narrow = wide if request.target.platform == "cpu" else x.dtype
    options = {"preferred_element_type": wide, "precision": "highest" if narrow == wide else None}
    groups = b.shape[2]
    x, dt, decay, b, c = (in_chunks(z, size) for z in (x.astype(narrow), dt, decay, b.astype(narrow), c.astype(narrow)))
    x, dt, decay = (z.reshape(*z.shape[:3], groups, -1, *z.shape[4:]) for z in (x, dt, decay))  # [B, n, C, G, R, ...]
    state = state.reshape(shape[0], groups, -1, *state.shape[2:])
    total = jnp.cumsum(decay, axis=2)
    visible = jnp.tril(jnp.ones((size, size), bool))
    ends = jnp.exp(total[:, :, -1:] - total) * dt  # what a token's B x^T is multiplied by in the state after its chunk
    seen = jnp.exp(total)  # what the state before the chunk is multiplied by for a token
    keep = seen[:, :, -1]
    if request.documents is not None:
        documents = in_chunks(request.documents, size, "edge")
        first = documents[..., 0]
        last = documents[..., -1]
        before = jnp.concatenate([first[:, :1], last[:, :-1]], axis=1)
        visible = visible & (documents[..., :, None] == documents[..., None, :])
        ends = jnp.where((documents == last[..., None])[..., None, None], ends, 0)
        seen = jnp.where((documents == before[..., None])[..., None, None], seen, 0)
        keep = jnp.where(((first == last) & (first == before))[..., None, None], keep, 0)
        visible = visible[:, :, None, None]
    by_head = jnp.moveaxis(total, 2, -1)  # [B, n, G, R, C]
    differences = jnp.where(visible, by_head[..., :, None] - by_head[..., None, :], -jnp.inf)
    scores = jnp.einsum("bnigs,bnjgs->bngij", c, b, **options)[:, :, :, None]
    scores = scores * jnp.exp(differences) * jnp.moveaxis(dt, 2, -1)[..., None, :]
    y = jnp.einsum("bngrij,bnjgrp->bnigrp", scores.astype(narrow), x, **options)
    added = jnp.einsum("bnjgrp,bnjgs->bngrps", (x * ends[..., None]).astype(narrow), b, **options)
    starts, end = _states(state, added, keep)
    y = y + seen[..., None] * jnp.einsum("bnigs,bngrps->bnigrp", c, starts.astype(narrow), **options)
    y = y.reshape(shape[0], -1, *shape[2:])[:, : shape[1]]
    return y.astype(request.x.dtype), end.reshape(request.state.shape)


def _states(state: jax.Array, added: jax.Array, keep: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the states before all chunks [B, n, G, R, P, S], and the state after the last one.

    Args:
        state: before the first chunk, [B, G, R, P, S].
        added: what the tokens of each chunk add to the state after it, [B, n, G, R, P, S].
        keep: the factor of the state from before the chunk, [B, n, G, R].
    """

    def step(state: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        added, keep = chunk
        return state * keep[..., None, None] + added, state

    end, starts = jax.lax.scan(step, state, (jnp.moveaxis(added, 1, 0), jnp.moveaxis(keep, 1, 0)))
    return jnp.moveaxis(starts, 0, 1), end


def _chunk(channels: int, width: int) -> int:
    """Return how many tokens a chunk should have: the power of two that minimises memory traffic.

    Scores within chunks take T x C numbers, states T / C x P x S.
    """
    balanced = 2 ** round(math.log2(math.sqrt(channels * width)))
    return max(_SHORTEST_CHUNK, min(_LONGEST_CHUNK, balanced))
