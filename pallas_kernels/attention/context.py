"""Context parallelism: attention over a sequence that is sharded over the devices of a mesh axis.

Both are called inside `jax.shard_map`, with this device's shard of the sequence.

Dims: B batch, T length of this device's shard, N query heads, K key and value heads, H head dim.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.array_types import AnyArray
from pallas_kernels.attention.api import flash_attention
from pallas_kernels.attention.context_layout import chunks_per_device
from pallas_kernels.attention.gather_keys import KeyGatherOptions, attend_gathered, count_reached_chunks
from pallas_kernels.attention.masks import Mask
from pallas_kernels.attention.partial_attention import PartOptions
from pallas_kernels.attention.request import check_arrays, check_sinks, check_window, pad_values
from pallas_kernels.attention.ring import RingOptions, attend_ring
from pallas_kernels.attention.scores import with_sinks
from pallas_kernels.attention.ulysses import unsupported_heads, with_whole_sequences
from pallas_kernels.dispatch import Backend, select

OVERLAP_LENGTH = 4096
"""Tokens per device, times N / K, above which computation hides the transfer of one ring step.

A step is 2 T^2 N H multiplications and additions, its transfer 4 T K H bytes in bfloat16. At 600 TFLOP/s and 300 GB/s
both take the same time if T N / K is 4000.
"""


@dataclasses.dataclass(frozen=True)
class ContextRequest:
    """Checked arguments of one call of attention over a sequence that is sharded over devices.

    Attributes:
        q, k, v: this device's shards [B, T, N, H], [B, T, K, H], [B, T, K, H]; arrays or shape structs.
        ids: this device's segment ids [B, T], or None.
        axis_name: mesh axis that the sequence is sharded over.
        devices: size of that axis.
        layout: "zigzag" or "contiguous".
        mask: mask over positions of the whole sequence.
        options: scale, soft cap and implementation.
        sinks: attention sinks [N], or None.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    ids: jax.Array | None
    axis_name: str
    devices: int
    layout: str
    mask: Mask
    options: PartOptions
    sinks: jax.Array | None = None

    @property
    def chunk_length(self) -> int:
        """Number of tokens in a chunk of the sequence; a device holds two chunks in the zigzag layout, else one."""
        return self.q.shape[1] // chunks_per_device(self.layout)

    @property
    def chunks(self) -> int:
        """Number of chunks into which the whole sequence is cut, over all devices."""
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
        return (
            None
            if _reach(request) < request.devices
            else "the window reaches nearly all keys, which one all-gather fetches at once"
        )
    length = request.q.shape[1] * request.q.shape[2] // request.k.shape[2]
    if length < OVERLAP_LENGTH:
        return (
            f"a ring step takes less time than its transfer: for T N / K from {OVERLAP_LENGTH}, got "
            f"{request.q.shape[1]} x {request.q.shape[2]} / {request.k.shape[2]}"
        )
    return None


def _ulysses_lower_priority(request: ContextRequest) -> str | None:
    queries = request.q.shape[2]
    keys = request.k.shape[2]
    if request.mask.window is not None and request.mask.causal:
        return "a window needs few keys of other devices, and all_to_all sends whole sequences"
    if queries + keys >= keys * request.devices:
        return (
            f"sends queries and outputs too, more than an all-gather of the keys unless N + K < K n on n = "
            f"{request.devices} devices; got N {queries}, K {keys}"
        )
    return None


def _reach(request: ContextRequest) -> int:
    return count_reached_chunks(request.mask.window, request.chunk_length, request.chunks)


def _ring(request: ContextRequest) -> tuple[jax.Array, jax.Array]:
    if request.mask.window is not None:
        return _attend_gathered(request, use_all_gather=False)
    ring = RingOptions(request.axis_name, request.devices, request.mask.causal, request.layout, request.options)
    out, lse = attend_ring(ring, request.q, request.k, request.v, request.ids)
    return with_sinks(out, lse, request.sinks)


def _attend_gathered(request: ContextRequest, *, use_all_gather: bool = True) -> tuple[jax.Array, jax.Array]:
    gather = KeyGatherOptions(
        request.axis_name,
        request.devices,
        request.mask.causal,
        request.mask.window,
        request.layout,
        _reach(request),
        use_all_gather,
        request.options,
    )
    out, lse = attend_gathered(gather, request.q, request.k, request.v, request.ids)
    return with_sinks(out, lse, request.sinks)


def _attend_exchanged(request: ContextRequest) -> tuple[jax.Array, None]:
    options = request.options
    mask = request.mask

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> jax.Array:
        sinks = request.sinks
        if sinks is not None:
            first = lax.axis_index(request.axis_name) * q.shape[2]
            sinks = lax.dynamic_slice_in_dim(sinks, first, q.shape[2])
        out = flash_attention(
            q,
            k,
            v,
            causal=mask.causal,
            window=mask.window,
            segment_ids=ids,
            scale=options.scale,
            soft_cap=options.soft_cap,
            sinks=sinks,
            implementation=options.implementation,
        )
        assert isinstance(out, jax.Array)
        return out

    arrays = request.q, request.k, request.v, request.ids
    return with_whole_sequences(attend, *arrays, axis_name=request.axis_name, layout=request.layout), None


METHODS = (
    Backend(
        "ring",
        "transfers of keys overlap with computation; with a window only neighbours send: for long sequences",
        _unsupported_open_window,
        _ring,
        _ring_lower_priority,
    ),
    Backend(
        "all_to_all",
        "each device computes whole sequences for some of the heads, if that sends less than an all-gather of the keys",
        lambda request: unsupported_heads(request.q.shape[2], request.devices),
        _attend_exchanged,
        _ulysses_lower_priority,
    ),
    Backend(
        "all_gather", "one all-gather of the keys: for short sequences", _unsupported_open_window, _attend_gathered
    ),
)
"""Methods of context parallelism, in order of preference."""


def context_attention(  # noqa: PLR0913
    q: Float[AnyArray, "B T N H"],
    k: Float[AnyArray, "B T K H"],
    v: Float[AnyArray, "B T K V"],
    *,
    axis_name: str,
    method: str | None = None,
    causal: bool = True,
    window: int | None = None,
    segment_ids: Int[AnyArray, "B T"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[AnyArray, " N"] | None = None,
    layout: str = "zigzag",
    implementation: str | None = None,
) -> Float[Array, "B T N V"]:
    """Compute exact, differentiable attention over a sequence that is sharded over the devices of a mesh axis.

    Must be called inside `jax.shard_map`. Every array is this device's shard of the sequence, in the order of
    `sequence_order(length, devices, layout)`. Masks refer to positions in the whole sequence.

    Args:
        q: queries [B, T, N, H].
        k, v: keys [B, T, K, H] and values [B, T, K, V], as in `flash_attention`.
        axis_name: mesh axis that the sequence is sharded over.
        method: name of a method in `METHODS` ("ring", "all_to_all", "all_gather"); None takes the first that supports
            the call and that no later one computes faster. A named method never falls back.
        causal, window, scale, soft_cap, sinks: as in `flash_attention`.
        segment_ids: integers [B, T], greater than -2**31.
        layout: "zigzag" (device i of n holds chunks i and 2n-1-i: equal work under a causal mask) or "contiguous".
        implementation: name of the backend of `flash_attention` that computes each part. cuDNN works with "all_to_all"
            only, as jax drops the gradient of its log-sum-exp.

    Returns:
        out [B, T, N, V] in the dtype of q.

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the named method or backend cannot compute the call (a ValueError).
    """
    width = jnp.shape(v)[-1]
    request = _make_request(q, k, pad_values(k, v), segment_ids, axis_name, layout, Mask(bool(causal), window))
    sinks = None if sinks is None else check_sinks(sinks, request.q)
    request = dataclasses.replace(request, options=PartOptions(scale, soft_cap, implementation), sinks=sinks)
    return select("context_attention", METHODS, method, request).call(request)[0][..., :width]


def ring_attention(  # noqa: PLR0913
    q: Float[AnyArray, "B T N H"],
    k: Float[AnyArray, "B T K H"],
    v: Float[AnyArray, "B T K H"],
    *,
    axis_name: str,
    causal: bool = True,
    window: int | None = None,
    segment_ids: Int[AnyArray, "B T"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    layout: str = "zigzag",
    return_lse: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Compute attention over a sharded sequence while keys and values are passed around a ring of devices.

    With a window, only the chunks that it reaches are sent. See `context_attention` for the other arguments.

    Args:
        return_lse: True to return the log-sum-exp of the scores too; its cotangent is honoured.

    Returns:
        out [B, T, N, H] in the dtype of q; with `return_lse` also lse [B, N, T] in float32 (natural logarithm).

    Raises:
        ValueError: an argument breaks a rule.
        NotSupported: the ring, or the named backend, cannot compute the call (a ValueError).
    """
    request = _make_request(q, k, v, segment_ids, axis_name, layout, Mask(bool(causal), window))
    request = dataclasses.replace(request, options=PartOptions(scale, soft_cap, implementation))
    out, lse = select("context_attention", METHODS, "ring", request).call(request)
    return (out, lse) if return_lse else out


def _make_request(
    q: AnyArray, k: AnyArray, v: AnyArray, ids: AnyArray | None, axis_name: str, layout: str, mask: Mask
) -> ContextRequest:
    q = jnp.asarray(q)
    k = jnp.asarray(k)
    v = jnp.asarray(v)
    check_arrays(q, k, v)
    devices = lax.axis_size(axis_name)
    cuts = chunks_per_device(layout)
    if q.shape[1] != k.shape[1]:
        raise ValueError(f"queries and keys must be of the same shard of the sequence; got {q.shape[1]}, {k.shape[1]}")
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
                f"segment_ids must be integers {list(q.shape[:2])}, for this device's shard; got {ids.dtype} "
                f"{list(ids.shape)}"
            )
        ids = ids.astype(jnp.int32)
    return ContextRequest(q, k, v, ids, axis_name, devices, layout, Mask(mask.causal, window), PartOptions())
