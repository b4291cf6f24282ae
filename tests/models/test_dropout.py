"""Masks by token: independent between tokens, layers and uses, and the same wherever a token is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.models.dropout import drop, fold_key, split_key, token_keys

KEY = jax.random.key(3)


@pytest.mark.longer
def test_each_token_has_a_key_of_its_own_wherever_it_lies():
    keys = token_keys(KEY, 4, jnp.arange(6))
    assert len({tuple(k) for k in np.asarray(jax.random.key_data(keys)).reshape(24, -1).tolist()}) == 24
    order = jnp.array([5, 0, 3])
    assert jnp.array_equal(token_keys(KEY, 2, order), keys[:2, order])


def test_a_mask_belongs_to_its_token_and_has_the_right_mean():
    x = jnp.ones((4, 6, 512))
    keys = token_keys(KEY, 4, jnp.arange(6))
    whole = drop(x, 0.25, keys)
    assert jnp.array_equal(drop(x[1:3, 2:], 0.25, keys[1:3, 2:]), whole[1:3, 2:])
    np.testing.assert_allclose(np.unique(whole), [0, 1 / 0.75])
    assert abs(float(whole.mean()) - 1) < 0.03
    heads = drop(x.reshape(4, 6, 8, 64), 0.25, keys)
    assert abs(float(heads.mean()) - 1) < 0.03


@pytest.mark.longer
def test_parts_of_the_model_draw_other_masks():
    x = jnp.ones((2, 3, 64))
    keys = token_keys(KEY, 2, jnp.arange(3))
    first, second = split_key(keys)
    masks = [drop(x, 0.5, key) for key in (keys, first, second, fold_key(keys, 2), fold_key(keys, 3))]
    for i, mask in enumerate(masks):
        assert not any(jnp.array_equal(mask, other) for other in masks[:i])


def test_without_a_key_nothing_is_dropped():
    x = jnp.ones((2, 3, 4))
    assert drop(x, 0.5, None) is x and drop(x, 0.0, KEY) is x
    assert fold_key(None, 1) is None and split_key(None) == (None, None)
