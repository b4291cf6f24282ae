"""The AdamW optimizer with moments stored in 8 bits."""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree, UInt8
from pydantic import Field

from jaxstack.optim.base import HasShape, MatrixOptimizer, RunInfo

BLOCK = 256
"""Number of values that share a scale."""


class Quantized(NamedTuple):
    """An array quantized to 8 bits, with one scale for each block of values."""

    codes: PyTree
    """Indices into the table of the dynamic code, uint8, of the parameter's shape."""
    scales: PyTree
    """Largest magnitude of each block of up to 256 values, float32."""


class AdamW8bitState(NamedTuple):
    """Optimizer state of 8-bit AdamW: first and second moments, quantized to 8 bits."""

    steps: jax.Array
    """[] int32: steps taken."""
    mu: Quantized
    """First moments."""
    root_nu: Quantized
    """Square roots of the second moments."""


class AdamW8bit(MatrixOptimizer):
    """AdamW with 8-bit moments and one scale per block of 256 values (Dettmers et al. 2022, arXiv:2110.02861).

    The square root of the second moment is stored, so that its code covers as many decades as that of the first.
    Embeddings, head, vectors and matrices below `min_size` keep float32. State: 2 bytes per quantized weight.
    """

    name: Literal["adamw_8bit"] = "adamw_8bit"
    weight_decay: float = Field(default=0.1, ge=0)
    min_size: int = Field(default=4096, ge=1)
    """Smallest number of values of a matrix that is quantized."""

    def updates_as_matrix(self, path: str, leaf: HasShape) -> bool:
        rule = self.rule(path)
        return (
            super().updates_as_matrix(path, leaf)
            and math.prod(leaf.shape[-rule.inputs - rule.outputs :]) >= self.min_size
        )

    def matrix_core(self, run: RunInfo) -> optax.GradientTransformation:
        def init(params: PyTree) -> AdamW8bitState:
            zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
            return AdamW8bitState(jnp.zeros((), jnp.int32), _pack(zeros, True), _pack(zeros, False))

        def update(updates: PyTree, state: Any, params: PyTree = None) -> tuple[PyTree, AdamW8bitState]:
            count = state.steps + 1
            mu = optax.tree.update_moment(updates, _unpack(state.mu, True), self.b1, 1)
            nu = jax.tree.map(jnp.square, _unpack(state.root_nu, False))
            nu = optax.tree.update_moment(updates, nu, self.b2, 2)
            first = 1 - self.b1**count
            second = 1 - self.b2**count
            root = jax.tree.map(jnp.sqrt, nu)

            def direction(m, r):
                return (m / first) / (r / jnp.sqrt(second) + self.eps)

            return jax.tree.map(direction, mu, root), AdamW8bitState(count, _pack(mu, True), _pack(root, False))

        return optax.GradientTransformation(init, update)


@functools.cache
def dynamic_code(signed: bool) -> np.ndarray:
    """Return the 256 values that the codes of the dynamic 8-bit data type (arXiv:1511.04561) represent, ascending.

    The values span 7 decades; higher decades use more of the 7 bits for the fraction.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        means = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*means, *(-means if signed else ())]
    return np.sort(np.asarray(values)).astype(np.float32)


def quantize(x: Float[Array, "..."], signed: bool) -> tuple[UInt8[Array, "..."], Float[Array, "..."]]:
    """Quantize x to the dynamic 8-bit data type, with one scale per block: the block's largest magnitude.

    Blocks are up to 256 consecutive values of the last dim, or of the last two where the last is shorter than that and
    divides 256.

    Returns:
      Codes of x's shape, and scales with as many dims: the number of blocks along the dims that the blocks divide.
    """
    blocks, scale_shape = _blocks(x, x.shape)
    scales = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    table = dynamic_code(signed)
    codes = jnp.searchsorted(jnp.asarray((table[1:] + table[:-1]) / 2), blocks / jnp.where(scales > 0, scales, 1))
    return _joined(codes.astype(jnp.uint8), x.shape), scales.reshape(scale_shape)


def dequantize(codes: UInt8[Array, "..."], scales: Float[Array, "..."], signed: bool) -> Float[Array, "..."]:
    """Convert 8-bit codes and block scales back to float32 values: the inverse of `quantize`."""
    blocks, _ = _blocks(codes, codes.shape)
    values = jnp.asarray(dynamic_code(signed))[blocks] * scales.reshape(*blocks.shape[:-1], 1)
    return _joined(values, codes.shape)


def _blocks(x: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """Split x into blocks, padded with zeros; return [..., blocks, block size] and the shape of the blocks' scales."""
    *before, rows, last = shape
    if last < BLOCK and BLOCK % last == 0 and rows % (BLOCK // last) == 0:
        count = rows * last // BLOCK
        return x.reshape(*before, count, BLOCK), (*before, count, 1)
    count = -(-last // BLOCK)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count * BLOCK - last)]) if last % BLOCK else x
    return padded.reshape(*before, rows, count, BLOCK), (*before, rows, count)


def _joined(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Join blocks to an array of this shape and remove the padding: the inverse of `_blocks`."""
    *before, rows, last = shape
    if blocks.ndim == len(shape):
        return blocks.reshape(shape)
    return blocks.reshape(*before, rows, -1)[..., :last]


def _pack(tree: PyTree, signed: bool) -> Quantized:
    def pairs(part):
        return jax.tree.map(lambda x: quantize(x, signed)[part], tree)

    return Quantized(pairs(0), pairs(1))


def _unpack(state: Quantized, signed: bool) -> PyTree:
    return jax.tree.map(lambda codes, scales: dequantize(codes, scales, signed), state.codes, state.scales)
