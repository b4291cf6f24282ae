"""`float8_mlp`: XLA's form against NumPy, and the kernel's, interpreted and compiled for an H200.

Triton decides at its import whether kernels are interpreted, so that runs in a process of its own:
`TRITON_INTERPRET=1 python -m tests.pallas_kernels.weight_only.test_float8_mlp bfloat16`.
"""

import dataclasses
import functools
import re
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import PackedWeight, lowering_platform, swiglu
from pallas_kernels.target import current_target
from pallas_kernels.weight_only import float8_mlp as module
from pallas_kernels.weight_only import float8_products
from pallas_kernels.weight_only.float8_mlp import SwigluPlan, float8_mlp
from pallas_kernels.weight_only.float8_products import MOST_EXACT_ROWS
from pallas_kernels.weight_only.packed import pack_float8
from tests.hopper import compile_for_hopper
from tests.pallas_kernels.triton_interpreter import (
    Array,
    let_casts_round,
    let_numpy_index,
    needs_triton,
    run_interpreted,
)
from tests.shapes import unchecked

ROWS = MOST_EXACT_ROWS + 6
INPUTS, HIDDEN, OUTPUTS = 64, 80, 48
NAMES = {"bfloat16": "bf16", "float32": "fp32", "float8_e4m3fn": "fp8e4nv"}


def weight(outputs: int, inputs: int, seed: int) -> PackedWeight:
    random = np.random.default_rng(seed)
    q = random.normal(size=(outputs, inputs), scale=64).astype(ml_dtypes.float8_e4m3fn)
    scales = random.uniform(0.001, 0.002, (outputs, 1)).astype(ml_dtypes.bfloat16)
    return pack_float8(jnp.asarray(q), jnp.asarray(scales), round_inputs=True)


GATE_UP = weight(2 * HIDDEN, INPUTS, 1)
DOWN = weight(OUTPUTS, HIDDEN, 2)


def inputs(rows: int = ROWS) -> np.ndarray:
    """Tokens of different sizes, and one of zeros."""
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, INPUTS)) * 10.0 ** random.uniform(-2, 2, (rows, 1))
    x[3] = 0
    return x.astype(np.float32)


def rounded_by_xla(sums, token_scales, scales, target):
    """`round_swiglu` without its kernel."""
    del target
    hidden = float8_products.scale_sums(sums, token_scales, scales).astype(sums.dtype)
    return float8_products.quantize_tokens(swiglu(*jnp.split(hidden, 2, axis=1)))


def round_rows(x: np.ndarray) -> np.ndarray:
    """Tokens rounded to FP8 with their own scales."""
    scales = np.abs(x).max(1, keepdims=True) / 448
    scales[scales == 0] = 1
    return (x / scales).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales


def matrix(weight: PackedWeight) -> np.ndarray:
    return np.asarray(weight.arrays["q"], np.float64) * np.asarray(weight.arrays["scales"], np.float64)


def gated(y: np.ndarray) -> np.ndarray:
    gate, up = np.split(y, 2, axis=1)
    return gate / (1 + np.exp(-gate)) * up


def by_numpy(x: np.ndarray, rounds: bool) -> np.ndarray:
    rounded = round_rows if rounds else lambda x: x
    return rounded(gated(rounded(x.astype(np.float64)) @ matrix(GATE_UP).T)) @ matrix(DOWN).T


@pytest.mark.parametrize("rows", [MOST_EXACT_ROWS, ROWS])
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 0.02), (jnp.bfloat16, 0.04)])
def test_values_are_those_of_numpy(dtype, tolerance, rows):
    """A number beside a boundary of FP8 may be rounded to either neighbour, a step of 1/16 of it."""
    x = inputs(rows).astype(dtype)
    found = np.asarray(jax.jit(float8_mlp)(x[None], GATE_UP, DOWN)[0], np.float64)
    expected = by_numpy(x, rounds=rows > MOST_EXACT_ROWS)
    assert found.shape == (rows, OUTPUTS) and not found[3].any()
    sizes = np.linalg.norm(expected, axis=1)
    assert np.all(np.linalg.norm(found - expected, axis=1) <= tolerance * sizes)
    if rows > MOST_EXACT_ROWS:
        exact = by_numpy(x, rounds=False)
        assert np.median(np.linalg.norm(expected - exact, axis=1) / np.maximum(sizes, 1e-9)) > 0.02


def interpret(dtype: str) -> None:
    """Compare the kernel with NumPy; a scale differs by float32's rounding, a number by one step of FP8."""
    from pallas_kernels.weight_only.triton_swiglu import round_swiglu_kernel

    let_numpy_index()
    let_casts_round()
    random = np.random.default_rng(0)
    sums = (random.normal(size=(ROWS, 2 * HIDDEN)) * 10.0 ** random.uniform(-2, 2, (ROWS, 1))).astype(dtype)
    sums[3] = 0
    sums[4] = 1e-19  # hidden values of 1e-38, with a scale whose inverse is infinite
    sums[5, 7] = np.nan
    sums[6, 7] = np.inf
    token_scales = random.uniform(0.5, 2, (ROWS, 1)).astype(np.float32)
    scales = random.uniform(0.5, 2, (2 * HIDDEN, 1)).astype(ml_dtypes.bfloat16)
    rounded = np.zeros((ROWS, HIDDEN), ml_dtypes.float8_e4m3fn)
    found = np.full((ROWS, 1), np.nan, np.float32)
    arrays = [Array(x, NAMES[str(x.dtype)]) for x in (sums, token_scales, scales, rounded, found)]
    round_swiglu_kernel[(ROWS,)](*arrays, plan=SwigluPlan(HIDDEN))
    scaled = (sums.astype(np.float32) * token_scales * scales[:, 0].astype(np.float32)).astype(dtype)
    product = gated(scaled.astype(np.float64)).astype(np.float32).astype(dtype).astype(np.float64)
    expected = np.abs(product).max(1, keepdims=True) / 448
    expected[3] = 1
    broken = np.isnan(rounded.astype(np.float32)) | ~np.isfinite(found)
    assert broken[5].any() and broken[6].any() and not broken[4].any()
    assert np.abs(rounded[4].astype(np.float32)).max() > 400, "its scale has few bits"
    kept = np.delete(np.arange(ROWS), [4, 5, 6])
    rounded, found, product, expected = (x[kept] for x in (rounded, found, product, expected))
    np.testing.assert_allclose(found, expected, rtol=1e-2 if dtype == "bfloat16" else 1e-5)
    error = np.abs(rounded.astype(np.float64) * found - product)
    assert np.all(error <= np.maximum(np.abs(product) / 12, found * 2.0**-9)) and not rounded[3].any()
    assert np.all(np.abs(rounded.astype(np.float32)).max(1) == np.where(kept == 3, 0, 448))


@needs_triton
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernel_scales_gates_and_rounds_each_token(dtype):
    done = run_interpreted(__spec__.name, dtype)
    assert done.returncode == 0, done.stderr[-3000:]


def compiled(function, rows: int, dtype: jnp.dtype = jnp.bfloat16) -> str:
    x = jax.ShapeDtypeStruct((rows, INPUTS), dtype)
    weights = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (GATE_UP, DOWN))
    with lowering_platform("cuda"):
        return compile_for_hopper(jax.jit(function), x, *weights).as_text()


@needs_triton
def test_compiled_for_hopper_hidden_values_are_written_once():
    text = compiled(float8_mlp, 256)
    assert text.count('custom_call_target="triton_kernel_call_ffi"') == 1
    by_fusions = rf" = .*\[256,{HIDDEN}\].* fusion\("
    assert not re.search(by_fusions, text)
    assert re.search(by_fusions, compiled(functools.partial(float8_mlp, implementation="xla"), 256))
    assert "triton_kernel_call_ffi" not in compiled(float8_mlp, MOST_EXACT_ROWS)


@pytest.mark.longer
def test_values_and_gradients_around_the_kernel_are_those_of_the_two_products(monkeypatch):
    monkeypatch.setattr(module, "round_swiglu", rounded_by_xla)
    x = jnp.asarray(inputs())

    def total(x, scales, function):
        gate_up, down = (
            dataclasses.replace(weight, arrays={**weight.arrays, "scales": scale})
            for weight, scale in zip((GATE_UP, DOWN), scales, strict=True)
        )
        y = function(x, gate_up, down)
        return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))), y

    scales = tuple(weight.arrays["scales"].astype(jnp.float32) for weight in (GATE_UP, DOWN))

    def by_kernel(x, gate_up, down):
        return module._by_kernel(x, gate_up, down, current_target())

    (_, found), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(x, scales, by_kernel)
    (_, wanted), expected = jax.value_and_grad(total, (0, 1), has_aux=True)(x, scales, float8_mlp)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate_up": weight(HIDDEN, INPUTS, 1)}, "twice the inputs of down"),
        ({"x": np.zeros((ROWS, INPUTS + 1), np.float32)}, "twice the inputs of down"),
        ({"implementation": "triton", "x": inputs()[:MOST_EXACT_ROWS]}, "are not rounded|needs"),
        ({"down": pack_float8(DOWN.arrays["q"], DOWN.arrays["scales"], round_inputs=False)}, "single matrices in"),
    ],
)
def test_arguments_that_break_a_rule_are_told(change, message):
    arguments = {"x": inputs(), "gate_up": GATE_UP, "down": DOWN} | change
    with unchecked(), pytest.raises(ValueError, match=message):
        float8_mlp(**arguments)


if __name__ == "__main__":
    interpret(sys.argv[1])
