"""Bipolar integers: their values, and exact products for every pair of 1 to 8 bits."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.low_bits.bipolar import bipolar_matmul, decode_bipolar, encode_bipolar


def test_values_are_the_odd_numbers_of_the_format():
    assert decode_bipolar(jnp.arange(2, dtype=jnp.uint8), 1).tolist() == [-1, 1]
    assert decode_bipolar(jnp.arange(8, dtype=jnp.uint8), 3).tolist() == [-7, -5, -3, -1, 1, 3, 5, 7]
    bits = np.array([[1, 0, 1, 1]])
    assert ((2 * bits - 1) * 2 ** np.arange(4)).sum() == decode_bipolar(jnp.array(0b1101, jnp.uint8), 4)


@pytest.mark.parametrize("bits", range(1, 9))
def test_values_of_the_format_are_encoded_exactly(bits):
    u = jnp.arange(2**bits).astype(jnp.uint8)
    np.testing.assert_array_equal(encode_bipolar(decode_bipolar(u, bits).astype(jnp.float32), bits), u)
    far = jnp.array([-1e3, 1e3])
    assert decode_bipolar(encode_bipolar(far, bits), bits).tolist() == [1 - 2**bits, 2**bits - 1]


@pytest.mark.parametrize("x_bits", range(8, 0, -1))
def test_products_of_all_64_pairs_are_exact(x_bits):
    random = np.random.default_rng(x_bits)
    x = random.integers(0, 2**x_bits, (4, 96))
    for w_bits in range(1, 9):
        w = random.integers(0, 2**w_bits, (96, 5))
        found = bipolar_matmul(jnp.asarray(x, jnp.uint8), x_bits, jnp.asarray(w, jnp.uint8), w_bits)
        wanted = (2 * x - 2**x_bits + 1) @ (2 * w - 2**w_bits + 1)
        np.testing.assert_array_equal(found, wanted, err_msg=f"{x_bits} by {w_bits} bits")


LONGEST = (2**31 - 1) // 255**2


@pytest.mark.longer
def test_the_longest_sum_that_int32_holds_is_exact():
    ones = jnp.full((1, LONGEST), 255, jnp.uint8)
    assert bipolar_matmul(ones, 8, ones.T, 8)[0, 0] == 255**2 * LONGEST


def test_longer_sums_and_more_bits_are_refused():
    longer = jnp.zeros((1, LONGEST + 1), jnp.uint8)
    with pytest.raises(ValueError, match=f"at most {LONGEST}"):
        bipolar_matmul(longer, 8, longer.T, 8)
    with pytest.raises(ValueError, match="1 to 8 bits, not 9"):
        bipolar_matmul(longer, 9, longer.T, 1)
