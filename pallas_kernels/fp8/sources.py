"""What FP8 operands are rounded from: an array, or what is computed of others on the way and never stored itself."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.pointwise.gated import swiglu, swiglu_gradients

NormInputs = tuple[jax.Array, ...]
"""What a product's input is the RMSNorm of, [..., D] and a gain [D] float32; or nothing."""


class Source(NamedTuple):
    """From arrays, of which the first has the shape of the operands, to these."""

    compute: Callable[..., tuple[jax.Array, ...]]
    kernel: str
    """Of `triton_quantize`, which computes and rounds."""
    tiles_kernel: str | None
    """The same with a scale for each tile."""
    blocks_kernel: str
    """The same with a scale for 128 values, along rows and along columns."""
    width: int
    """Columns of a tile: how many the registers hold."""


IDENTITY = Source(lambda x: (x,), "cast_kernel", None, "quantize_kernel", 128)
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
NORM = Source(
    lambda x, inverse_rms, gain: ((x.astype(jnp.float32) * inverse_rms[..., None] * gain).astype(x.dtype),),
    "norm_kernel",
    "norm_tiles_kernel",
    "norm_blocks_kernel",
    128,
)


def input_source(epsilon: float | None, x: jax.Array, norm_inputs: NormInputs) -> tuple[Source, tuple[jax.Array, ...]]:
    """Of a product's input x, which with an epsilon is the RMSNorm of `norm_inputs`."""
    if epsilon is None:
        return IDENTITY, (x,)
    x, gain = norm_inputs
    square = jnp.square(x.astype(jnp.float32)).mean(axis=-1)
    return NORM, (x, jax.lax.rsqrt(square + epsilon), gain)
