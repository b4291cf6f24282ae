"""Activations and softmax in block floating point: 8-bit integers whose blocks share a power of two (BCT).

Dong et al. 2023, arXiv:2304.01483. Every operand of a layer's matmul is rounded to 8 bits: a matmul is a sum of exact
int8 products, each block's times a power of two. Norms, activation functions, the residual stream and the head are in
the compute dtype.
"""

import dataclasses
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxstack.models.attention.base import AttentionSpec, CacheRoom, LayerCache, SegmentIds
from jaxstack.models.attention.softmax import SoftmaxAttention
from jaxstack.models.linear import Linear
from jaxstack.models.transformer import Transformer
from pallas_kernels.low_bits.block_float import block_exponents, round_to_steps
from pallas_kernels.weight_only.formats import powers_of_two

BLOCK = 64
"""Values that share a power of two; if this does not divide a dim, blocks have their greatest common divisor."""
_BITS = 8
_FRACTION_BITS = 5
_ONE_BITS = 15
"""Fractional bits of the exponents in the softmax (`_FRACTION_BITS`), and of its exponentials (`_ONE_BITS`)."""


def encode_blocks(x: Float[Array, "*rows K"], bits: int = _BITS) -> tuple[Int[Array, "*rows K"], Int[Array, "*rows n"]]:
    """Quantize x in blocks along its last dim; return int8 integers and each block's power-of-two exponent, int8."""
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, math.gcd(BLOCK, x.shape[-1]))
    exponents = block_exponents(jnp.abs(blocks).max(-1), bits)
    return round_to_steps(blocks, exponents[..., None], bits).reshape(x.shape), exponents


def round_blocks(x: Float[Array, "*rows K"], bits: int = _BITS) -> Float[Array, "*rows K"]:
    """Round x to block floating point along its last dim; x's own dtype holds the rounded values exactly."""
    q, exponents = encode_blocks(x, bits)
    scaled = q.reshape(*exponents.shape, -1) * powers_of_two(exponents)[..., None]
    return scaled.reshape(x.shape).astype(x.dtype)


def integer_matmul(
    q: Int[Array, "M K"],
    exponents: Int[Array, "M n"],
    w: Int[Array, "N K"],
    w_exponents: Int[Array, "N n"],
) -> Float[Array, "M N"]:
    """Return q @ w.T of block-scaled integers: an int8 dot with int32 sums for each block, scaled and added in float32.

    Args:
      q, exponents: from `encode_blocks`.
      w, w_exponents: weights whose rows have the same blocks, such as those of tiles.
    """
    blocks = exponents.shape[1]
    left, right = (a.astype(jnp.int8).reshape(a.shape[0], blocks, -1) for a in (q, w))
    sums = jnp.einsum("mbk,nbk->bmn", left, right, preferred_element_type=jnp.int32).astype(jnp.float32)
    shifts = exponents.astype(jnp.int32).T[:, :, None] + w_exponents.astype(jnp.int32).T[:, None, :]
    return (sums * powers_of_two(jnp.clip(shifts, -126, 127))).sum(0)


def integer_softmax(scores: Float[Array, "*rows S"], visible: Bool[Array, "*#rows S"]) -> Float[Array, "*rows S"]:
    """Return the softmax over unmasked scores, from integer exponentials, rounded to 8-bit block floating point.

    Exponentials are entries of a table of 32 powers of two, shifted right: exp(s - max) = 2^-t for a fixed-point t.
    """
    scores = jnp.where(visible, scores, -jnp.inf)
    distance = (scores.max(-1, keepdims=True) - scores) * math.log2(math.e)
    steps = jnp.round(jnp.minimum(distance, _ONE_BITS + 1) * 2**_FRACTION_BITS).astype(jnp.int32)
    table = [round(2 ** (_ONE_BITS - i / 2**_FRACTION_BITS)) for i in range(2**_FRACTION_BITS)]
    powers = jnp.asarray(table, jnp.int32)[steps & (2**_FRACTION_BITS - 1)] >> (steps >> _FRACTION_BITS)
    powers = jnp.where(visible, powers, 0)
    return round_blocks(powers.astype(jnp.float32) / powers.sum(-1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class BlockMatmul:
    """A `dot_general` over the last dim of x that first rounds x to 8-bit block floating point."""

    def __call__(self, x: jax.Array, kernel: jax.Array, dimension_numbers: Any, **options: Any) -> jax.Array:
        return jax.lax.dot_general(round_blocks(x), kernel, dimension_numbers, **options)


class IntegerSoftmax(SoftmaxAttention):
    """Softmax attention on 8-bit block floating point queries, keys, values and probabilities; it has no KV cache."""

    def attend(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        segment_ids: SegmentIds,
        heads: AttentionSpec,
    ) -> Float[Array, "B T N H"]:
        batch, length, _, width = q.shape
        at = jnp.arange(length)
        visible = (at[:, None] >= at)[None]
        if heads.window is not None:
            visible &= at[:, None] - at < heads.window
        if segment_ids is not None:
            visible &= segment_ids[:, :, None] == segment_ids[:, None]
        grouped = round_blocks(q).reshape(batch, length, k.shape[2], -1, width)
        scores = jnp.einsum("btkgh,bskh->bkgts", grouped, round_blocks(k), preferred_element_type=jnp.float32)
        scores *= heads.scale
        if heads.soft_cap:
            scores = jnp.tanh(scores / heads.soft_cap) * heads.soft_cap
        weights = integer_softmax(scores, visible[:, None, None]).astype(v.dtype)
        # Values are summed over keys, so that keys of one channel share a step.
        values = jnp.moveaxis(round_blocks(jnp.moveaxis(v, 1, -1)), -1, 1)
        return jnp.einsum("bkgts,bskh->btkgh", weights, values).reshape(q.shape)

    def make_cache(self, heads: AttentionSpec, batch: int, length: int, dtype: jax.typing.DTypeLike) -> LayerCache:
        raise ValueError("attention in integers computes whole sequences; it has no cache to generate with.")

    def make_shared_cache(self, heads: AttentionSpec, room: CacheRoom, dtype: jax.typing.DTypeLike) -> LayerCache:
        raise ValueError("attention in integers computes whole sequences; it has no cache to serve with.")


def in_integers(model: Transformer) -> Transformer:
    """Switch a model's layers, in place, to matmuls and softmax in 8-bit block floating point; return the model.

    Weights are used as they are: compress them with `bct` first, and give them as plain arrays.

    Raises:
      ValueError: the attention of the model is not softmax.
    """
    if not isinstance(model.config.attention, SoftmaxAttention):
        raise ValueError(f"integers need attention.name softmax; found {model.config.attention.name}.")
    for _, module in nnx.iter_modules(model.decoder):
        if isinstance(module, Linear):
            module.dot_general = BlockMatmul()
    for layer in model.decoder.layers:
        cast(Any, layer).attention.kind = IntegerSoftmax()
    return model
