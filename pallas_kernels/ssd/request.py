"""Checked arguments of a call of `ssd`.

Dims: B batch, T length, N heads, P channels of a head, G groups of heads, S state width.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.array_types import AnyArray
from pallas_kernels.attention.request import FLOAT_DTYPES
from pallas_kernels.sequence_parts import find_documents
from pallas_kernels.target import Target, current_target


@dataclass(frozen=True)
class SsdRequest:
    """Checked arguments of one call of `ssd`: arrays, documents, and the state before the first token.

    Attributes:
        x: [B, T, N, P].
        dt: [B, T, N] in the dtype of the sums, 0 for padding.
        decay: logarithm of the factor of the state at each token, dt x a, [B, T, N] in the same dtype.
        b, c: [B, T, G, S] in the dtype of x.
        state: [B, N, P, S] in the dtype of the sums; zeros if the caller gave none.
        documents: document numbers, int32 [B, T], or None.
        chunk: number of tokens per chunk; None leaves it to the backend.
        target: the device that the call is lowered for.
    """

    x: jax.Array
    dt: jax.Array
    decay: jax.Array
    b: jax.Array
    c: jax.Array
    state: jax.Array
    documents: jax.Array | None
    chunk: int | None
    target: Target

    def __str__(self) -> str:
        words = [f"x {list(self.x.shape)} b {list(self.b.shape)} {self.x.dtype.name}"]
        if self.documents is not None:
            words.append("segments")
        return " ".join([*words, "on", str(self.target)])


def make_request(
    x: AnyArray,
    dt: AnyArray,
    a: AnyArray,
    b: AnyArray,
    c: AnyArray,
    *,
    segment_ids: AnyArray | None,
    state: AnyArray | None,
    chunk: int | None,
) -> SsdRequest:
    """Check the arguments of a call of `ssd`, and return them in one object.

    Raises:
        ValueError: an argument breaks a rule; the message gives the rule, the values and the way out.
    """
    x, dt, a, b, c = (jnp.asarray(array) for array in (x, dt, a, b, c))
    _check_arrays(x, dt, a, b, c)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    heads = (x.shape[0], x.shape[2], x.shape[3], b.shape[3])
    if state is not None and jnp.shape(state) != heads:
        raise ValueError(f"state must be [B, N, P, S] {list(heads)}; got {list(jnp.shape(state))}")
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk must be a Python integer of at least 1, or None; got {chunk!r}")
    dt = dt.astype(wide)
    documents = None
    if segment_ids is not None:
        documents, hidden = find_documents(jnp.asarray(segment_ids), x.shape[:2])
        dt = jnp.where(hidden[..., None], 0, dt)
    start = jnp.zeros(heads, wide) if state is None else jnp.asarray(state).astype(wide)
    return SsdRequest(x, dt, dt * a.astype(wide), b, c, start, documents, chunk, current_target())


def _check_arrays(x: jax.Array, dt: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> None:
    shapes = f"got x {list(x.shape)}, dt {list(dt.shape)}, a {list(a.shape)}, b {list(b.shape)}, c {list(c.shape)}"
    if x.ndim != 4 or dt.shape != x.shape[:3] or a.shape != x.shape[2:3]:
        raise ValueError(f"x must be [B, T, N, P], dt [B, T, N] and a [N]; {shapes}")
    if b.ndim != 4 or b.shape[:2] != x.shape[:2] or b.shape != c.shape:
        raise ValueError(f"b and c must be [B, T, G, S], with the B and T of x; {shapes}")
    if 0 in x.shape or 0 in b.shape:
        raise ValueError(f"no dim may be 0; {shapes}")
    if x.shape[2] % b.shape[2]:
        raise ValueError(f"the heads ({x.shape[2]}) must be a multiple of the groups ({b.shape[2]}); {shapes}")
    if not x.dtype == b.dtype == c.dtype:
        raise ValueError(f"x, b and c must have one dtype; got {x.dtype}, {b.dtype}, {c.dtype}; cast them first")
    if x.dtype.name not in FLOAT_DTYPES:
        raise ValueError(f"x, b and c must be one of {', '.join(FLOAT_DTYPES)}; got {x.dtype}; cast them first")
