"""jax's Pallas and its Mosaic GPU interface, untyped: it moves between releases of jax, and this is the one place
to bridge what differs. Our kernels need jax 0.11; on an older one they are refused before anything here is used.
"""

from typing import Any

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
