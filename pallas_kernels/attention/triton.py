"""Attention by Triton kernels that skip the tiles that the mask hides, for NVIDIA GPUs from Ampere on.

The kernels are compiled by Python while lowering, through jax-triton, for the compute capability of the request's
target: a machine without a GPU can compile them.
"""

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attention import xla
from pallas_kernels.attention.remat import name_outputs
from pallas_kernels.attention.request import AttentionRequest, Gradients, Options, Segments
from pallas_kernels.attention.scores import row_delta, sink_gradient
from pallas_kernels.attention.visible_tiles import Blocks, key_ranges, query_ranges
from pallas_kernels.triton_support import triton_call

_LOG2E = math.log2(math.e)
_LEAST_CAPABILITY = (8, 0)
_LARGEST_HEAD_DIM = 512
_SHORTEST = 16


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tile sizes and launch options of one Triton attention kernel.

    Attributes:
        query_block: number of query rows of a tile.
        key_block: number of key columns of a tile.
        warps: number of warps per program.
        stages: number of pipeline stages of the loads.
        channels: number of channels of a tile of wide heads: of the values and the output of a program of the forward,
            or of a step of the sums over channels; None for all.
    """

    query_block: int
    key_block: int
    warps: int
    stages: int
    channels: int | None = None


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tile sizes of the three Triton attention kernels: the forward, dQ, and dK with dV."""

    forward: Tile
    query: Tile
    key: Tile


@dataclasses.dataclass(frozen=True)
class WideTiling:
    """Tile sizes of the two Triton kernels for heads of more than 256 channels: the forward, and score gradients.

    A block of the latter, whose gradients XLA multiplies, has several tiles (`triton_wide_backward`).
    """

    forward: Tile
    scores: Tile


_NARROW = Tiling(Tile(128, 64, 4, 3), Tile(128, 64, 4, 3), Tile(64, 128, 8, 3))
# Tilings by shared memory per program in KiB and by head dim, padded to a power of two. Chosen by the registers and
# spills of the compiled kernels over causal, packed, windowed and capped calls.
_TILINGS = {
    227: {
        16: _NARROW,
        32: _NARROW,
        64: Tiling(Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(64, 128, 8, 2)),
        128: Tiling(Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
        256: Tiling(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 64, 8, 2)),
        512: WideTiling(Tile(128, 32, 8, 2, 256), Tile(128, 128, 8, 3, 64)),
    },
    163: {
        16: _NARROW,
        32: _NARROW,
        64: Tiling(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
        128: Tiling(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
        256: Tiling(Tile(64, 64, 8, 2), Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
        512: WideTiling(Tile(64, 32, 8, 2, 256), Tile(128, 64, 8, 3, 64)),
    },
    99: {
        16: _NARROW,
        32: _NARROW,
        64: Tiling(Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), Tile(64, 128, 8, 2)),
        128: Tiling(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), Tile(32, 128, 8, 2)),
        256: Tiling(Tile(64, 32, 8, 2), Tile(64, 16, 8, 2), Tile(16, 64, 8, 2)),
        512: WideTiling(Tile(32, 16, 4, 2, 256), Tile(128, 64, 8, 2, 64)),
    },
}


def shared_memory_kib(capability: tuple[int, int]) -> int:
    """Return the shared memory in KiB that one thread block can use on GPUs of a compute capability.

    (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".)
    """
    if capability in ((8, 6), (8, 9)) or capability >= (12, 0):
        return 99
    return 163 if capability < (9, 0) else 227


def tiling_for(head_dim: int, capability: tuple[int, int]) -> Tiling | WideTiling:
    """Return tile sizes for a head dim of at most 512 that fit into the shared memory at a compute capability."""
    return _TILINGS[shared_memory_kib(capability)][_width(head_dim)]


def _width(head_dim: int) -> int:
    """Return the width of tiles for a head dim: the next power of two, at least 16 for the tensor cores."""
    return max(16, 1 << (head_dim - 1).bit_length())


def unsupported_reason(request: AttentionRequest) -> str | None:
    """Return the first reason why the Triton kernels cannot compute this attention call, or None if they can."""
    target = request.target
    if target.platform != "cuda":
        return f"runs on NVIDIA GPUs, lowered for {target}"
    if (target.compute_capability or (0, 0)) < _LEAST_CAPABILITY:
        return f"needs compute capability 8.0 (Ampere) or newer, lowered for {target}"
    if request.q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"takes bfloat16 and float16, got {request.q.dtype}"
    if request.head_dim % 8 or request.head_dim > _LARGEST_HEAD_DIM:
        return f"the head dim must be a multiple of 8 and at most {_LARGEST_HEAD_DIM}, got {request.head_dim}"
    missing = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be imported: pip install 'jax-triton<0.4' 'triton<3.7'"
    return None


def lower_priority_reason(request: AttentionRequest) -> str | None:
    """Return why another backend is preferred for this call (it has very few queries), or None."""
    if request.query_length < _SHORTEST:
        return f"a block of queries would be mostly empty: for T from {_SHORTEST}, got T {request.query_length}"
    return None


def attend(request: AttentionRequest) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Compute attention with the Triton kernels: return out [B, T, N, H] and the log-sum-exp [B, N, T]."""
    sinks = request.sinks
    if sinks is not None:  # One row for each sequence, which `jax.vmap` can fold into the batch.
        sinks = jnp.broadcast_to(sinks, (request.q.shape[0], *sinks.shape))
    return _differentiable(_static(request), request.q, request.k, request.v, request.segments, sinks)


def gradients(
    request: AttentionRequest, d_out: Float[Array, "B T N H"], lse: Float[Array, "B N T"], delta: Float[Array, "B N T"]
) -> Gradients:
    """Compute dQ, dK and dV of attention to a part of the keys, given row statistics (lse, delta) over all keys."""
    return _backward(_static(request), (request.q, request.k, request.v, d_out, lse, delta), request.segments)


def _static(request: AttentionRequest) -> "_StaticArguments":
    capability = request.target.compute_capability or _LEAST_CAPABILITY
    return _StaticArguments(request.options, tiling_for(request.head_dim, capability), capability)


@dataclasses.dataclass(frozen=True)
class _StaticArguments:
    """Static (hashable) arguments of an attention call: options, tile sizes and compute capability."""

    options: Options
    tiling: Tiling | WideTiling
    capability: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class AttentionKernelPlan:
    """Compile-time constants of one Triton attention kernel.

    Attributes:
        batch, length, key_length, heads, kv_heads, head_dim: B, T, S, N, K and H.
        query_block, key_block: rows and columns of a tile.
        causal, window, scale: as in `Options`.
        capped: True if scores are soft-capped.
        input_scale, output_scale: log2 of a softmax numerator is output_scale * f(input_scale * q.k), with f the
            identity, or, if `capped`, the tanh computed from exp2(input_scale * q.k).
        packed: True if there are segments.
        sinks: True if each head has an attention sink.
        value_parts: number of programs of the forward among which the channels of the values are divided.
    """

    batch: int
    length: int
    key_length: int
    heads: int
    kv_heads: int
    head_dim: int
    query_block: int
    key_block: int
    causal: bool
    window: int | None
    scale: float
    capped: bool
    input_scale: float
    output_scale: float
    packed: bool
    sinks: bool = False
    value_parts: int = 1
    ln2: float = math.log(2.0)
    log2e: float = _LOG2E

    @property
    def width(self) -> int:
        """Head dim rounded up to the width of a tile, a power of two."""
        return _width(self.head_dim)

    @property
    def value_width(self) -> int:
        """Number of channels of the values and of the output that a program of the forward computes."""
        return self.width // self.value_parts

    @property
    def group(self) -> int:
        """Number of query heads per key head."""
        return self.heads // self.kv_heads

    @property
    def query_blocks(self) -> int:
        """Number of query blocks per sequence, rounded up."""
        return -(-self.length // self.query_block)

    @property
    def key_blocks(self) -> int:
        """Number of key blocks per sequence, rounded up."""
        return -(-self.key_length // self.key_block)

    @property
    def query_load_bound(self) -> int | None:
        """Number of queries if loads must be masked because the last block is partial; None if all blocks are whole."""
        return self.length if self.length % self.query_block else None

    @property
    def key_load_bound(self) -> int | None:
        """Number of keys if loads must be masked because the last block is partial; None if all blocks are whole."""
        return self.key_length if self.key_length % self.key_block else None

    @property
    def blocks(self) -> Blocks:
        """Sequence lengths and block sizes, which determine the tiles that the kernel visits."""
        return Blocks(self.length, self.key_length, self.query_block, self.key_block)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScorePlan(AttentionKernelPlan):
    """Compile-time constants of the kernel that computes score gradients; q, k and v need not be padded to blocks.

    Attributes:
        block_queries, block_keys: rows and columns of a block, multiples of those of a tile.
        channels: channels of a step of the sums over channels, a power of two.
        masked: True if the mask may hide keys of the block.
    """

    block_queries: int
    block_keys: int
    channels: int
    masked: bool

    @property
    def query_tiles(self) -> int:
        """Rows of tiles of a block."""
        return self.block_queries // self.query_block

    @property
    def key_tiles(self) -> int:
        """Columns of tiles of a block."""
        return self.block_keys // self.key_block

    @property
    def query_load_bound(self) -> int | None:
        """Number of queries if loads must be masked because the last block is partial; None if all blocks are whole."""
        return self.length if self.length % self.block_queries else None

    @property
    def key_load_bound(self) -> int | None:
        """Number of keys if loads must be masked because the block may be a partial last one, which a mask cuts."""
        return self.key_length if self.masked and self.key_length % self.block_keys else None


def _plan(options: Options, tile: Tile, q: jax.Array, k: jax.Array, packed: bool) -> AttentionKernelPlan:
    scale = options.scale
    soft_cap = options.soft_cap
    if soft_cap is not None:
        input_scale = 2.0 * _LOG2E * scale / soft_cap
        output_scale = soft_cap * _LOG2E
    elif scale > 0.0:
        input_scale = 1.0
        output_scale = scale * _LOG2E
    else:
        # The kernels take the maximum of products before `output_scale`, so it must be positive.
        input_scale = scale
        output_scale = _LOG2E
    return AttentionKernelPlan(
        batch=q.shape[0],
        length=q.shape[1],
        key_length=k.shape[1],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        query_block=tile.query_block,
        key_block=tile.key_block,
        causal=options.mask.causal,
        window=options.mask.window,
        scale=scale,
        capped=soft_cap is not None,
        input_scale=input_scale,
        output_scale=output_scale,
        packed=packed,
        value_parts=1 if tile.channels is None else -(-_width(q.shape[3]) // tile.channels),
    )


def launch(
    kernel: Any,
    plan: AttentionKernelPlan,
    tile: Tile,
    capability: tuple[int, int],
    programs: int,
    arrays: tuple,
    outputs: tuple,
) -> tuple[jax.Array, ...]:
    """Launch a Triton attention kernel with `programs` programs; `outputs` are its results' shapes and dtypes."""
    return triton_call(
        *arrays,
        kernel=kernel,
        out_shape=outputs,
        grid=(programs,),
        name=kernel.__name__,
        num_warps=tile.warps,
        num_stages=tile.stages,
        compute_capability=10 * capability[0] + capability[1],
        plan=plan,
    )


def _vmap_over_batch(function: Callable[..., tuple]) -> Any:
    """Give a function of arrays [B, ...] a `jax.vmap` rule: one call, with the mapped dim merged into B."""
    call = jax.custom_batching.custom_vmap(function)

    @call.def_vmap
    def _(size: int, batched: list, *arguments: Any) -> tuple[tuple, Any]:
        def fold(x: jax.Array, is_batched: bool) -> jax.Array:
            x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        results = call(*jax.tree.map(fold, arguments, tuple(batched)))
        unfolded = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        return unfolded, jax.tree.map(lambda _: True, results)

    return call


def _ids(segments: Segments | None, ranges: jax.Array) -> jax.Array:
    """Return the segment ids of queries and keys as one array for a kernel, [B, T + S].

    Without segments the kernels read no ids, and another array takes their place.
    """
    return ranges if segments is None else jnp.concatenate(segments, axis=1)


def _forward(
    static: _StaticArguments,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    sinks: jax.Array | None,
) -> tuple:
    from pallas_kernels.attention.triton_forward import forward_kernel

    tile = static.tiling.forward
    plan = dataclasses.replace(_plan(static.options, tile, q, k, segments is not None), sinks=sinks is not None)
    ranges = key_ranges(static.options.mask, plan.blocks, segments)
    outputs = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct((plan.batch, plan.heads, plan.length), jnp.float32),
    )
    programs = plan.batch * plan.heads * plan.query_blocks * plan.value_parts
    arrays = q, k, v, ranges, _ids(segments, ranges), ranges if sinks is None else sinks
    return tuple(launch(forward_kernel, plan, tile, static.capability, programs, arrays, outputs))


def _backward(static: _StaticArguments, arrays: tuple, segments: Segments | None) -> tuple:
    """Launch the two backward kernels: return dQ, dK and dV from (q, k, v, d_out, lse, delta)."""
    from pallas_kernels.attention.triton_backward import key_kernel, query_kernel

    tiling = static.tiling
    if isinstance(tiling, WideTiling):
        return _wide_backward(static, tiling.scores, arrays, segments)
    q, k, v, d_out, lse, delta = arrays
    mask = static.options.mask
    packed = segments is not None
    rows = jnp.stack([lse * _LOG2E, delta])
    inputs = q, k, v, d_out.astype(q.dtype), rows

    tile = tiling.query
    plan = _plan(static.options, tile, q, k, packed)
    ranges = key_ranges(mask, plan.blocks, segments)
    programs = plan.batch * plan.heads * plan.query_blocks
    arrays = *inputs, ranges, _ids(segments, ranges)
    like_q = jax.ShapeDtypeStruct(q.shape, q.dtype)
    like_k = jax.ShapeDtypeStruct(k.shape, k.dtype)
    (d_q,) = launch(query_kernel, plan, tile, static.capability, programs, arrays, (like_q,))

    tile = tiling.key
    plan = _plan(static.options, tile, q, k, packed)
    ranges = query_ranges(mask, plan.blocks, segments)
    programs = plan.batch * plan.kv_heads * plan.key_blocks
    arrays = *inputs, ranges, _ids(segments, ranges)
    d_k, d_v = launch(key_kernel, plan, tile, static.capability, programs, arrays, (like_k, like_k))
    return d_q, d_k, d_v


def _wide_backward(static: _StaticArguments, tile: Tile, arrays: tuple, segments: Segments | None) -> Gradients:
    """Compute dQ, dK and dV of wide heads: a kernel for the scores of each block, and matrix products by XLA.

    `arrays` are (q, k, v, d_out, lse, delta).
    """
    from pallas_kernels.attention.triton_wide_backward import score_gradient_kernel

    q, k, v, d_out, lse, delta = arrays
    batch, length, heads, _ = q.shape
    key_length, kv_heads = k.shape[1:3]
    packed = segments is not None
    multiple = max(tile.query_block, tile.key_block)
    blocks = xla.choose_blocks(static.options.mask, length, key_length, batch * heads, packed, multiple)
    finite = jnp.where(lse == -jnp.inf, 0.0, lse)
    rows = jnp.stack([finite * _LOG2E, delta])
    inputs = q, k, v, d_out.astype(q.dtype), rows
    constants: dict[str, Any] = {
        **dataclasses.asdict(_plan(static.options, tile, q, k, packed)),
        "block_queries": blocks.query_block,
        "block_keys": blocks.key_block,
        "channels": tile.channels,
    }
    grouped = batch, kv_heads, heads // kv_heads, blocks.query_block, blocks.key_block
    result = jax.ShapeDtypeStruct((batch, heads, *grouped[3:]), q.dtype)

    def weigh(pair: jax.Array, masked: bool) -> tuple[jax.Array, jax.Array]:
        plan = ScorePlan(**constants, masked=masked)
        programs = batch * heads * plan.query_tiles * plan.key_tiles
        operands = *inputs, pair, _ids(segments, pair)
        found = launch(score_gradient_kernel, plan, tile, static.capability, programs, operands, (result, result))
        weights, gradient = (x.reshape(grouped) for x in found)
        return weights, gradient

    return xla.gradients_by_tiles(static.options, blocks, (q, k, v), segments, (d_out, lse, delta), weigh)


def _attend(static: _StaticArguments, *inputs: Any) -> tuple[jax.Array, jax.Array]:
    return _vmap_over_batch(functools.partial(_forward, static))(*inputs)


def _forward_rule(static: _StaticArguments, *inputs: Any) -> tuple:
    out, lse = name_outputs(*_attend(static, *inputs))
    return (out, lse), (*inputs, out, lse)


def _backward_rule(static: _StaticArguments, saved: tuple, cotangents: tuple) -> tuple:
    q, k, v, segments, sinks, out, lse = saved
    d_out, d_lse = cotangents
    delta = row_delta(out, d_out, d_lse)
    arrays = q, k, v, d_out, lse, delta
    d_sinks = None if sinks is None else jax.vmap(sink_gradient)(sinks, lse[:, None], delta[:, None])
    return *_vmap_over_batch(functools.partial(_backward, static))(arrays, segments), None, d_sinks


_differentiable = jax.custom_vjp(_attend, nondiff_argnums=(0,))
_differentiable.defvjp(_forward_rule, _backward_rule)
