"""BCT (blockwise compression of Transformers): integers that share a power of two, for weights and activations.

Dong et al. 2023, arXiv:2304.01483. Weights are integers with one power-of-two scale per tile of a matrix (`Bct`), also
with the error corrections of GPTQ (`BctGptq`). `in_integers` rounds activations and the softmax too: every operand of a
layer's matmul has 8 bits, and a matmul is a sum of exact int8 products, each block's times a power of two. Norms,
activation functions, the residual stream and the head are in the compute dtype.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field

from jaxstack.compress.base import AfterTraining, Compressed, DuringTraining, Format, InputStatistics, Method
from jaxstack.compress.solvers.column_sweep import ColumnSweepMethod
from jaxstack.compress.solvers.gptq import round_to_scales
from jaxstack.models.attention.base import AttentionSpec
from jaxstack.models.attention.softmax import SoftmaxAttention
from jaxstack.models.layer import CacheRoom, LayerCache, SegmentIds
from jaxstack.models.linear import Linear
from jaxstack.models.mixers.attention import Attention
from jaxstack.models.transformer import Transformer
from pallas_kernels.low_bits.block_float import block_exponents, round_to_steps
from pallas_kernels.weight_only.formats import TileFloatFormat, powers_of_two
from pallas_kernels.weight_only.packed import PackedWeight, pack_tile_float
from pallas_kernels.weight_only.rounding_grid import Grid

BLOCK = 64
"""Values that share a power of two; if this does not divide a dim, blocks have their greatest common divisor."""
_BITS = 8
_FRACTION_BITS = 5
_ONE_BITS = 15
"""Fractional bits of the exponents in the softmax (`_FRACTION_BITS`), and of its exponentials (`_ONE_BITS`)."""
_CANDIDATES = 3
"""Steps that are tried for a tile: that of its largest magnitude, a half and a quarter of it, which clip outliers."""


@dataclasses.dataclass(frozen=True)
class TileExponents(Format):
    """Integers with one power-of-two scale per tile of a matrix.

    Attributes:
      bits: bits of an integer, its sign included.
      tile_size: rows and columns of a tile.
      tile_outputs: rows of a tile; None: `tile_size`.
    """

    bits: int
    tile_size: int
    tile_outputs: int | None

    @property
    def tile(self) -> tuple[int, int]:
        """Shape of a tile: its number of outputs and of inputs."""
        return self.tile_outputs or self.tile_size, self.tile_size

    def unsupported_reason(self, outputs: int, inputs: int) -> str | None:
        if self.tile_outputs and outputs % self.tile_outputs:
            fitting = math.gcd(outputs, self.tile_outputs)
            return f"tile_outputs {self.tile_outputs} does not divide its {outputs} outputs; {fitting} does"
        for name, size in (("inputs", inputs), ("outputs", outputs)):
            if size % self.tile_size and (name == "inputs" or not self.tile_outputs):
                sizes = (inputs,) if self.tile_outputs else (inputs, outputs)
                fitting = max(n for n in range(1, self.tile_size + 1) if all(size % n == 0 for size in sizes))
                return f"tile_size {self.tile_size} does not divide its {size} {name}; {fitting} does"
        return None

    def pack(self, w: Float[Array, "out in"]) -> PackedWeight:
        return pack_tile_float(self.bits, *round_tiles(w, self.bits, *self.tile))


class TileMethod(Method):
    """Base of methods that round weights to integers with one power-of-two scale per tile of a matrix."""

    bits: int = Field(default=4, ge=2, le=8)
    """Bits of an integer, its sign included."""
    tile_size: int = Field(default=64, ge=1)
    """Rows and columns of a tile, which has one exponent of 8 bits."""
    tile_outputs: int | None = Field(default=None, ge=1)
    """Outputs of a tile; null: `tile_size`. Few suit matrices whose rows differ in size, such as embeddings."""

    @property
    def format(self) -> TileExponents:
        return TileExponents(self.bits, self.tile_size, self.tile_outputs)


class Bct(TileMethod, AfterTraining, DuringTraining):
    """Rounds weights to integers with one power-of-two scale per tile of a matrix (Dong et al. 2023, arXiv:2304.01483).

    Of the steps that are powers of two each tile takes the one with the least squared error. Needs no calibration text.
    `in_integers` rounds activations and softmax too.
    """

    method: Literal["bct"] = "bct"

    @property
    def title(self) -> str:
        return f"integers of {self.bits} bits with a power of two for {self.format.tile[0]} x {self.tile_size} weights"


class BctGptq(ColumnSweepMethod, TileMethod):
    """Rounds to integers with one power-of-two scale per tile as `bct` does, with the error corrections of GPTQ."""

    method: Literal["bct_gptq"] = "bct_gptq"

    def compress(self, w: Float[Array, "out in"], statistics: InputStatistics | None) -> Compressed:
        q, exponents, valid = _round(w, self.hessian(statistics), self.bits, self.format.tile, self.damping)
        self.warn_unless(valid, "rounded to the nearest values")
        return pack_tile_float(self.bits, q, exponents)


def round_tiles(
    w: Float[Array, "out in"], bits: int, rows: int, columns: int | None = None
) -> tuple[Int[Array, "out in"], Int[Array, "tiles_out tiles_in"]]:
    """Quantize a matrix in tiles [rows, columns] with power-of-two steps; return int8 integers and int8 exponents.

    Args:
      columns: default: as many as rows.
    """
    outputs, inputs = w.shape
    columns = columns or rows
    tiles = w.astype(jnp.float32).reshape(outputs // rows, rows, inputs // columns, columns)
    largest = block_exponents(jnp.abs(tiles).max((1, 3)), bits).astype(jnp.int32)

    def error(exponents: Int[Array, "tiles_out tiles_in"]) -> Float[Array, "tiles_out tiles_in"]:
        step = exponents[:, None, :, None]
        return jnp.square(round_to_steps(tiles, step, bits) * powers_of_two(step) - tiles).sum((1, 3))

    candidates = jnp.maximum(largest - jnp.arange(_CANDIDATES)[:, None, None], -100)
    best = jnp.argmin(jnp.stack([error(exponents) for exponents in candidates]), axis=0)
    exponents = jnp.take_along_axis(candidates, best[None], axis=0)[0]
    q = round_to_steps(tiles, exponents[:, None, :, None], bits).reshape(w.shape)
    return q, exponents.astype(jnp.int8)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _round(
    w: Float[Array, "out in"], hessian: Float[Array, "in in"], bits: int, tile: tuple[int, int], damping: float
) -> tuple[Int[Array, "out in"], Int[Array, "tiles_out tiles_in"], Bool[Array, ""]]:
    """Round a matrix in tiles by GPTQ; return integers, tile exponents, and whether the Hessian could be factorized."""
    _, exponents = round_tiles(w, bits, *tile)
    spread = TileFloatFormat(bits).scales({"q": w, "exponents": exponents})
    q, valid = round_to_scales(w, hessian, Grid(bits), spread, damping)
    return q, exponents, valid


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
    if others := [mixer.described for mixer in model.config.mixers() if mixer.title != "softmax"]:
        raise ValueError(f"integers need attention.name softmax; found {others[0]}.")
    for _, module in nnx.iter_modules(model.decoder):
        if isinstance(module, Linear):
            module.dot_general = BlockMatmul()
    for layer in model.decoder.layers:
        if isinstance(layer.attention, Attention):
            layer.attention.kind = IntegerSoftmax()
    return model
