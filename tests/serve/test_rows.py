"""Half-batches: rows that run in two halves have the hidden states and the cache of rows that run at once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxstack.errors import ConfigError
from jaxstack.serve.config import EngineConfig
from jaxstack.serve.engine import Engine
from jaxstack.serve.rows import Column, run_rows
from jaxstack.serve.step import make_pages
from tests.compilation import run_jitted
from tests.decoding.test_decode import CONFIG, open_decoder
from tests.serve.test_engine import GREEDY, expected, prompts
from tests.serve.tiny import open_tiny

PAGE, TABLE = 4, 5
UNROLLED = CONFIG.model_copy(update={"scan_layers": False})


def describe(first_page: int, places) -> np.ndarray:
    """Rows of sequences of which `start` tokens are cached and `count` are new, each with pages of its own."""
    rows = np.zeros((len(places), Column.PAGES + TABLE), np.int32)
    for number, (row, (start, count)) in enumerate(zip(rows, places, strict=True)):
        row[Column.START], row[Column.COUNT] = start, count
        row[Column.PAGES :] = first_page + TABLE * number + np.arange(TABLE)
    return rows


CASES = [
    # The first half of the chunk has one token after five places of padding; the second attends to its key.
    [([(3, 2), (0, 0), (9, 1)], 2), ([(5, 7)], 11)],
    # A token that cannot be split, and several chunks.
    [([(4, 1)], 1), ([(0, 3), (4, 4), (0, 0)], 4)],
    [([(4, 1)], 1)],
]
"""Groups of rows: (start, count) of each row, and the rows' width."""


def make_case(groups) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Descriptions and tokens of each group."""
    random = np.random.default_rng(0)
    rows = [describe(20 * number, places) for number, (places, _) in enumerate(groups)]
    return rows, [random.integers(0, 257, (len(places), width)).astype(np.int32) for places, width in groups]


class Recorder:
    """In place of a model: hidden states are a token's id and position, which the pages get too."""

    def __init__(self):
        self.sizes = []

    def decode_packed(self, ids, positions, slots, pages, *, layers_together):
        self.sizes.append(ids.size)
        hidden = jnp.stack([ids, positions], 1)
        start = 0
        for table, lengths, width in slots.groups:  # each row's newest position is its length - 1
            newest = positions[start : start + len(table) * width].reshape(-1, width)[:, -1]
            assert np.array_equal(lengths, newest + 1)
            start += len(table) * width
        assert start == ids.size
        flat = pages.reshape(-1, 2).at[slots.write].set(hidden, mode="drop")
        return hidden, flat.reshape(pages.shape)


@pytest.mark.quick
def test_halves_are_the_same_tokens_at_the_same_places():
    for groups, sizes in zip(CASES, [(9, 8), (9, 4), (1,)], strict=True):
        rows, tokens = make_case(groups)
        model: Any = Recorder()
        pages = jnp.full((40, PAGE, 1, 2), -1)
        given = list(zip(map(jnp.asarray, rows), map(jnp.asarray, tokens), strict=True))
        whole, cache = run_rows(model, given, pages)
        halved, halved_cache = run_rows(model, given, pages, halves=True)
        assert model.sizes == [sum(sizes), *sizes]
        assert np.array_equal(cache, halved_cache) and np.any(cache >= 0)
        for one, other, row in zip(whole, halved, rows, strict=True):
            real = np.arange(one.shape[1]) >= one.shape[1] - row[:, Column.COUNT, None]
            assert np.array_equal(np.asarray(one)[..., 0], np.asarray(other)[..., 0])
            assert np.array_equal(np.asarray(one)[real], np.asarray(other)[real])


@pytest.mark.parametrize("groups", [pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES])
def test_halves_have_the_hidden_states_and_the_cache_of_the_whole(groups):
    decoder, random = open_tiny(), np.random.default_rng(0)
    made = jax.eval_shape(lambda: make_pages(decoder, decoder.params, decoder.non_params, 40, PAGE))
    pages = jax.tree.map(lambda x: random.normal(size=x.shape).astype(x.dtype), made)

    def run(params, rows, pages):
        model = decoder.module.merge(params, decoder.non_params)
        return [run_rows(model, rows, pages, halves=halves) for halves in (False, True)]

    rows, tokens = make_case(groups)
    (whole, cache), (halved, halved_cache) = run_jitted(
        run, decoder.params, list(zip(rows, tokens, strict=True)), pages
    )
    for one, other, row in zip(whole, halved, rows, strict=True):
        real = np.arange(one.shape[1]) >= one.shape[1] - row[:, Column.COUNT, None]
        np.testing.assert_allclose(np.asarray(other)[real], np.asarray(one)[real], atol=2e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), halved_cache, cache)


def test_tensor_parallel_engine_gives_the_same_text_by_half_batches():
    """Steps with chunks and several decode steps at once; stacked layers, which would not overlap, are refused."""
    decoder, asked = open_decoder(UNROLLED, tensor=2), prompts([20, 3])
    config = EngineConfig(slots=4, page_size=4, chunk=16, half_batches_from=4)
    with Engine(decoder, config, warm_up=False) as engine:
        handles = [engine.submit(prompt, 8, GREEDY) for prompt in asked]
        answers = [handle.result() for handle in handles]
    assert answers == [expected(decoder, prompt, 8) for prompt in asked]
    with pytest.raises(ConfigError, match="scan_layers=false"):
        Engine(open_decoder(tensor=2), config, warm_up=False, start=False)
