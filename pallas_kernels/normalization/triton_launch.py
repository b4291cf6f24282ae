"""The gradients of a norm by a Triton kernel, which reads every array once.

XLA makes two passes: one for the sums over rows, and one for the gradients, which need these sums.
"""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp

from pallas_kernels.target import automatic_axes, current_target, multiprocessors
from pallas_kernels.triton_support import triton_call

_LEAST_CAPABILITY = (8, 0)
_NARROWEST = 256
_WIDEST = 8192
_FEWEST_ROWS = 4096
_WARPS = 12
"""Warps per multiprocessor over all programs, limited by registers."""
_ELEMENTS = 512
"""Elements of a row per warp: sixteen per thread, of three arrays, twice."""


@dataclasses.dataclass(frozen=True)
class NormKernelPlan:
    """Compile-time constants of the Triton kernel that computes the gradients of a norm.

    Attributes:
        rows, width: shape of x.
        centered: True for LayerNorm.
        has_residual: True if there is a gradient of x from a residual branch.
        epsilon: epsilon of the norm.
        programs: number of programs.
    """

    rows: int
    width: int
    centered: bool
    has_residual: bool
    epsilon: float
    programs: int

    @property
    def padded(self) -> int:
        """Width of a row, rounded up to a power of two."""
        return 1 << (self.width - 1).bit_length()


def unsupported_reason(x: jax.Array) -> str | None:
    """Return why the Triton kernel cannot compute a norm's gradients for x [..., D], or None if it can."""
    target = current_target()
    if target.platform != "cuda" or (target.compute_capability or (0, 0)) < _LEAST_CAPABILITY:
        return f"needs an NVIDIA GPU of compute capability 8.0 or newer, lowered for {target}"
    if not all(importlib.util.find_spec(name) for name in ("triton", "jax_triton")):
        return "needs Triton: pip install 'jaxstack[cuda]'"
    if x.dtype.itemsize != 2 or x.shape[-1] % 8 or x.shape[-1] > _WIDEST:
        return f"takes 16-bit rows whose width is a multiple of 8 up to {_WIDEST}, got {x.shape[-1]} of {x.dtype}"
    return None


def lower_priority_reason(x: jax.Array) -> str | None:
    """Return why XLA's two passes over x [..., D] are preferred to the Triton kernel, or None if they are not."""
    rows = x.size // max(x.shape[-1], 1)
    if x.shape[-1] < _NARROWEST or rows < _FEWEST_ROWS:
        return f"is for at least {_FEWEST_ROWS} rows of {_NARROWEST}, got {rows} of {x.shape[-1]}"
    if automatic_axes():
        return "XLA partitions the mesh in context, and its own passes with it"
    return None


def gradients(
    x: jax.Array, gain: jax.Array, d_out: jax.Array, d_residual: jax.Array | None, epsilon: float, centered: bool
) -> tuple[jax.Array, jax.Array]:
    """Compute the gradients of norm(x) * gain + bias by the Triton kernel.

    Args:
        x, d_out: [..., D].
        gain: [D] float32.
        d_residual: gradient of x from a residual branch [..., D], or None.
        epsilon: epsilon of the norm.
        centered: True for LayerNorm, False for RMSNorm, which has no bias.

    Returns:
        d_x [..., D], residual branch included, and the gradients of gain and, if centered, of bias [1 or 2, D] in
        float32.
    """

    @jax.custom_batching.sequential_vmap
    def launch(gain: jax.Array, *arrays: jax.Array) -> tuple:
        flat = [array.reshape(-1, x.shape[-1]) for array in arrays]
        d_x, sums = _launch(gain, flat, epsilon, centered)
        return d_x.reshape(arrays[0].shape), sums.sum(1)

    return launch(gain, x, d_out, *(() if d_residual is None else (d_residual.astype(x.dtype),)))


def _launch(gain: jax.Array, arrays: list[jax.Array], epsilon: float, centered: bool) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.normalization.triton_kernel import gradient_kernel

    x, d_out, *past = arrays
    rows, width = x.shape
    warps = max(1, (1 << (width - 1).bit_length()) // _ELEMENTS)
    plan = NormKernelPlan(rows, width, centered, bool(past), epsilon, max(1, _WARPS // warps) * multiprocessors())
    major, minor = current_target().compute_capability or (0, 0)
    return triton_call(
        x,
        gain,
        d_out,
        *(past or [d_out]),
        kernel=gradient_kernel,
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((1 + centered, plan.programs, width), jnp.float32),
        ),
        grid=(plan.programs,),
        name="norm_gradients",
        num_warps=warps,
        num_stages=1,
        compute_capability=10 * major + minor,
        plan=plan,
    )
