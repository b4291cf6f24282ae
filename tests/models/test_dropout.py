"""Masks by token: independent between tokens, layers and uses, and the same wherever a token is computed."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxstack.models.dropout import drop, fold_key, split_key, token_keys
from tests.compilation import run_jitted

KEY = jax.random.key(3)


def test_each_token_and_each_part_of_the_model_has_a_key_of_its_own_wherever_the_token_lies():
    order = np.array([5, 0, 3])

    def numbers(positions):
        keys = token_keys(KEY, 4, positions)
        parts = (keys, *split_key(keys), fold_key(keys, 2), fold_key(keys, 3))
        return jax.tree.map(jax.random.key_data, (parts, token_keys(KEY, 2, positions[order])))

    parts, reordered = run_jitted(numbers, np.arange(6))
    assert len({tuple(key) for keys in parts for key in np.asarray(keys).reshape(24, -1).tolist()}) == 5 * 24
    np.testing.assert_array_equal(reordered, parts[0][:2, order])


def test_a_mask_belongs_to_its_token_and_has_the_right_mean():
    def masks(x):
        keys = token_keys(KEY, 4, jnp.arange(6))
        return drop(x, 0.25, keys), drop(x[1:3, 2:], 0.25, keys[1:3, 2:]), drop(x.reshape(4, 6, 8, 64), 0.25, keys)

    whole, part, heads = run_jitted(masks, np.ones((4, 6, 512), np.float32))
    np.testing.assert_array_equal(part, whole[1:3, 2:])
    np.testing.assert_allclose(np.unique(whole), [0, 1 / 0.75])
    assert abs(float(whole.mean()) - 1) < 0.03
    assert abs(float(heads.mean()) - 1) < 0.03


def test_without_a_key_nothing_is_dropped():
    x = jnp.ones((2, 3, 4))
    assert drop(x, 0.5, None) is x and drop(x, 0.0, KEY) is x
    assert fold_key(None, 1) is None and split_key(None) == (None, None)
