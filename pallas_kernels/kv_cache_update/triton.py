"""Triton backend of `rotate_into_cache`: one kernel, which updates the cache in place."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.kv_cache_update.request import CacheUpdateRequest
from pallas_kernels.triton_support import triton_call, unsupported_target

_LEAST_CAPABILITY = (8, 0)
_LEAST_CAPABILITY_OF_FP8 = (8, 9)
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_PAIRS_PER_WARP = 256
"""Pairs of elements per warp: eight per thread, so that 16-bit elements are read 16 bytes at a time."""


@dataclasses.dataclass(frozen=True)
class CacheUpdatePlan:
    """Compile-time constants of the Triton kernel for `rotate_into_cache`.

    Attributes:
        new_tokens: T.
        num_heads, key_heads: N and K.
        half: H / 2.
        slots: S.
        slot_stride, head_stride: distance between two slots of a head, and between two heads of a slot, in vectors of H
            elements.
        angle_rows: number of vectors of cosines: B T, or T if all rows have the same.
        block_heads: heads of one program, a power of two.
        fp8: True if the cache is in FP8 (e4m3), which saturates.
    """

    new_tokens: int
    num_heads: int
    key_heads: int
    half: int
    slots: int
    slot_stride: int
    head_stride: int
    angle_rows: int
    block_heads: int
    fp8: bool

    @property
    def heads(self) -> int:
        """Number of heads of queries, keys and values together, N + 2 K."""
        return self.num_heads + 2 * self.key_heads

    @property
    def padded_half(self) -> int:
        """Number of pairs of a head, rounded up to a power of two."""
        return 1 << (self.half - 1).bit_length()

    @property
    def warps(self) -> int:
        """Number of warps of one program."""
        return min(max(1, self.block_heads * self.padded_half // _PAIRS_PER_WARP), 4)


def unsupported_reason(request: CacheUpdateRequest) -> str | None:
    """Return the first reason why the Triton kernel cannot compute this call, or None if it can."""
    if reason := unsupported_target(request.target, _LEAST_CAPABILITY_OF_FP8 if request.fp8 else _LEAST_CAPABILITY):
        return reason
    if request.joined.dtype not in _DTYPES:
        return f"needs joined in bfloat16, float16 or float32; got {request.joined.dtype}"
    if request.keys.dtype not in _DTYPES and not request.fp8:
        return f"needs the cache in bfloat16, float16, float32 or float8_e4m3fn; got {request.keys.dtype}"
    if not all(isinstance(size, int) for size in (*request.joined.shape, *request.keys.shape)):
        return f"needs sizes that are known when it is compiled; got {request}"
    return None


def make_plan(request: CacheUpdateRequest) -> CacheUpdatePlan:
    """Choose the compile-time constants of the kernel for a call, such as how many heads a program takes."""
    length = request.joined.shape[1]
    width = request.joined.shape[3]
    key_heads = request.key_heads
    slots = request.keys.shape[request.slot_axis]
    plan = CacheUpdatePlan(
        length,
        request.num_heads,
        key_heads,
        width // 2,
        slots,
        key_heads if request.slot_axis == 1 else 1,
        1 if request.slot_axis == 1 else slots,
        request.cos.shape[0] * length,
        1,
        request.fp8,
    )
    return dataclasses.replace(plan, block_heads=max(1, _PAIRS_PER_WARP // plan.padded_half))


def update(request: CacheUpdateRequest) -> tuple[jax.Array, ...]:
    """Compute `rotate_into_cache` with the Triton kernel: queries [B, T, N, H], and the cache's keys and values."""
    from pallas_kernels.kv_cache_update.triton_kernel import update_kernel

    plan = make_plan(request)
    joined, cos, sin, slots, keys, values = _apart_from_slices(
        request.joined, request.cos, request.sin, request.slots, request.keys, request.values
    )
    batch, length, heads, width = joined.shape
    major, minor = request.target.compute_capability or (0, 0)
    results = triton_call(
        joined,
        cos,
        sin,
        slots,
        keys,
        values,
        kernel=update_kernel,
        out_shape=(
            jax.ShapeDtypeStruct((batch, length, plan.num_heads, width), joined.dtype),
            jax.ShapeDtypeStruct(keys.shape, keys.dtype),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
        ),
        input_output_aliases={4: 1, 5: 2},
        grid=(batch * length, -(-heads // plan.block_heads)),
        name="rotate_into_cache",
        num_warps=plan.warps,
        num_stages=1,
        compute_capability=10 * major + minor,
        plan=plan,
    )
    return _apart_from_slices(*results)


def _apart_from_slices(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return arrays that XLA does not merge into a kernel's call where they are slices of others, or are put in others.

    XLA would do that for a scan over a stack of layers, for example. It then forgets that the call's results are its
    operands, and everything in the cache that the kernel does not write would be undefined.
    """
    return jax.lax.optimization_barrier(arrays)
