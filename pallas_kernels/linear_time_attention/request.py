"""Checked arguments of a call of linear attention.

Dims: B batch, T query length, S key length, N query heads, K key and value heads, H head dim, F features.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import AnyArray
from pallas_kernels.attention.request import check_arrays
from pallas_kernels.linear_time_attention.features import FeatureMap
from pallas_kernels.linear_time_attention.state import LinearState
from pallas_kernels.sequence_parts import find_documents
from pallas_kernels.target import Target, current_target


@dataclass(frozen=True)
class LinearAttentionRequest:
    """Checked arguments of one call of linear attention: arrays, feature map, documents and earlier state.

    Attributes:
        q, k, v: [B, T, N, H], [B, S, K, H], [B, S, K, H]; arrays or shape structs.
        feature_map: map of queries and keys to features.
        causal: True if a query sees no key after its position; then T = S.
        documents: document numbers, int32 [B, T], or None.
        hidden: boolean [B, T], True for keys that no query sees, or None.
        state: sums over earlier tokens, which belong to the first document; None if there are none.
        chunk: number of tokens per chunk; None leaves it to the backend.
        target: the device that the call is lowered for.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    feature_map: FeatureMap
    causal: bool
    documents: jax.Array | None
    hidden: jax.Array | None
    state: LinearState | None
    chunk: int | None
    target: Target

    def __str__(self) -> str:
        words = [f"q {list(self.q.shape)} k {list(self.k.shape)} {self.q.dtype.name}"]
        words.append("causal" if self.causal else "full")
        if self.documents is not None:
            words.append("segments")
        if self.state is not None:
            words.append("with a state")
        return " ".join([*words, "on", str(self.target)])


def make_request(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    feature_map: FeatureMap,
    causal: bool,
    segment_ids: AnyArray | None,
    state: LinearState | None,
    chunk: int | None,
) -> LinearAttentionRequest:
    """Check the arguments of a call of linear attention, and return them in one object.

    Raises:
        ValueError: an argument breaks a rule; the message gives the rule, the values and the way out.
    """
    q = jnp.asarray(q)
    k = jnp.asarray(k)
    v = jnp.asarray(v)
    check_arrays(q, k, v)
    if (causal or segment_ids is not None) and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"causal linear attention, and any with segment_ids, needs T = S; got T {q.shape[1]}, S {k.shape[1]}; "
            f"pass the earlier tokens in `state`"
        )
    if state is not None and not causal:
        raise ValueError("a state contains the keys before the queries, which needs causal=True; give state=None")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk must be a Python integer of at least 1, or None; got {chunk!r}")
    documents = hidden = None
    if segment_ids is not None:
        documents, hidden = find_documents(jnp.asarray(segment_ids), k.shape[:2])
    return LinearAttentionRequest(q, k, v, feature_map, bool(causal), documents, hidden, state, chunk, current_target())
