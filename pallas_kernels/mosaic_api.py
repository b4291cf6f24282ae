"""jax's Pallas and its Mosaic GPU interface, untyped: it moves between releases of jax, and this is the one place
to bridge what differs. Our kernels need jax 0.11; on an older one they are refused before anything here is used.

Each is imported when something of it is first used: together they take a quarter of a second, which a process that runs
no kernel of ours shall not wait for, and a release that lacks one can still import the kernels.
"""

import importlib
from typing import Any

import jax.numpy as jnp


class _Late:
    """A module that is imported at its first use."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


pl: Any = _Late("jax.experimental.pallas")
plgpu: Any = _Late("jax.experimental.pallas.mosaic_gpu")
_mosaic: Any = _Late("jax.experimental.mosaic.gpu")
_utils: Any = _Late("jax.experimental.mosaic.gpu.utils")
_mlir: Any = _Late("jax._src.lib.mlir")


def fence_before_async_reads() -> None:
    """Orders TMA reads of global memory, which go by another path than loads do, after what a semaphore told of."""

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        _utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    fence()


def fetch_and_increment(counter: Any) -> Any:
    """The value of a semaphore, which is one more then: for a single warp, all of whose lanes get the same value."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=None))
    def take(_: Any, ref: Any) -> Any:
        value = _utils.inline_ptx(
            "{.reg .pred first; .reg .u32 lane, old; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;"
            " mov.u32 old, 0; @first atom.relaxed.gpu.global.add.u32 old, [$1], 1;"
            " shfl.sync.idx.b32 $0, old, 0, 31, 0xffffffff;}",
            _utils.memref_ptr(ref),
            result_types=_mlir.ir.IntegerType.get_signless(32),
            has_side_effects=True,
            convergent=True,
        )
        return _mosaic.FragmentedArray.splat(value, (), is_signed=True)

    return take(counter)
