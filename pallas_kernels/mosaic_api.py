"""jax's Pallas and its Mosaic GPU interface, untyped: it moves between releases of jax, and this is the one place
to bridge what differs. Our kernels need jax 0.11; on an older one they are refused before anything here is used.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas
from jax.experimental.pallas import mosaic_gpu

pl: Any = pallas
plgpu: Any = mosaic_gpu


def fence_before_async_reads() -> None:
    """Orders TMA reads of global memory, which go by another path than loads do, after what a semaphore told of."""
    from jax.experimental.mosaic.gpu import utils

    untyped: Any = utils

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        untyped.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    fence()


def fetch_and_increment(counter: Any) -> Any:
    """The value of a semaphore, which is one more then: for a single warp, all of whose lanes get the same value."""
    from jax._src.lib import mlir
    from jax.experimental.mosaic.gpu import FragmentedArray, utils

    untyped: Any = utils
    integer: Any = mlir.ir  # pyright: ignore

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=None))
    def take(_: Any, ref: Any) -> Any:
        value = untyped.inline_ptx(
            "{.reg .pred first; .reg .u32 lane, old; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;"
            " mov.u32 old, 0; @first atom.relaxed.gpu.global.add.u32 old, [$1], 1;"
            " shfl.sync.idx.b32 $0, old, 0, 31, 0xffffffff;}",
            untyped.memref_ptr(ref),
            result_types=integer.IntegerType.get_signless(32),
            has_side_effects=True,
            convergent=True,
        )
        return FragmentedArray.splat(value, (), is_signed=True)

    return take(counter)
