"""Checked arguments of a call of the gated delta rule.

Dims: B batch, T tokens, K key heads, N value heads, D key width, V value width.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import AnyArray
from pallas_kernels.attention.request import FLOAT_DTYPES
from pallas_kernels.sequence_parts import find_documents
from pallas_kernels.target import Target, current_target


@dataclass(frozen=True)
class DeltaRuleRequest:
    """Checked arguments of one call of the gated delta rule: arrays, documents and earlier state.

    Attributes:
        q, k: [B, T, K, D]; arrays or shape structs.
        v: [B, T, N, V].
        log_decay: float32 [B, T, N], or [B, T, N, D] for each key channel.
        beta: float32 [B, T, N].
        documents: document numbers that count up from 0, int32 [B, T], or None.
        state: float32 [B, N, D, V], the state of the first document before the first token.
        scale: factor of the queries.
        target: the device that the call is lowered for.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    documents: jax.Array | None
    state: jax.Array
    scale: float
    target: Target

    def __str__(self) -> str:
        words = [f"q, k {list(self.q.shape)} v {list(self.v.shape)} {self.v.dtype.name}"]
        if self.documents is not None:
            words.append("segments")
        return " ".join([*words, "on", str(self.target)])


def make_request(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    log_decay: AnyArray,
    beta: AnyArray,
    *,
    segment_ids: AnyArray | None,
    state: AnyArray | None,
    scale: float | None,
) -> DeltaRuleRequest:
    """Check the arguments of a call of the gated delta rule, and return them in one object.

    Raises:
        ValueError: an argument breaks a rule; the message gives the rule, the values and the way out.
    """
    q, k, v, log_decay, beta = (jnp.asarray(x) for x in (q, k, v, log_decay, beta))
    shapes = f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q and k must be [B, T, K, D] and v [B, T, N, V]; {shapes}; add the missing dims of size 1")
    if q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        raise ValueError(f"q and k must have one shape, and v the same batch and length; {shapes}")
    if 0 in q.shape or 0 in v.shape:
        raise ValueError(f"no dim may be 0; {shapes}")
    if v.shape[2] % k.shape[2]:
        raise ValueError(
            f"the number of value heads ({v.shape[2]}) must be a multiple of the number of key heads ({k.shape[2]})"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype.name not in FLOAT_DTYPES:
        raise ValueError(
            f"q, k and v must have one dtype of {', '.join(FLOAT_DTYPES)}; got {q.dtype}, {k.dtype}, {v.dtype}; cast "
            f"them first"
        )
    heads = v.shape[:3]
    channels = (*heads, k.shape[3])
    if log_decay.shape not in (heads, channels):
        raise ValueError(
            f"log_decay must be {list(heads)}, a number for each value head, or {list(channels)}, one for each of its "
            f"key channels; got {list(log_decay.shape)}"
        )
    if beta.shape != heads:
        raise ValueError(f"beta must be {list(heads)}, a number for each value head; got {list(beta.shape)}")
    wide = jnp.promote_types(v.dtype, jnp.float32)
    whole = (v.shape[0], v.shape[2], k.shape[3], v.shape[3])
    if state is None:
        state = jnp.zeros(whole, wide)
    if state.shape != whole:
        raise ValueError(f"state must be {list(whole)} (batch, value heads, key width, value width); got {state.shape}")
    documents = None
    if segment_ids is not None:
        documents, hidden = find_documents(jnp.asarray(segment_ids), v.shape[:2])
        hidden = hidden[..., None]
        beta = jnp.where(hidden, 0, beta)  # the state passes over it
        log_decay = jnp.where(hidden if log_decay.ndim == 3 else hidden[..., None], 0, log_decay)
    factor = k.shape[3] ** -0.5 if scale is None else scale
    log_decay, beta, state = (jnp.asarray(x, wide) for x in (log_decay, beta, state))
    return DeltaRuleRequest(q, k, v, log_decay, beta, documents, state, factor, current_target())
