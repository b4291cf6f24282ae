"""Packed weights: their values, products and bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Grid, PackedWeight, packed_matmul
from pallas_kernels.weight_only.bits import pack_bits, unpack_bits
from pallas_kernels.weight_only.formats import Float8Format, IntegerFormat, powers_of_two
from pallas_kernels.weight_only.packed import (
    pack_block_float,
    pack_float8,
    pack_integers,
    pack_lookup,
    pack_low_rank,
    pack_two_of_four,
)

OUT = 6
IN = 16
W = np.random.default_rng(0).normal(size=(OUT, IN)).astype(np.float32)


def packed(kind: str):
    """A packed matrix [OUT, IN] of each format, and the float32 matrix that it stands for."""
    if kind in ("int8", "int4"):
        grid = Grid(8) if kind == "int8" else Grid(4, 8)
        scales = grid.scales(W)
        q = grid.quantize(W, scales)
        return pack_integers(grid, q, scales), np.asarray(q, np.float32) * np.repeat(scales, IN // scales.shape[1], 1)
    if kind == "zeros":
        random = np.random.default_rng(0)
        q = random.integers(-8, 8, (OUT, IN))
        zeros = random.integers(-8, 8, (OUT, 2))
        scales = np.asarray([[0.5, 0.25]] * OUT, np.float32)
        arrays = {"q": jnp.asarray(q, jnp.int4), "scales": jnp.asarray(scales), "zeros": jnp.asarray(zeros, jnp.int4)}
        expected = (q - np.repeat(zeros, IN // 2, 1)) * np.repeat(scales, IN // 2, 1)
        return PackedWeight(arrays, IntegerFormat(Grid(4, IN // 2)), (IN,), (OUT,)), expected
    if kind == "float8":
        q = W.astype(jnp.float8_e4m3fn)
        scales = jnp.full((OUT, 1), 0.5)
        return pack_float8(q, scales), np.asarray(q, np.float32) / 2
    if kind == "float8_blocks":
        q = W.astype(jnp.float8_e4m3fn)
        scales = np.asarray([[0.5, 2], [3, 1]], np.float32)  # blocks of 4 x 12, the last ones smaller
        weight = PackedWeight({"q": jnp.asarray(q), "scales": jnp.asarray(scales)}, Float8Format(4, 12), (IN,), (OUT,))
        return weight, np.asarray(q, np.float32) * np.kron(scales, np.ones((4, 12)))[:OUT, :IN]
    if kind == "block_float":
        grid = Grid(6, 4)
        exponents = jnp.full((OUT, IN // 4), -3)
        q = grid.quantize(W, powers_of_two(exponents))
        return pack_block_float(grid, q, exponents), np.asarray(q, np.float32) / 8
    if kind in ("lookup", "lookup_exponents"):
        indices = np.random.default_rng(0).integers(0, 8, (OUT, IN))
        codebook = np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32)
        weight = pack_lookup(3, jnp.asarray(indices), jnp.asarray(codebook))
        expected = np.take_along_axis(np.repeat(codebook, OUT // 2, axis=0), indices, 1)
        if kind == "lookup":
            return weight, expected
        weight.arrays["exponents"] = exponents = jnp.asarray([[-1, 2]] * OUT, jnp.int8)
        return weight, expected * np.repeat(2.0 ** np.asarray(exponents), IN // 2, 1)
    if kind == "two_of_four":
        expected = W * (np.argsort(np.random.default_rng(1).normal(size=(OUT, IN // 4, 4))).reshape(OUT, IN) < 2)
        expected[0, :8] = [0, 0, 0, 1, 0, 0, 0, 0]  # fewer than two numbers that are not zero
        return pack_two_of_four(jnp.asarray(expected)), expected
    u = W[:, :2]
    v = W[:2]
    return pack_low_rank(u, v), np.asarray(u, np.float64) @ np.asarray(v, np.float64)


KINDS = (
    "int8", "int4", "zeros", "float8", "float8_blocks", "block_float", "lookup", "lookup_exponents", "low_rank",
    "two_of_four",
)  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS)
def test_values_rows_and_products_are_those_of_the_matrix(kind):
    weight, expected = packed(kind)
    np.testing.assert_allclose(weight.matrix(), expected, rtol=1e-6, atol=1e-6)
    ids = jnp.asarray([[5, 0], [3, 3]])
    np.testing.assert_allclose(weight.rows(ids), expected[ids], rtol=1e-6, atol=1e-6)
    x = jax.random.normal(jax.random.key(1), (2, 3, IN))
    y = jax.jit(packed_matmul)(x, weight)
    np.testing.assert_allclose(y, x @ expected.T, rtol=1e-5, atol=1e-5)
    narrow = packed_matmul(x.astype(jnp.bfloat16), weight, out_dtype=jnp.float32)
    error = jnp.abs(narrow - y).max() / jnp.abs(y).max()
    assert narrow.dtype == jnp.float32 and error < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_pass_keeps_the_packed_arrays_and_not_the_matrix(kind):
    weight, expected = packed(kind)
    x = jax.random.normal(jax.random.key(1), (3, IN), jnp.bfloat16)
    y, pull = jax.vjp(lambda x: packed_matmul(x, weight, implementation="xla"), x)
    stored = {(leaf.shape, leaf.dtype) for leaf in [x, *weight.arrays.values()]}
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.ndim > 1]
    assert {(leaf.shape, leaf.dtype) for leaf in kept} <= stored
    (d_x,) = pull(jnp.ones_like(y))
    np.testing.assert_allclose(d_x, np.ones(y.shape) @ expected, rtol=0.05, atol=0.1)


def test_dims_of_heads_are_those_of_the_layer():
    weight, expected = packed("int8")
    split = weight.with_dims((4, 4), (2, 3))
    x = jax.random.normal(jax.random.key(1), (5, 4, 4))
    y = packed_matmul(x, split)
    np.testing.assert_allclose(y, (x.reshape(5, IN) @ expected.T).reshape(5, 2, 3), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(split.dense(), expected.T.reshape(4, 4, 2, 3))
    with pytest.raises(ValueError, match="not the dims"):
        weight.with_dims((4, 5), (2, 3))


@pytest.mark.parametrize(("kind", "unit"), [("int4", (1, 4)), ("float8_blocks", (1, 4)), ("lookup_exponents", (1, 4))])
def test_parts_that_end_within_a_group_get_scales_of_their_own(kind, unit):
    weight, _ = packed(kind)
    smaller = weight.divisible(3, 4)
    assert smaller.format.unit(smaller.arrays) == unit
    np.testing.assert_array_equal(smaller.matrix(), weight.matrix())
    once = dataclasses.replace(weight, arrays={**weight.arrays, "scales": jnp.asarray([[0.5, 2]])})
    if kind == "float8_blocks":
        assert once.divisible(3, 4).format == Float8Format(4, 4), "all outputs still share their scales"


def test_a_wrong_input_is_one_message():
    weight, _ = packed("int8")
    with pytest.raises(ValueError, match=r"last dims of x \[2, 15\] must be the weight's inputs \[16\]"):
        packed_matmul(jnp.ones((2, 15)), weight)


def test_stored_bytes_are_the_bits_of_the_integers_and_the_scales():
    assert packed("int8")[0].stored_bytes == OUT * IN + 4 * OUT
    assert packed("int4")[0].stored_bytes == OUT * IN // 2 + 4 * OUT * IN // 8
    assert packed("lookup")[0].stored_bytes == OUT * IN * 3 // 8 + 4 * 16
    assert packed("block_float")[0].stored_bytes == OUT * IN * 6 // 8 + OUT * IN // 4
    assert packed("two_of_four")[0].stored_bytes == 4 * OUT * IN // 2 + OUT * IN // 8


@pytest.mark.parametrize("bits", range(1, 9))
def test_integers_of_any_bits_survive_as_a_stream(bits):
    values = np.random.default_rng(bits).integers(-(2 ** (bits - 1)), 2 ** (bits - 1), (7, 33)).astype(np.int8)
    stream = pack_bits(values, bits)
    assert stream.size == -(-values.size * bits // 8)
    np.testing.assert_array_equal(unpack_bits(stream, bits, values.shape, signed=True), values)
    unsigned = (values.astype(np.int32) & (2**bits - 1)).astype(np.uint8)
    np.testing.assert_array_equal(unpack_bits(stream, bits, values.shape, signed=False), unsigned)


def test_the_first_value_is_in_the_lowest_bits():
    np.testing.assert_array_equal(pack_bits(np.array([1, 2, -1, 0], np.int8), 4), [0x21, 0x0F])


def test_a_packed_weight_is_a_tree_that_jit_and_map_keep():
    weight, _ = packed("int4")
    moved = jax.jit(lambda w: w)({"kernel": weight})["kernel"]
    assert (moved.format, moved.inputs, moved.outputs) == (weight.format, weight.inputs, weight.outputs)
    np.testing.assert_array_equal(moved.arrays["q"].astype(jnp.int8), weight.arrays["q"].astype(jnp.int8))
    assert weight.arrays["q"].dtype == jnp.int4
