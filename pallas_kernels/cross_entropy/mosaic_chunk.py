"""Computes loss and logit gradients of a chunk of tokens from a Hopper kernel's exp(logit - mean logit).

Softmax less the label, times each token's factor, is (exponentials - total at the label) * factor / total. So no
further pass over the logits is needed after the product: the entry of the label is set, and everything else is one
factor for each row. The logits are never rounded.

The largest logit of a token need not be known beforehand: its mean logit, which is its product with the mean of the
weight's columns, is subtracted. By Jensen's inequality the total is then at least V, and bfloat16 has room for logits
that are 80 above the mean. The loss of a token with a larger logit is infinity here.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cross_entropy import mosaic_kernel
from pallas_kernels.cross_entropy.request import CrossEntropyRequest, Options
from pallas_kernels.hopper.matmul import DEPTH, TILE_ROWS, ProductTiling, TiledProduct, single_product
from pallas_kernels.hopper.target import unsupported_target

# Tests set this to run the kernel on a CPU.
INTERPRET = False
_STAGES = {192: 5, 128: 6}
"""Stages that fit into shared memory, by the columns of a tile; the vocabulary must be a multiple of these."""
_GROUP = 64
_LARGEST = math.exp(80)


def unsupported_reason(request: CrossEntropyRequest) -> str | None:
    """Return the first reason why the Hopper kernel cannot compute this call, or None if it can."""
    reason = unsupported_target(request.target, INTERPRET)
    if reason is not None:
        return reason
    (depth, vocabulary), options = request.weight.shape, request.options
    if request.hidden.dtype != jnp.bfloat16:
        return f"takes bfloat16, whose range the exponentials need, got {request.hidden.dtype}"
    if options.soft_cap is not None or options.axis_name is not None:
        return f"knows no soft cap and no sharded vocabulary, got {options}"
    if abs(options.z_loss) > 1e-3:
        return f"divides by 1 + 2 * z_loss * log-sum-exp: for a z_loss up to 0.001, got {options.z_loss}"
    if depth % DEPTH or vocabulary % min(_STAGES):
        return f"D and V must be multiples of {DEPTH} and {min(_STAGES)}, got {depth} and {vocabulary}"
    return None


def unsupported_rows(rows: int) -> str | None:
    """Return why the Hopper kernel cannot process a chunk of this many tokens, or None if it can."""
    return None if rows % TILE_ROWS == 0 else f"needs chunks of a multiple of {TILE_ROWS} tokens, got one of {rows}"


def make_product(rows: int, depth: int, vocabulary: int) -> TiledProduct:
    """Return the compile-time description of the matmul hidden [rows, D] @ weight [D, V] for the Hopper kernel."""
    columns = next(width for width in _STAGES if vocabulary % width == 0)
    tiling = ProductTiling(
        columns=columns, stages=_STAGES[columns], group=_GROUP, store_columns=32, turns=True, cluster=2
    )
    return single_product(rows, depth, vocabulary, tiling, interpret=INTERPRET)


def loss_and_gradient(
    options: Options,
    hidden: Float[Array, "*tokens D"],
    weight: Float[Array, "D V"],
    average: Float[Array, " D"],
    labels: Int[Array, "*tokens"],
    d_losses: Float[Array, "*tokens"],
) -> tuple[Float[Array, "*tokens"], Float[Array, "*tokens V"], Float[Array, "*tokens"]]:
    """Compute each token's loss, and its logits' gradient in two factors: an array [..., V] and a scalar per token.

    Args:
        options: Options of the loss.
        hidden: [..., D].
        weight: [D, V].
        average: Mean of the columns of the weight, float32 [D].
        labels: [...].
        d_losses: Gradient of each loss, [...].

    Returns:
        Losses float32 [...], and gradient [..., V] and factor [...]: the gradient of the logits is gradient * factor.
    """

    @jax.custom_batching.sequential_vmap
    def launch(hidden: jax.Array, weight: jax.Array, labels: jax.Array, shift: jax.Array) -> tuple:
        product = make_product(labels.size, *weight.shape)
        found = mosaic_kernel.exponentials(product, hidden, weight, labels, shift)
        return found.values, found.totals.sum(0), found.chosen.sum(0)

    shape, (depth, vocabulary) = labels.shape, weight.shape
    hidden = hidden.reshape(-1, depth)
    labels = labels.reshape(-1)
    d_losses = d_losses.reshape(-1)
    shift = (hidden.astype(average.dtype) * average).sum(axis=1)
    values, total, chosen = launch(hidden, weight, labels, shift)

    lse = shift + jnp.log(total)
    known = (labels >= 0) & (labels < vocabulary)
    loss = jnp.where(known, lse + options.z_loss * lse * lse - chosen, jnp.nan)
    loss = jnp.where(total < _LARGEST, jnp.where(labels == options.ignore_index, 0.0, loss), jnp.inf)

    slope = 1.0 + 2.0 * options.z_loss * lse
    label_value = (jnp.exp(chosen - shift) - total / slope).astype(values.dtype)
    rows = jnp.arange(labels.size, dtype=labels.dtype)
    columns = jnp.where(known, labels, vocabulary)
    values = values.at[rows, columns].set(label_value, mode="drop", unique_indices=True, indices_are_sorted=True)
    factor = jnp.where(labels == options.ignore_index, 0.0, d_losses) * slope / total
    return loss.reshape(shape), values.reshape(*shape, vocabulary), factor.reshape(shape)
