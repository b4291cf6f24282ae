"""The gated delta rule in chunks of tokens (Yang et al., arXiv:2412.06464): matmuls within, a recurrence between them.

With G the sum of log decays within a chunk, and A_ij = beta_i (k_i . k_j) e^(G_i - G_j) for j < i, the values that the
tokens of a chunk add to the state are V' = (I + A)^-1 (beta (v - e^G (k S))), where S is the state before the chunk. So
o = e^G q S + (q k^T e^(G_i - G_j), j <= i) V' and the next state is e^(G_C) S + (e^(G_C - G) k)^T V'. Exponents are
differences that are never positive. State, decays and sums are float32.

With a decay for each key channel (Kimi Delta Attention, arXiv:2510.26692) the products of keys, and of queries and
keys, are sums over the channels d of q_id k_jd e^(G_id - G_jd), see `_products_by_channel`.

Dims: n chunks of C tokens, G = N // K value heads per key head, D key width, V value width, W = 1 or D decays of a
head. Chunks lead, for the scan.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

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
    """e^(G_C): what is kept of the state, 0 if the last token is of another document. [..., W]."""


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
    return chunk.kept[..., None] * state + chunk.keys.mT @ new, out


def _within_chunks(
    request: DeltaRuleRequest, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array
) -> _Chunks:
    """Compute all that does not depend on the state, for all chunks at a time."""
    dtype = beta.dtype
    chunk = min(_CHUNK, 1 << (v.shape[1] - 1).bit_length())  # a power of two
    # On a CPU XLA does not support some of the matmuls in bfloat16.
    operand = dtype if request.target.platform == "cpu" else v.dtype

    def split(x: jax.Array) -> jax.Array:
        """[B, T, K or N, ...] -> [n, B, K, 1 or G, C, ...]; zeros fill the last chunk, and change nothing."""
        x = in_chunks(x, chunk)
        x = x.reshape(*x.shape[:3], k.shape[2], -1, *x.shape[4:])
        return jnp.moveaxis(x, (1, 2), (0, 4))

    q, k = (split(x).astype(operand) for x in (q, k))
    v, log_decay, beta = (split(x) for x in (v, log_decay, beta))
    visible = jnp.tril(jnp.ones((chunk, chunk), bool))
    documents = None
    if request.documents is not None:
        documents = jnp.moveaxis(in_chunks(request.documents, chunk, "edge"), 1, 0)[:, :, None, None]  # [n, B, 1, 1, C]
        visible = visible & (documents[..., :, None] == documents[..., None, :])
    products = _products if log_decay.ndim == beta.ndim else _products_by_channel
    scores, inside, since, until = products(q, k, log_decay.reshape(*beta.shape, -1), visible)
    grown, rest = jnp.exp(since), jnp.exp(until)
    if documents is not None:
        last = documents[..., -1:]
        before = jnp.concatenate((documents[:1, ..., :1], last[:-1]))  # the document of the state
        grown = jnp.where((documents == before)[..., None], grown, 0)
        rest = jnp.where((documents == last)[..., None], rest, 0)
    solved = _inverse_of_unit_lower(jnp.tril(beta[..., None] * scores, -1))
    wide_k = k.astype(dtype)
    return _Chunks(
        solved @ (beta[..., None] * v),
        solved @ (beta[..., None] * grown * wide_k),
        q.astype(dtype) * (grown * request.scale),
        inside * request.scale,
        wide_k * rest,
        grown[..., -1, :],
    )


class _Products(NamedTuple):
    """Products of the tokens of a chunk with each other, and sums of their decays, for each value head."""

    scores: Float[Array, "*heads C C"]
    """k_i . k_j e^(G_i - G_j) where j <= i is a token of i's document, 0 elsewhere."""
    inside: Float[Array, "*heads C C"]
    """q_i . k_j e^(G_i - G_j), likewise."""
    since: Float[Array, "*heads C W"]
    """G_i, the sum of the log decays of the chunk's tokens up to i."""
    until: Float[Array, "*heads C W"]
    """G_C - G_i, that of the tokens after it."""


def _products(
    q: Float[Array, "*groups C D"],
    k: Float[Array, "*groups C D"],
    log_decay: Float[Array, "*heads C 1"],
    visible: Bool[Array, "*documents C C"],
) -> _Products:
    """Compute the products within chunks for one decay a head, by which a product of all channels is multiplied."""
    total = jnp.cumsum(log_decay, -2)
    decay = jnp.exp(jnp.where(visible, total - total.mT, -jnp.inf))
    scores, inside = (
        jnp.einsum("...id,...jd->...ij", x, k, preferred_element_type=total.dtype) * decay for x in (k, q)
    )
    return _Products(scores, inside, total, total[..., -1:, :] - total)


def _products_by_channel(
    q: Float[Array, "*groups C D"],
    k: Float[Array, "*groups C D"],
    log_decay: Float[Array, "*heads C D"],
    visible: Bool[Array, "*documents C C"],
) -> _Products:
    """Compute the products within chunks for a decay of each key channel, between halves of ever larger blocks.

    A token in the right half of a block and one in the left half are apart by the decays from the left one to the end
    of its half, and from there to the right one: two factors of at most 1, by which keys and queries are multiplied
    before the matmul. These sums of decays are never differences, whose errors would be those of larger sums. Matmuls
    of seven dims would crash XLA of jax 0.10 on a CPU.
    """
    size = k.shape[-2]
    q, k = (jnp.broadcast_to(x.astype(log_decay.dtype), log_decay.shape) for x in (q, k))
    found = [jnp.eye(size, dtype=k.dtype) * (rows * k).sum(-1)[..., None] for rows in (k, q)]
    for block in (2**level for level in range((size - 1).bit_length())):
        left, right = _halves(log_decay, block)
        keys = _halves(k, block)[0] * jnp.exp(_sums_after(left))
        since = jnp.exp(_sums_up_to(right))
        for at, rows in enumerate((k, q)):
            part = (_halves(rows, block)[1] * since) @ keys.mT
            part = part.reshape(*k.shape[:-2], -1, 1, block, 1, block)
            part = jnp.broadcast_to(part, (*part.shape[:-4], 2, block, size // block, block))
            part = part.reshape(*k.shape[:-1], size)
            found[at] = found[at] + jnp.where(_between_halves(size, block), part, 0)
    scores, inside = (jnp.where(visible, x, 0) for x in found)
    return _Products(scores, inside, _sums_up_to(log_decay), _sums_after(log_decay))


def _halves(x: Float[Array, "*n H C W"], block: int) -> tuple[jax.Array, jax.Array]:
    """Return the left and the right halves [..., pairs, block, W] of pairs of blocks, the pairs of all H together."""
    x = x.reshape(*x.shape[:-3], -1, 2, block, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _sums_up_to(x: Float[Array, "*n C W"]) -> Float[Array, "*n C W"]:
    return _multiply(jnp.tril(jnp.ones((x.shape[-2], x.shape[-2]), x.dtype)), x)


def _sums_after(x: Float[Array, "*n C W"]) -> Float[Array, "*n C W"]:
    return _multiply(jnp.triu(jnp.ones((x.shape[-2], x.shape[-2]), x.dtype), 1), x)


def _between_halves(size: int, block: int) -> Bool[Array, "C C"]:
    """Return a mask of the pairs of a token in the right half, and one in the left, of each pair of blocks."""
    row, column = jnp.arange(size)[:, None], jnp.arange(size)
    return (row // (2 * block) == column // (2 * block)) & (row // block > column // block)


@jax.custom_vjp
def _inverse_of_unit_lower(below: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
    """Return (I + A)^-1 for A below the diagonal, by inverting blocks on the diagonal of twice the size each time.

    [[P, 0], [A, Q]] has the inverse [[P^-1, 0], [-Q^-1 A P^-1, Q^-1]], so that all are matmuls of the whole matrix.
    """
    size = below.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=below.dtype), below.shape)
    block = 1
    while block < size:
        part = jnp.where(_between_halves(size, block), below, 0)
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
