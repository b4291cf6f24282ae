"""The gradients of a norm by a Triton kernel, which reads every array once.

As XLA fusions it is two passes: one for the sums over rows, one for the gradients, which needs them.
"""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp

from pallas_kernels.target import automatic_axes, current_target, multiprocessors

_LEAST_CAPABILITY = (8, 0)
_WIDEST = 8192
_FEWEST_ROWS = 4096
_WARPS = 12
"""Of all programs on a multiprocessor: what their registers have room for."""
_ELEMENTS = 512
"""Of a row, that a warp has: sixteen a thread, of three arrays, twice."""


@dataclasses.dataclass(frozen=True)
class NormKernelPlan:
    """The static part of a launch, as the kernel reads it."""

    rows: int
    width: int
    centered: bool
    has_residual: bool
    """Whether there is a gradient of x that does not come through the norm."""
    epsilon: float
    programs: int

    @property
    def padded(self) -> int:
        return 1 << (self.width - 1).bit_length()


def kernel_applies(x: jax.Array) -> bool:
    """Whether the kernel is installed, and the target and the array [..., D] are its own."""
    capability = current_target().compute_capability
    installed = all(importlib.util.find_spec(name) for name in ("triton", "jax_triton"))
    right = x.dtype.itemsize == 2 and x.shape[-1] % 8 == 0 and 256 <= x.shape[-1] <= _WIDEST
    large = x.size // max(x.shape[-1], 1) >= _FEWEST_ROWS
    return (
        installed
        and capability is not None
        and capability >= _LEAST_CAPABILITY
        and right
        and large
        and not (automatic_axes())
    )


def gradients(
    x: jax.Array, gain: jax.Array, d_out: jax.Array, d_residual: jax.Array | None, epsilon: float, centered: bool
) -> tuple[jax.Array, jax.Array]:
    """Of norm(x) * gain + bias, and of x beside it: d_x [..., D]; of gain and, centered, of bias [1 or 2, D] float32.

    Args:
      x, d_out, d_residual: [..., D]; d_residual is the gradient of x that does not come through the norm, if any.
      gain: [D] float32.
      centered: LayerNorm; else RMSNorm, which has no bias.
    """

    @jax.custom_batching.sequential_vmap
    def launch(gain: jax.Array, *arrays: jax.Array) -> tuple:
        flat = [array.reshape(-1, x.shape[-1]) for array in arrays]
        d_x, sums = _launch(gain, flat, epsilon, centered)
        return d_x.reshape(arrays[0].shape), sums.sum(1)

    return launch(gain, x, d_out, *(() if d_residual is None else (d_residual.astype(x.dtype),)))


def _launch(gain: jax.Array, arrays: list[jax.Array], epsilon: float, centered: bool) -> tuple[jax.Array, jax.Array]:
    import jax_triton

    from pallas_kernels.normalization.triton_kernel import gradient_kernel

    x, d_out, *past = arrays
    rows, width = x.shape
    warps = max(1, (1 << (width - 1).bit_length()) // _ELEMENTS)
    plan = NormKernelPlan(rows, width, centered, bool(past), epsilon, max(1, _WARPS // warps) * multiprocessors())
    major, minor = current_target().compute_capability or (0, 0)
    return jax_triton.triton_call(
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
