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
from pallas_kernels.attention.key_source import KeySource
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
FLOPS = 600e12
"""FLOPs per second of a device, as estimates of time take them: the H200's, in bfloat16."""


@dataclasses.dataclass(frozen=True)
class ContextRequest:
    """Checked arguments of one call of attention over a sequence that is sharded over devices.

    Attributes:
        q: this device's queries [B, T, N, H], an array or shape struct.
        source: this device's keys and values, or what they are computed from.
        k: shape of this device's keys [B, T, K, H]; that of values is the same.
        ids: this device's segment ids [B, T], or None.
        axis_name: mesh axis that the sequence is sharded over.
        devices: size of that axis.
        layout: "zigzag" or "contiguous".
        mask: mask over positions of the whole sequence.
        options: scale, soft cap and implementation.
        sinks: attention sinks [N], or None.
    """

    q: jax.Array
    source: KeySource
    k: jax.ShapeDtypeStruct
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
        source = "" if self.source.expand is None else f" from {list(self.source.arrays[0].shape)}"
        return (
            f"q {list(self.q.shape)} k {list(self.k.shape)}{source} {self.q.dtype.name} on each of {self.devices} "
            f"devices ({self.axis_name}), {self.layout}, {self.mask}{segments}"
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
    if request.source.expand is not None:
        exchange = 2 * (queries + keys) * request.q.shape[3] * request.q.dtype.itemsize / request.devices
        if exchange / request.source.bandwidth >= min(
            _seconds_of_hop(request, sent, overlaps=False) for sent in (True, False)
        ):
            return "takes longer than an all-gather of what keys are computed from"
        return None
    if queries + keys >= keys * request.devices:
        return (
            f"sends queries and outputs too, more than an all-gather of the keys unless N + K < K n on n = "
            f"{request.devices} devices; got N {queries}, K {keys}"
        )
    return None


def _reach(request: ContextRequest) -> int:
    return count_reached_chunks(request.mask.window, request.chunk_length, request.chunks)


def sends_source(request: ContextRequest, *, overlaps: bool) -> bool:
    """Return True if devices send what keys are computed from, False if keys and values, whichever takes less time.

    Per token and hop, in the forward; the backward has three times of everything, but 2.5 times of the attention. For
    latent attention with N heads of 128 + 64 channels, values padded to them, and a latent of 512:

    - attention under a causal mask is 2 T N 192 FLOPs;
    - keys and values are N x 384 x 2 bytes: 328 ns at 300 GB/s (NVLink) for N = 128, 2 us at 50 GB/s (InfiniBand);
    - the latent and the rotated channels are 576 x 2 bytes: 4 ns or 23 ns;
    - the expansion is 512 x N x 256 x 2 FLOPs: 56 ns at 600 TFLOP/s for N = 128.

    An all-gather hides nothing: the latent is sent, as 4 + 56 ns are less than 328. A ring step takes as long as the
    longer of computation and transfer. Where attention hides the transfer of keys, sending the latent saves nothing,
    and every hop expands it again. So the latent is sent where attention and expansion take less than the transfer of
    keys: for less than 3300 tokens of a device on NVLink, and less than 23300 between hosts.

    Args:
        overlaps: True if a hop overlaps with the attention to the keys of the previous one.
    """
    if request.source.expand is None:
        return True
    return _seconds_of_hop(request, True, overlaps=overlaps) < _seconds_of_hop(request, False, overlaps=overlaps)


def _seconds_of_hop(request: ContextRequest, sent: bool, *, overlaps: bool) -> float:
    """Estimate the seconds per token of a hop: of `sent`, the source and its expansion, or else keys and values."""
    _, length, heads, width = request.q.shape
    keys = 2 * request.k.shape[2] * width * request.k.dtype.itemsize
    transfer = (request.source.bytes_per_token() if sent else keys) / request.source.bandwidth
    seen = length / 2 if request.mask.causal else length
    expansion = (request.source.flops_per_token() if sent else 0) / FLOPS
    return max(4 * seen * heads * width / FLOPS + expansion, transfer) if overlaps else expansion + transfer


def _sent(request: ContextRequest, *, overlaps: bool) -> KeySource:
    source = request.source
    if not sends_source(request, overlaps=overlaps):
        source = KeySource(source.keys())
    return source.varying_like(request.q)


def _ring(request: ContextRequest) -> tuple[jax.Array, jax.Array]:
    if request.mask.window is not None:
        return _attend_gathered(request, use_all_gather=False)
    source = _sent(request, overlaps=True)
    ring = RingOptions(
        request.axis_name, request.devices, request.mask.causal, request.layout, request.options, source.expand
    )
    out, lse = attend_ring(ring, request.q, source.arrays, source.parameters, request.ids)
    return with_sinks(out, lse, request.sinks)


def _attend_gathered(request: ContextRequest, *, use_all_gather: bool = True) -> tuple[jax.Array, jax.Array]:
    source = _sent(request, overlaps=False)
    gather = KeyGatherOptions(
        request.axis_name,
        request.devices,
        request.mask.causal,
        request.mask.window,
        request.layout,
        _reach(request),
        use_all_gather,
        request.options,
        source.expand,
    )
    out, lse = attend_gathered(gather, request.q, source.arrays, source.parameters, request.ids)
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

    arrays = request.q, *request.source.keys(), request.ids
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
    k: Float[AnyArray, "B T K H"] | KeySource,
    v: Float[AnyArray, "B T K V"] | None = None,
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
        k, v: keys [B, T, K, H] and values [B, T, K, V], as in `flash_attention`. Or k is the `KeySource` of both, and v
            is left out: "ring" and "all_gather" then send the source, and expand it on arrival, if `sends_source`.
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
    source = _source_of(k, v)
    width = jnp.shape(v)[-1] if v is not None else source.key_shapes()[1].shape[-1]
    request = _make_request(q, source, segment_ids, axis_name, layout, Mask(bool(causal), window))
    options = PartOptions(scale, soft_cap, implementation)
    sinks = None if sinks is None else check_sinks(sinks, request.q)
    request = dataclasses.replace(request, options=options, sinks=sinks)
    return select("context_attention", METHODS, method, request).call(request)[0][..., :width]


def _source_of(k: AnyArray | KeySource, v: AnyArray | None) -> KeySource:
    if isinstance(k, KeySource):
        if v is not None:
            raise ValueError("a KeySource gives keys and values: leave out v")
        return k
    if v is None:
        raise ValueError("v is missing: give keys and values, or a KeySource in place of both")
    k = jnp.asarray(k)
    return KeySource((k, pad_values(k, v)))


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
    source = KeySource((jnp.asarray(k), jnp.asarray(v)))
    request = _make_request(q, source, segment_ids, axis_name, layout, Mask(bool(causal), window))
    request = dataclasses.replace(request, options=PartOptions(scale, soft_cap, implementation))
    out, lse = select("context_attention", METHODS, "ring", request).call(request)
    return (out, lse) if return_lse else out


def _make_request(
    q: AnyArray, source: KeySource, ids: AnyArray | None, axis_name: str, layout: str, mask: Mask
) -> ContextRequest:
    q = jnp.asarray(q)
    k, v = source.key_shapes()
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
    return ContextRequest(q, source, k, ids, axis_name, devices, layout, Mask(mask.causal, window), PartOptions())
