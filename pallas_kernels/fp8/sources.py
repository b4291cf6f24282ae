"""What FP8 operands are rounded from: an array, or what is computed of others on the way and never stored itself."""

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax

from pallas_kernels.pointwise.gated import swiglu, swiglu_gradients
from pallas_kernels.pointwise.norm import rms_norm


class Source(NamedTuple):
    """From arrays, of which the first has the shape of the operands, to these."""

    compute: Callable[..., tuple[jax.Array, ...]]
    kernel: str
    """Of `triton_quantize`, which computes and rounds."""
    tiles_kernel: str | None
    """The same with a scale for each tile."""
    blocks_kernel: str | None
    """The same with a scale for 128 values, along rows and along columns."""
    width: int
    """Columns of a tile: how many the registers hold."""
    height: int = 128
    """Rows of a tile."""
    warps: int = 16
    epsilon: float | None = None
    """Of a norm, whose programs take whole rows."""


GIVEN = Source(lambda x: (x,), "cast_kernel", None, "quantize_kernel", 128)
SWIGLU = Source(
    lambda gate, up: (swiglu(gate, up),), "swiglu_kernel", "swiglu_tiles_kernel", "swiglu_blocks_kernel", 64
)
SWIGLU_GRADIENTS = Source(
    swiglu_gradients,
    "swiglu_gradients_kernel",
    "swiglu_gradients_tiles_kernel",
    "swiglu_gradients_blocks_kernel",
    64,
)


@functools.cache
def normalised(epsilon: float) -> Source:
    """RMSNorm: of x [..., D] and a gain [D] in float32."""
    compute = lambda x, gain: (cast(jax.Array, rms_norm(x, gain, epsilon=epsilon)),)  # noqa: E731
    return Source(compute, "norm_kernel", "norm_tiles_kernel", None, 128, height=32, warps=8, epsilon=epsilon)
