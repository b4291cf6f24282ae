"""What FP8 operands are rounded from: an array, or what is computed of others on the way and never stored itself."""

from collections.abc import Callable
from typing import NamedTuple

import jax

from pallas_kernels.pointwise.gated import swiglu, swiglu_gradients


class Source(NamedTuple):
    """From arrays of one shape to the operands, which are of that shape too."""

    compute: Callable[..., tuple[jax.Array, ...]]
    kernel: str
    """Of `triton_quantize`, which computes and rounds."""
    tiles_kernel: str | None
    """The same with a scale for each tile."""
    width: int
    """Columns of a tile: how many the registers hold."""


GIVEN = Source(lambda x: (x,), "cast_kernel", None, 128)
SWIGLU = Source(lambda gate, up: (swiglu(gate, up),), "swiglu_kernel", "swiglu_tiles_kernel", 64)
SWIGLU_GRADIENTS = Source(swiglu_gradients, "swiglu_gradients_kernel", "swiglu_gradients_tiles_kernel", 64)
