"""Checked arguments of an attention call, by which backends decide whether they support it.

Dims: B batch, T query length, S key length, N query heads, K key and value heads, H head dim.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32

from pallas_kernels.array_types import AnyArray
from pallas_kernels.attention.masks import Mask
from pallas_kernels.target import Target, current_target

FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")


SegmentIds = Int[AnyArray, "B T"] | tuple[Int[AnyArray, "B T"], Int[AnyArray, "B S"]]
"""Segment ids as callers give them: (query, key), or one array for both."""


Gradients = tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]
"""dQ, dK and dV."""


class Segments(NamedTuple):
    """Segment ids (int32) of packed documents: a query sees only keys with its own id."""

    query: jax.Array  # [B, T]
    key: jax.Array  # [B, S]

    def global_tokens(self, mask: Mask) -> tuple[Bool[Array, "B T"], Bool[Array, "B S"]] | None:
        """Return which tokens are global (the first ones of each document): bool [B, T] for queries, [B, S] for keys.

        These are the first `mask.global_tokens` tokens of each document. None if the mask has no global tokens.
        """
        if not mask.global_tokens:
            return None
        query, key = (_position_in_document(ids) < mask.global_tokens for ids in self)
        return query, key


def _position_in_document(ids: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
    """Return each token's position within its document: how many tokens directly before it have the same id."""
    places = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    starts = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return places - jax.lax.cummax(jnp.where(starts, places, 0), axis=1)


@dataclass(frozen=True)
class Options:
    """Static (hashable) arguments of an attention call: mask, scale and soft cap."""

    mask: Mask
    scale: float
    soft_cap: float | None = None


@dataclass(frozen=True)
class AttentionRequest:
    """Checked arguments of one attention call: arrays, segment ids, options and the device to compile for.

    Attributes:
        q, k, v: [B, T, N, H], [B, S, K, H], [B, S, K, V], with V at most H; arrays or shape structs.
        segments: segment ids; None without packed documents.
        options: mask, scale and soft cap.
        return_lse: True if the log-sum-exp is an output.
        target: the device that the call is lowered for.
        sinks: float32 [N], one more score of each query of a head, without a value; None: there are none.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    segments: Segments | None
    options: Options
    return_lse: bool
    target: Target
    sinks: jax.Array | None = None

    @property
    def query_length(self) -> int:
        """Number of queries per sequence, T."""
        return self.q.shape[1]

    @property
    def key_length(self) -> int:
        """Number of keys per sequence, S."""
        return self.k.shape[1]

    @property
    def head_dim(self) -> int:
        """Size of a head, H."""
        return self.q.shape[3]

    @property
    def value_dim(self) -> int:
        """Size of a head of values, V."""
        return self.v.shape[3]

    def with_padded_values(self) -> "AttentionRequest":
        """Return the request with values as wide as keys; the first V channels of its outputs are those of this one."""
        return dataclasses.replace(self, v=pad_values(self.k, self.v))

    def __str__(self) -> str:
        words = [f"q {list(self.q.shape)} k {list(self.k.shape)} {self.q.dtype.name}", str(self.options.mask)]
        if self.value_dim != self.head_dim:
            words.append(f"values of {self.value_dim}")
        if self.segments is not None:
            words.append("segments")
        if self.options.soft_cap is not None:
            words.append(f"soft cap {self.options.soft_cap:g}")
        if self.sinks is not None:
            words.append("sinks")
        if self.return_lse:
            words.append("with log-sum-exp")
        return " ".join([*words, "on", str(self.target)])


def make_request(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    *,
    mask: Mask,
    segment_ids: SegmentIds | None,
    scale: float | None,
    soft_cap: float | None,
    return_lse: bool,
    sinks: Float[AnyArray, " N"] | None = None,
) -> AttentionRequest:
    """Check the arguments of an attention call and return them in one object, with the default scale filled in.

    Raises:
        ValueError: an argument breaks a rule; the message gives the rule, the values and the way out.
    """
    q = jnp.asarray(q)
    k = jnp.asarray(k)
    v = jnp.asarray(v)
    check_arrays(q, k, v)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    if soft_cap is not None and not _static_number("soft_cap", soft_cap) > 0:
        raise ValueError(f"soft_cap must be greater than 0, got {soft_cap}; give None for no cap")
    options = Options(mask, _static_number("scale", scale), None if soft_cap is None else float(soft_cap))
    segments = _check_segments(segment_ids, q, k)
    if mask.global_tokens and segments is not None and q.shape[1] != k.shape[1]:
        raise ValueError(
            f"with segment_ids the global tokens are the first of each document, which needs T = S; "
            f"got T {q.shape[1]}, S {k.shape[1]}; give all queries, or no segment_ids"
        )
    sinks = None if sinks is None else check_sinks(sinks, q)
    return AttentionRequest(q, k, v, segments, options, bool(return_lse), current_target(), sinks)


def check_window(window: int) -> int:
    """Check that an attention window is a positive integer known while tracing; return it as a Python integer.

    Raises:
        ValueError: it is not an integer known while tracing, or is below 1.
    """
    if not is_static_integer(window):
        raise ValueError(f"window must be a Python integer, known while tracing; got {window!r}")
    if window < 1:
        raise ValueError(
            f"window counts the keys that a query sees, itself included, so it must be at least 1; "
            f"got {window}; give None for no window"
        )
    return int(window)


def check_sinks(sinks: Float[AnyArray, " N"], q: jax.Array) -> Float[Array, " N"]:
    """Check that there is one attention sink for each query head of q [B, T, N, H].

    Returns them in float32, or float64 for float64 queries.

    Raises:
        ValueError: the shape is not [N], or the dtype is no floating-point type.
    """
    sinks = jnp.asarray(sinks)
    if sinks.shape != q.shape[2:3] or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(
            f"sinks must be a floating-point array [{q.shape[2]}], one score for each query head; got {sinks.dtype} "
            f"{list(sinks.shape)}"
        )
    return sinks.astype(jnp.promote_types(q.dtype, jnp.float32))


def is_static_integer(value: object) -> bool:
    """Return True if the value is an integer known while tracing; numpy integers count, booleans do not."""
    return hasattr(value, "__index__") and not isinstance(value, bool | jax.Array)


def _static_number(name: str, value: float) -> float:
    if isinstance(value, jax.Array):
        raise ValueError(f"{name} must be a Python number, known while tracing; got {value}")
    return float(value)


def check_arrays(q: jax.Array, k: jax.Array | jax.ShapeDtypeStruct, v: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Check that the shapes and dtypes of q [B, T, N, H] and k, v [B, S, K, H] fit together.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    shapes = f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q must be [B, T, N, H] and k, v [B, S, K, H]; {shapes}; add the missing dims of size 1")
    if k.shape[:3] != v.shape[:3] or v.shape[3] > k.shape[3]:
        raise ValueError(f"k and v must have the same shape, but that heads of v may be narrower; {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same batch size and head dim; {shapes}")
    if 0 in q.shape or 0 in k.shape:
        raise ValueError(f"no dim may be 0; {shapes}")
    if q.shape[2] % k.shape[2] != 0:
        raise ValueError(
            f"the number of query heads ({q.shape[2]}) must be a multiple of the number of key heads "
            f"({k.shape[2]}); {shapes}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype; got {q.dtype}, {k.dtype}, {v.dtype}; cast them first")
    if q.dtype.name not in FLOAT_DTYPES:
        raise ValueError(f"q, k and v must be one of {', '.join(FLOAT_DTYPES)}; got {q.dtype}; cast them first")


def pad_values(k: AnyArray, v: Float[AnyArray, "B S K V"]) -> Float[Array, "B S K H"]:
    """Pad the heads of v with zeros to the width of those of k, with which the first V channels of outputs are exact.

    Arrays that do not fit are returned unchanged, for the check of arguments to refuse.
    """
    v = jnp.asarray(v)
    missing = jnp.shape(k)[-1] - v.shape[-1] if v.ndim == 4 and jnp.ndim(k) == 4 else 0
    return jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing > 0 else v


def _check_segments(segment_ids: SegmentIds | None, q: jax.Array, k: jax.Array) -> Segments | None:
    if segment_ids is None:
        return None
    pair = segment_ids if isinstance(segment_ids, (tuple, list)) else (segment_ids, segment_ids)
    if len(pair) != 2:
        raise ValueError(f"segment_ids must be one array or (query ids, key ids); got {len(pair)} arrays")
    query = jnp.asarray(pair[0])
    key = jnp.asarray(pair[1])
    for name, ids, like in (("query", query, q), ("key", key, k)):
        expected = like.shape[:2]
        if ids.shape != expected:
            way_out = "" if isinstance(segment_ids, (tuple, list)) else "; give a pair where T and S differ"
            raise ValueError(
                f"the {name} segment ids must have shape {list(expected)} (batch, {name} length); "
                f"got {list(ids.shape)}{way_out}"
            )
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(f"the {name} segment ids must be integers; got {ids.dtype}")
    return Segments(query.astype(jnp.int32), key.astype(jnp.int32))
