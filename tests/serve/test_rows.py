"""Half-batches: rows that run in two halves have the hidden states and the cache of rows that run at once."""

import types
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.decoding.cache_room import make_cache
from jaxstack.decoding.decode import ModelOnMesh
from jaxstack.decoding.engine import Engine, _halves_from
from jaxstack.decoding.rows import Column, run_rows
from jaxstack.errors import ConfigError
from jaxstack.models.attention.paged_cache import PagedKeys
from jaxstack.models.layer import CacheRoom
from jaxstack.serve.config import EngineConfig
from tests.compilation import run_jitted
from tests.decoding.test_decode import CONFIG, open_decoder
from tests.serve.test_engine import GREEDY, expected, prompts
from tests.serve.tiny import open_tiny

PAGE = 4
ROOM = CacheRoom(16, 60 * PAGE, 60, PAGE)
TABLE = 5


def describe(first_page: int, places) -> np.ndarray:
    """Rows of sequences of which `start` tokens are cached and `count` are new, each with pages of its own."""
    rows = np.zeros((len(places), Column.PAGES + TABLE), np.int32)
    for number, (row, (start, count)) in enumerate(zip(rows, places, strict=True)):
        row[Column.START], row[Column.COUNT] = start, count
        row[Column.PAGES :] = first_page + TABLE * number + np.arange(TABLE)
    return rows


GROUPS = [([(3, 2), (0, 0), (9, 1)], 2), ([(5, 7)], 11), ([(4, 1)], 1)]
"""(start, count) of each row, and the rows' width. Drafts; a chunk of which the first half has one token after four
places of padding; and a token, which cannot be split."""
SIZES = [18, 10, 8]
"""Tokens of all groups, and of their halves."""


def make_rows() -> tuple[list[np.ndarray], list[tuple[np.ndarray, np.ndarray]]]:
    """Which tokens of each group are no padding; descriptions and tokens of each."""
    random = np.random.default_rng(0)
    rows = [describe(20 * number, places) for number, (places, _) in enumerate(GROUPS)]
    tokens = [random.integers(0, 257, (len(places), width)).astype(np.int32) for places, width in GROUPS]
    real = [np.arange(x.shape[1]) >= x.shape[1] - y[:, Column.COUNT, None] for x, y in zip(tokens, rows, strict=True)]
    return real, list(zip(rows, tokens, strict=True))


class Recorder:
    """In place of a model: hidden states are a token's id, position and cached length; the pages get the same."""

    def __init__(self):
        self.sizes = []

    def decode_packed(self, ids, positions, slots, pages, *, layers_together):
        self.sizes.append(ids.size)
        lengths = [jnp.repeat(group.lengths, group.width) for group in slots.groups]
        hidden = jnp.stack([ids, positions, jnp.concatenate(lengths)], 1)
        (layer,) = pages
        key = layer.key.reshape(-1, 3).at[slots.write].set(hidden, mode="drop").reshape(layer.key.shape)
        return hidden[:, :2], [PagedKeys(key, layer.value)]


@pytest.mark.quick
def test_halves_are_the_same_tokens_at_the_same_places():
    """A token's half ends at the token or later, at most where the whole ends."""
    (real, rows), model = make_rows(), Recorder()

    def run(rows, pages):
        return [run_rows(cast(Any, model), rows, pages, halves=halves) for halves in (False, True)]

    (whole, cache), (halved, halved_cache) = run_jitted(
        run, rows, [PagedKeys(np.full((60, PAGE, 1, 3), -1), np.zeros(0))]
    )
    assert model.sizes == SIZES
    for one, other, mask in zip(whole, halved, real, strict=True):
        assert np.array_equal(np.asarray(one)[mask], np.asarray(other)[mask])
    cache, halved_cache = (np.asarray(layer.key) for (layer,) in (cache, halved_cache))
    assert np.array_equal(cache[..., :2], halved_cache[..., :2])
    assert np.sum(cache[..., 1] >= 0) == sum(mask.sum() for mask in real)
    written = cache[..., 1] >= 0
    position = halved_cache[written, 1]
    length = halved_cache[written, 2]
    assert np.all(position < length) and np.all(length <= cache[written, 2])


@pytest.mark.exhaustive
def test_halves_have_the_hidden_states_and_the_cache_of_the_whole():
    decoder = open_tiny()
    random = np.random.default_rng(0)
    made = jax.eval_shape(lambda: make_cache(decoder, decoder.params, decoder.non_params, ROOM))
    pages = jax.tree.map(lambda x: random.normal(size=x.shape).astype(x.dtype), made)

    def run(params, rows, pages):
        model = decoder.module.merge(params, decoder.non_params)
        return [run_rows(model, rows, pages, halves=halves) for halves in (False, True)]

    real, rows = make_rows()
    (whole, cache), (halved, halved_cache) = run_jitted(run, decoder.params, rows, pages)
    for one, other, mask in zip(whole, halved, real, strict=True):
        np.testing.assert_allclose(np.asarray(other)[mask], np.asarray(one)[mask], atol=2e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), halved_cache, cache)


def test_tensor_parallel_engine_gives_the_same_text_by_half_batches():
    """Steps with chunks and several decode steps at once; stacked layers, which would not overlap, are refused."""
    decoder = open_decoder(CONFIG.model_copy(update={"num_layers": 1}), tensor=2)
    asked = prompts([12, 3])
    config = EngineConfig(slots=2, page_size=4, chunk=16, half_batches_from=2)
    with Engine(decoder, config, warm_up=False) as engine:
        handles = [engine.submit(prompt, 8, GREEDY) for prompt in asked]
        answers = [handle.result() for handle in handles]
    assert answers == [expected(decoder, prompt, 8) for prompt in asked]
    with pytest.raises(ConfigError, match="scan_layers=false"):
        _halves_from(cast(ModelOnMesh, types.SimpleNamespace(rules=decoder.rules, config=CONFIG)), config)
