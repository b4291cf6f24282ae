"""FP8 products with a scale for every 128 values (DeepSeek-V3, Liu et al., arXiv:2412.19437, section 3.3).

Along the summed dim an activation or a gradient has one scale for 128 values of a row, a weight one for 128 x 128. All
of them are E4M3: with scales so local the range of E5M2 is not needed. What is summed differs between the products
(D forward, outputs for the input's gradient, rows for the weight's), so activations and gradients are quantised twice,
along their rows and along their columns, in one go.

Everything here has two dims: M rows, K summed or input, N outputs; scales are float32, [groups of the summed dim, ...].
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from pallas_kernels.fp8.formats import E4M3, Quantized, keep, power_of_two_scale, saturating_cast
from pallas_kernels.fp8.plan import Plan
from pallas_kernels.target import automatic_axes

BLOCK = 128


class Operations(NamedTuple):
    """What a backend computes; every array is two-dimensional."""

    quantize_both: Callable[[jax.Array], tuple[Quantized, Quantized]]
    """x [M, K] -> (x by groups of its rows, its transpose [K, M] by groups of its rows)."""
    product: Callable[[Quantized, Quantized, Any], jax.Array]
    """a [M, K], b [N, K], dtype of the result -> a @ b.T [M, N]."""


def quantize_rows(x: jax.Array) -> Quantized:
    """x [M, K] in E4M3 with one scale for 128 values of a row: inverse scales [K / 128, M] (K rounded up)."""
    rows, width = x.shape
    grouped = _resized(x, rows, width + -width % BLOCK).reshape(rows, -1, BLOCK)
    scale = power_of_two_scale(jnp.max(jnp.abs(grouped), axis=2), E4M3)
    values = saturating_cast(grouped, scale[:, :, None], E4M3).reshape(rows, -1)
    return Quantized(_resized(values, rows, width), 1.0 / scale.T)


def quantize_both(x: jax.Array) -> tuple[Quantized, Quantized]:
    """x [M, K] by groups of its rows, and its transpose by groups of its own."""
    return quantize_rows(x), quantize_rows(x.T)


def quantize_weight(weight: jax.Array) -> Quantized:
    """weight [K, N] in E4M3 with one scale for 128 x 128 values: inverse scales [K / 128, N / 128] (rounded up)."""
    inner, outputs = weight.shape
    padded = _resized(weight, inner + -inner % BLOCK, outputs + -outputs % BLOCK)
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scale = power_of_two_scale(jnp.max(jnp.abs(blocks), axis=(1, 3)), E4M3)
    values = saturating_cast(blocks, scale[:, None, :, None], E4M3).reshape(padded.shape)
    return Quantized(_resized(values, inner, outputs), 1.0 / scale)


def multiply_dequantized(a: Quantized, b: Quantized, dtype: Any) -> jax.Array:
    """a [M, K] @ b [N, K].T of the numbers that they stand for, summed in float32."""
    left, right = _dequantize(a, dtype), _dequantize(b, dtype)
    return lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _dequantize(x: Quantized, dtype: Any) -> jax.Array:
    values, inverse = x
    rows, width = values.shape
    if inverse.shape[1] != rows:
        inverse = _resized(jnp.repeat(inverse, BLOCK, axis=1), len(inverse), rows)
    return values.astype(dtype) * _resized(jnp.repeat(inverse.T, BLOCK, axis=1), rows, width).astype(dtype)


def _resized(x: jax.Array, rows: int, columns: int) -> jax.Array:
    """x [M, K] with zeros added, or numbers dropped, at the ends."""
    changes = rows - x.shape[0], columns - x.shape[1]
    resize = lambda x: jnp.pad(x, [(0, max(c, 0)) for c in changes])[:rows, :columns]  # noqa: E731
    if not any(changes) or not automatic_axes():
        return resize(x)
    # Whole meanwhile: XLA would move parts by permutes, which its CPU backend cannot run within a pipeline's stage.
    whole = P(*(None if change else P.UNCONSTRAINED for change in changes))
    return lax.with_sharding_constraint(resize(lax.with_sharding_constraint(x, whole)), whole)


def multiply(
    operations: Operations,
    plan: Plan,
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    quantized: tuple[Quantized | None, ...],
) -> tuple[jax.Array, ...]:
    """x [rows, D] times each weight [D, outputs], several dims as one; x is quantised once.

    A weight that comes `quantized` has been as a matrix [D, outputs], as `quantize_weight` does.
    """
    rows = x.shape[: x.ndim - plan.contracted]
    inner = x.size // max(1, _size(rows))
    matrices = tuple(w.reshape(inner, -1) for w in weights)
    given = tuple(
        quantize_weight(lax.stop_gradient(w)) if q is None else Quantized(q.values.reshape(w.shape), q.inverse_scale)
        for w, q in zip(matrices, quantized, strict=True)
    )
    carriers = tuple(w.astype(plan.dtype) for w in matrices)
    results: Any = _multiply(operations, plan, x.reshape(-1, inner), carriers, given)
    return tuple(y.reshape(*rows, *w.shape[plan.contracted :]) for y, w in zip(results, weights, strict=True))


def _size(dims: tuple[int, ...]) -> int:
    return functools.reduce(lambda a, b: a * b, dims, 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _multiply(
    operations: Operations,
    plan: Plan,
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    quantized: tuple[Quantized, ...],
) -> tuple[jax.Array, ...]:
    return _forward(operations, plan, x, weights, quantized)[0]


def _forward(
    operations: Operations,
    plan: Plan,
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    quantized: tuple[Quantized, ...],
) -> tuple[tuple[jax.Array, ...], Any]:
    del weights
    by_rows, turned = operations.quantize_both(x)
    turned_weights = [Quantized(w.values.T, w.inverse_scale) for w in quantized]
    outs = tuple(operations.product(by_rows, w, plan.output) for w in turned_weights)
    return outs, (keep(turned), quantized)


def _backward(operations: Operations, plan: Plan, saved: Any, gradients: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    turned_x, quantized = saved
    d_x, d_weights = [], []
    for gradient, weight in zip(gradients, quantized, strict=True):
        by_rows, turned = operations.quantize_both(gradient)
        weight = Quantized(weight.values, weight.inverse_scale.T)
        d_x.append(operations.product(by_rows, weight, plan.dtype))
        d_weights.append(operations.product(turned_x, turned, plan.dtype))
    total = functools.reduce(jnp.add, [d.astype(jnp.float32) for d in d_x]) if len(d_x) > 1 else d_x[0]
    return total.astype(plan.dtype), tuple(d_weights), tuple(None for _ in quantized)


_multiply.defvjp(_forward, _backward)

XLA = Operations(quantize_both, multiply_dequantized)
