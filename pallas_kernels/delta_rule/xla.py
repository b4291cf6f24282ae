"""The gated delta rule in chunks of tokens (Yang et al., arXiv:2412.06464): matmuls within, a recurrence between them.

With G the sum of log decays within a chunk, and A_ij = beta_i (k_i . k_j) e^(G_i - G_j) for j < i, the values that the
tokens of a chunk add to the state are V' = (I + A)^-1 (beta (v - e^G (k S))), where S is the state before the chunk. So
o = e^G q S + (q k^T e^(G_i - G_j), j <= i) V' and the next state is e^(G_C) S + (e^(G_C - G) k)^T V'. Exponents are
differences that are never positive. State, decays and sums are float32.

Dims: n chunks of C tokens, G = N // K value heads per key head, D key width, V value width. Chunks lead, for the scan.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.delta_rule.request import DeltaRuleRequest
from pallas_kernels.sequence_parts import in_chunks

_CHUNK = 64


class _Chunks(NamedTuple):
    """Inputs of the recurrence over n chunks: [n, B, K, G, C, ...]."""

    values: jax.Array
    """(I + A)^-1 beta v: what the tokens would add to an empty state. [..., C, V]."""
    readers: jax.Array
    """(I + A)^-1 beta e^G k: reads what the state already has of them. [..., C, D]."""
    queries: jax.Array
    """e^G q: reads the state before the chunk. [..., C, D]."""
    inside: jax.Array
    """Scores of queries and keys within the chunk. [..., C, C]."""
    keys: jax.Array
    """e^(G_C - G) k: writes to the state after the chunk. [..., C, D]."""
    kept: jax.Array
    """e^(G_C): what is kept of the state, 0 if the last token is of another document. [n, B, K, G]."""


def apply(request: DeltaRuleRequest) -> tuple[Float[Array, "B T N V"], Float[Array, "B N D V"]]:
    """Return the outputs [B, T, N, V] in the dtype of v, and the state [B, N, D, V] after the last token."""

    def compute(
        q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array, state: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        chunks = _within_chunks(request, q, k, v, log_decay, beta)
        batch, heads, *widths = state.shape
        state = state.reshape(batch, k.shape[2], -1, *widths)
        last, out = jax.lax.scan(_next_chunk, state, chunks)
        out = jnp.moveaxis(out, (0, 4), (1, 2))  # [B, n, C, K, G, V]
        return out.reshape(batch, -1, *v.shape[2:])[:, : v.shape[1]].astype(v.dtype), last.reshape(
            batch, heads, *widths
        )

    # The backward recomputes everything within chunks: saved, it would be many times the size of q, k and v.
    arrays = (request.q, request.k, request.v, request.log_decay, request.beta, request.state)
    return jax.checkpoint(compute)(*arrays)


def _next_chunk(state: jax.Array, chunk: _Chunks) -> tuple[jax.Array, jax.Array]:
    """Add a chunk to the state [B, K, G, D, V]; return it, and the outputs [B, K, G, C, V]."""
    new = chunk.values - chunk.readers @ state
    out = chunk.queries @ state + chunk.inside @ new
    return chunk.kept[..., None, None] * state + chunk.keys.mT @ new, out


def _within_chunks(
    request: DeltaRuleRequest, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> _Chunks:
    """Compute all that does not depend on the state, for all chunks at a time."""
    dtype = beta.dtype
    chunk = min(_CHUNK, v.shape[1])
    # On a CPU XLA does not support some of the matmuls in bfloat16.
    operand = dtype if request.target.platform == "cpu" else v.dtype

    def split(x: jax.Array) -> jax.Array:
        """[B, T, K or N, ...] -> [n, B, K, 1 or G, C, ...]; zeros fill the last chunk, and change nothing."""
        x = in_chunks(x, chunk)
        x = x.reshape(*x.shape[:3], k.shape[2], -1, *x.shape[4:])
        return jnp.moveaxis(x, (1, 2), (0, 4))

    q, k = (split(x).astype(operand) for x in (q, k))
    v, log_decay, beta = (split(x) for x in (v, log_decay, beta))
    total = jnp.cumsum(log_decay, -1)
    difference = total[..., :, None] - total[..., None, :]
    visible = jnp.tril(jnp.ones((chunk, chunk), bool))
    grown = jnp.exp(total)
    rest = jnp.exp(total[..., -1:] - total)
    if request.documents is not None:
        documents = jnp.moveaxis(in_chunks(request.documents, chunk, "edge"), 1, 0)[:, :, None, None]  # [n, B, 1, 1, C]
        last = documents[..., -1:]
        before = jnp.concatenate((documents[:1, ..., :1], last[:-1]))  # the document of the state
        visible = visible & (documents[..., :, None] == documents[..., None, :])
        grown = jnp.where(documents == before, grown, 0)
        rest = jnp.where(documents == last, rest, 0)
    decay = jnp.exp(jnp.where(visible, difference, -jnp.inf))
    scores = jnp.einsum("...id,...jd->...ij", k, k, preferred_element_type=dtype)
    solved = _inverse_of_unit_lower(jnp.tril(beta[..., None] * scores * decay, -1))
    inside = jnp.einsum("...id,...jd->...ij", q, k, preferred_element_type=dtype) * decay * request.scale
    wide_k = k.astype(dtype)
    return _Chunks(
        solved @ (beta[..., None] * v),
        solved @ ((beta * grown)[..., None] * wide_k),
        q.astype(dtype) * (grown * request.scale)[..., None],
        inside,
        wide_k * rest[..., None],
        grown[..., -1],
    )


@jax.custom_vjp
def _inverse_of_unit_lower(below: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
    """Return (I + A)^-1 for A below the diagonal, by inverting blocks on the diagonal of twice the size each time.

    [[P, 0], [A, Q]] has the inverse [[P^-1, 0], [-Q^-1 A P^-1, Q^-1]], so that all are matmuls of the whole matrix.
    """
    size = below.shape[-1]
    row, column = jnp.arange(size)[:, None], jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=below.dtype), below.shape)
    block = 1
    while block < size:
        between = (row // (2 * block) == column // (2 * block)) & (row // block > column // block)
        part = jnp.where(between, below, 0)
        inverse = inverse - _multiply(_multiply(inverse, part), inverse)
        block *= 2
    return inverse


def _inverse_backward(inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    return (-jnp.tril(_multiply(_multiply(inverse.mT, gradient), inverse.mT), -1),)


def _multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)  # errors of tf32 would grow from block to block


def _inverse_forward(below: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = _inverse_of_unit_lower(below)
    return inverse, inverse


_inverse_of_unit_lower.defvjp(_inverse_forward, _inverse_backward)
