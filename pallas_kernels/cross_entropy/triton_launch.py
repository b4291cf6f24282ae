"""Launch of the Triton kernel that computes a chunk's losses and overwrites its logits with their gradient."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels.cross_entropy.request import Options
from pallas_kernels.triton_support import triton_call

_LONG_ROW = 128 * 1024
"""Size in bytes above which a row of logits gets more warps.

All rows in progress must fit into the GPU's cache: of long rows, fewer are processed at once, with more warps each.
"""


@dataclasses.dataclass(frozen=True)
class RowKernelPlan:
    """Compile-time constants of the Triton kernel that turns logits into their gradient."""

    vocabulary: int
    groups: int
    """Number of groups of eight columns that a program processes at once."""
    ignore_index: int
    z_loss: float
    log2e: float = math.log2(math.e)

    @property
    def blocks(self) -> int:
        """Number of blocks of 8 * `groups` columns in a row of logits, rounded up."""
        return -(-self.vocabulary // (8 * self.groups))


def loss_and_gradient(
    options: Options, logits: jax.Array, labels: jax.Array, d_losses: jax.Array, capability: int
) -> tuple[jax.Array, jax.Array]:
    """Compute each token's loss, float32 [...], and overwrite the logits [..., V] with their gradient.

    Args:
        options: the static arguments of the call.
        logits: [..., V] in 16 bits.
        labels: integers [...].
        d_losses: the gradient of each loss [...].
        capability: compute capability of the GPU, 90 for 9.0.
    """

    @jax.custom_batching.sequential_vmap
    def launch(logits: jax.Array, labels: jax.Array, d_losses: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = labels.size
        vocabulary = logits.shape[-1]
        flat = (logits.reshape(rows, vocabulary), labels.reshape(rows), d_losses.reshape(rows))
        gradient, losses = _launch(options, *flat, capability)
        return losses.reshape(labels.shape), gradient.reshape(logits.shape)

    return launch(logits, labels, d_losses.astype(jnp.float32))


def _launch(
    options: Options, logits: jax.Array, labels: jax.Array, d_losses: jax.Array, capability: int
) -> tuple[jax.Array, jax.Array]:
    from pallas_kernels.cross_entropy.triton_kernel import gradient_kernel

    rows, vocabulary = logits.shape
    warps = 32 if vocabulary * logits.dtype.itemsize > _LONG_ROW else 16
    return triton_call(
        logits,
        labels,
        d_losses,
        kernel=gradient_kernel,
        out_shape=(jax.ShapeDtypeStruct(logits.shape, logits.dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)),
        input_output_aliases={0: 0},
        grid=(rows,),
        name="cross_entropy_rows",
        num_warps=warps,
        num_stages=1,
        compute_capability=capability,
        plan=RowKernelPlan(vocabulary, 64 * warps, options.ignore_index, options.z_loss),
    )
