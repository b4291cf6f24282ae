"""Attention to a sequence that lies on several devices: `ring_attention`, and `context_attention`, which chooses how.

Both are called inside of `jax.shard_map`, with this device's part of the sequence.

Dims: B batch, T this device's part of the length, N query heads, K key and value heads, H head dim.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.api import flash_attention
from pallas_kernels.attention.context_layout import chunks_per_device
from pallas_kernels.attention.gather_keys import KeyGather, attend_gathered, count_reached_chunks
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.part import PartOptions
from pallas_kernels.attention.request import check_arrays, check_window
from pallas_kernels.attention.ring import RingOptions, attend_ring
from pallas_kernels.attention.ulysses import unsupported_heads, with_whole_sequences
from pallas_kernels.dispatch import Backend, select

HIDING_LENGTH = 4096
"""A hop of the ring is hidden from so many tokens a device x N / K on.

A step is 2 T^2 N H multiplications and additions, its hop 4 T K H bytes in bfloat16: at 600 TFLOP/s and 300 GB/s they
take the same time where T N / K is 4000.
"""


@dataclasses.dataclass(frozen=True)
class ContextRequest:
    """One call, its rules checked; arrays or shape structs."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    ids: jax.Array | None
    axis_name: str
    devices: int
    layout: str
    mask: Mask
    options: PartOptions

    @property
    def chunk(self) -> int:
        return self.q.shape[1] // chunks_per_device(self.layout)

    @property
    def chunks(self) -> int:
        return self.devices * chunks_per_device(self.layout)

    def __str__(self) -> str:
        segments = " segments" if self.ids is not None else ""
        return (
            f"q {list(self.q.shape)} k {list(self.k.shape)} {self.q.dtype.name} on each of {self.devices} devices "
            f"({self.axis_name}), {self.layout}, {self.mask}{segments}"
        )


def _unsupported_open_window(request: ContextRequest) -> str | None:
    if request.mask.window is not None and not request.mask.causal:
        return f"takes a window only together with causal=True, got: {request.mask}; method='all_to_all' takes it"
    return None


def _ring_lower_priority(request: ContextRequest) -> str | None:
    if request.mask.window is not None:
        return None if _reach(request) < request.devices else "a window this long gets nearly all keys: in one go"
    length = request.q.shape[1] * request.q.shape[2] // request.k.shape[2]
    if length < HIDING_LENGTH:
        return (
            f"a step is over before its keys have arrived: from T N / K {HIDING_LENGTH} on, got {request.q.shape[1]} x "
            f"{request.q.shape[2]} / {request.k.shape[2]}"
        )
    return None


def _ulysses_lower_priority(request: ContextRequest) -> str | None:
    queries, keys = request.q.shape[2], request.k.shape[2]
    if request.mask.window is not None and request.mask.causal:
        return "a window needs few keys of other devices, not whole sequences"
    if queries + keys >= keys * request.devices:
        return (
            f"sends queries and outputs too, (N + K) / n of {request.devices} devices for each K that a gather sends; "
            f"got N {queries}, K {keys}"
        )
    return None


def _reach(request: ContextRequest) -> int:
    return count_reached_chunks(request.mask.window, request.chunk, request.chunks)


def _ring(request: ContextRequest) -> tuple[jax.Array, jax.Array]:
    if request.mask.window is not None:
        return _attend_gathered(request, use_all_gather=False)
    ring = RingOptions(request.axis_name, request.devices, request.mask.causal, request.layout, request.options)
    return attend_ring(ring, request.q, request.k, request.v, request.ids)


def _attend_gathered(request: ContextRequest, *, use_all_gather: bool = True) -> tuple[jax.Array, jax.Array]:
    plan = KeyGather(
        request.axis_name,
        request.devices,
        request.mask.causal,
        request.mask.window,
        request.layout,
        _reach(request),
        use_all_gather,
        request.options,
    )
    return attend_gathered(plan, request.q, request.k, request.v, request.ids)


def _attend_exchanged(request: ContextRequest) -> tuple[jax.Array, None]:
    options, mask = request.options, request.mask

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> jax.Array:
        out: Any = flash_attention(
            q, k, v, causal=mask.causal, window=mask.window, segment_ids=ids, **dataclasses.asdict(options)
        )
        return out

    arrays = request.q, request.k, request.v, request.ids
    return with_whole_sequences(attend, *arrays, axis_name=request.axis_name, layout=request.layout), None


METHODS = (
    Backend(
        "ring",
        "keys go around while the device computes; a window fetches from neighbours only: for long sequences",
        _unsupported_open_window,
        _ring,
        _ring_lower_priority,
    ),
    Backend(
        "all_to_all",
        "whole sequences for a part of the heads, where that sends less than gathering all keys",
        lambda request: unsupported_heads(request.q.shape[2], request.devices),
        _attend_exchanged,
        _ulysses_lower_priority,
    ),
    Backend("all_gather", "all keys in one go: for short sequences", _unsupported_open_window, _attend_gathered),
)
"""How attention is computed over a mesh axis, in the order in which it is chosen."""


def context_attention(  # noqa: PLR0913
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: str,
    method: str | None = None,
    causal: bool = True,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    layout: str = "zigzag",
    implementation: str | None = None,
) -> jax.Array:
    """`flash_attention` over a sequence that lies on the devices of a mesh axis, exactly, with its gradient.

    To be called inside of `jax.shard_map`: every array is this device's part of the sequence, in the order of
    `sequence_order(length, devices, layout)`. Masks mean positions in the whole sequence.

    Args:
        q: [B, T, N, H]; k, v: [B, T, K, H], as in `flash_attention`.
        axis_name: the mesh axis that the sequence is split over.
        method: a name of `METHODS` ("ring", "all_to_all", "all_gather"); None takes the first that supports the call
            and does not yield. A named one never falls back.
        causal, window, scale, soft_cap: as in `flash_attention`.
        segment_ids: integers [B, T], greater than -2**31.
        layout: "zigzag" (device i of n holds chunks i and 2n-1-i: equal work under a causal mask) or "contiguous".
        implementation: the backend of `flash_attention` that computes each part, by name; cuDNN cannot but by
            "all_to_all", as jax drops the gradient of its log-sum-exp.

    Returns:
        out [B, T, N, H] in the dtype of q.

    Raises:
        ValueError: an argument breaks a rule; `NotSupported` (a ValueError) where the named method cannot.
    """
    request = _make_request(q, k, v, segment_ids, axis_name, layout, Mask(bool(causal), window))
    request = dataclasses.replace(request, options=PartOptions(scale, soft_cap, implementation))
    return select("context_attention", METHODS, method, request).call(request)[0]


def ring_attention(  # noqa: PLR0913
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis_name: str,
    causal: bool = True,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    layout: str = "zigzag",
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`context_attention` with keys and values that go around the devices, each step beside the attention to the last.

    With a window, chunks that it does not reach are not sent at all. See `context_attention` for the arguments.

    Args:
        return_lse: also return the log-sum-exp of the scores; its cotangent is honoured.

    Returns:
        out [B, T, N, H] in the dtype of q; with `return_lse` also lse [B, N, T] in float32 (natural logarithm).

    Raises:
        ValueError: an argument breaks a rule; `NotSupported` (a ValueError) where the ring, or the backend, cannot.
    """
    request = _make_request(q, k, v, segment_ids, axis_name, layout, Mask(bool(causal), window))
    request = dataclasses.replace(request, options=PartOptions(scale, soft_cap, implementation))
    out, lse = select("context_attention", METHODS, "ring", request).call(request)
    return (out, lse) if return_lse else out


def _make_request(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None, axis_name: str, layout: str, mask: Mask
) -> ContextRequest:
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    check_arrays(q, k, v)
    devices, cuts = lax.axis_size(axis_name), chunks_per_device(layout)
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"queries and keys must be of the same part of the sequence; got {q.shape[1]}, {k.shape[1]}")
    if q.shape[1] % cuts:
        raise ValueError(
            f"in the layout {layout!r} a device holds {cuts} equal chunks, got {q.shape[1]} tokens; the whole "
            f"length must be divisible by {cuts} x {devices}"
        )
    window = None if mask.window is None else check_window(mask.window)
    if window is not None and mask.causal and window >= q.shape[1] * devices:
        window = None
    if ids is not None:
        ids = jnp.asarray(ids)
        if ids.shape != q.shape[:2] or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(
                f"segment_ids must be integers {list(q.shape[:2])}, of this device's part; got {ids.dtype} "
                f"{list(ids.shape)}"
            )
        ids = ids.astype(jnp.int32)
    return ContextRequest(q, k, v, ids, axis_name, devices, layout, Mask(mask.causal, window), PartOptions())
