"""Sources of an FP8 operand (a plain array, SwiGLU, RMSNorm), for kernels that compute and quantize it in one pass."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.pointwise.gated import swiglu, swiglu_gradients

NormInputs = tuple[jax.Array, ...]
"""Inputs of the RMSNorm that makes a matmul's input: x [..., D] and a gain [D] float32. Empty without a norm."""


class Source(NamedTuple):
    """Function that computes FP8 operands, such as SwiGLU, and names of the kernels that fuse it with quantization."""

    compute: Callable[..., tuple[jax.Array, ...]]
    """Compute the operands."""
    kernel: str
    """Name of the kernel in `triton_quantize` that computes and quantizes with one scale per tensor."""
    tiles_kernel: str | None
    """Name of the kernel with a scale per tile, if there is one."""
    blocks_kernel: str
    """Name of the kernel in `triton_quantize_blocks`, with scales of 128 values."""
    width: int
    """Columns of a tile of the first two kernels: as many as fit into registers."""


IDENTITY = Source(lambda x: (x,), "cast_kernel", None, "quantize_kernel", 128)
SWIGLU = Source(lambda gate, up: (swiglu(gate, up),), "swiglu_kernel", "swiglu_tiles_kernel", "swiglu_kernel", 64)
SWIGLU_GRADIENTS = Source(
    swiglu_gradients,
    "swiglu_gradients_kernel",
    "swiglu_gradients_tiles_kernel",
    "swiglu_gradients_kernel",
    64,
)
NORM = Source(
    lambda x, inverse_rms, gain: ((x.astype(jnp.float32) * inverse_rms[..., None] * gain).astype(x.dtype),),
    "norm_kernel",
    "norm_tiles_kernel",
    "norm_kernel",
    128,
)


def input_source(epsilon: float | None, x: jax.Array, norm_inputs: NormInputs) -> tuple[Source, tuple[jax.Array, ...]]:
    """Return the `Source` of a matmul's input and its arguments: x itself if epsilon is None, else RMSNorm's inputs."""
    if epsilon is None:
        return IDENTITY, (x,)
    x, gain = norm_inputs
    square = jnp.square(x.astype(jnp.float32)).mean(axis=-1)
    return NORM, (x, jax.lax.rsqrt(square + epsilon), gain)
