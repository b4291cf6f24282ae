"""Drafts from earlier occurrences of the newest tokens, made by the host and by the device."""

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxstack.decoding.engine import Engine
from jaxstack.decoding.ngram_draft import LONGEST_TEXT, Foreseen, NGramDrafter, accept
from jaxstack.decoding.ngram_steps import NGramText, guess_by_ngram
from jaxstack.serve.config import EngineConfig
from tests.serve.test_engine import GREEDY, SAMPLINGS, expected, prompts
from tests.serve.tiny import open_tiny


@pytest.mark.parametrize(
    ("tokens", "guess"),
    [
        ([1, 2, 3, 4, 1, 2, 3], (4, 1, 2)),
        ([9, 1, 2, 7, 1, 2, 8, 1, 2], (8, 1, 2)),  # the newest occurrence
        ([9, 1, 2, 7, 5, 1, 2, 8, 9, 1, 2], (7, 5, 1)),  # the longest
        ([5, 5, 5, 5], (5,)),
        ([1, 2, 3], ()),
        ([1], ()),
    ],
)
def test_what_followed_before_is_guessed(tokens, guess):
    ngrams = NGramDrafter(tokens[:2])
    for token in tokens[2:]:
        ngrams.extend([token])
    assert ngrams.guess(3) == guess and ngrams.count == len(tokens)


@pytest.mark.longer
@pytest.mark.parametrize("between", [LONGEST_TEXT - 4, LONGEST_TEXT - 3, LONGEST_TEXT - 2])
def test_the_host_looks_as_far_back_as_the_device(between):
    """Where the newest two tokens occurred at the very beginning of what the device has of a text."""
    text = [1, 2, 3, *range(10, 10 + between - 1), 2, 3]
    newest = jnp.asarray([text[-LONGEST_TEXT:]])
    guessed, counts = guess_by_ngram(NGramText(newest, jnp.asarray([newest.shape[1]])), 4)
    assert NGramDrafter(text).guess(4) == tuple(guessed[0, : counts[0]].tolist())
    assert bool(counts[0]) == (between < LONGEST_TEXT - 2)


def test_drafts_are_accepted_up_to_the_first_that_differs():
    assert accept((4, 5, 6), (4, 5, 7, 8)) == [4, 5, 7]
    assert accept((4, 5), (4, 5, 6)) == [4, 5, 6]
    assert accept((), (3,)) == [3]


@settings(max_examples=60, deadline=None)
@given(text=st.lists(st.integers(0, 2), min_size=40, max_size=200), sizes=st.lists(st.integers(1, 9), min_size=1))
def test_the_tokens_of_steps_with_drafts_are_foreseen(text, sizes):
    """As steps would give them, in whatever portions the tokens of the answer come; the newest steps count most."""
    foreseen = Foreseen(NGramDrafter(text[:10]), 3)
    place = 10
    while place < len(text):
        size = sizes[place % len(sizes)]
        foreseen.extend(text[place : place + size])
        place += size
    steps = tokens = 4.0
    place = 10
    while True:
        given = len(accept(NGramDrafter(text[:place]).guess(3), [*text[place:], *3 * [-1]]))
        place += given
        if place > len(text):
            break  # the step has not ended
        steps, tokens = 0.9 * steps + 1, 0.9 * tokens + given
    assert foreseen.tokens_per_step == pytest.approx(tokens / steps)


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=4, max_size=4))
def test_the_device_guesses_what_the_host_does(texts):
    """From texts of any length, before tokens that have no meaning."""
    tokens = np.random.default_rng(0).integers(0, 3, (4, 18)).astype(np.int32)
    for line, text in zip(tokens, texts, strict=True):
        line[: len(text)] = text
    known = np.array([len(text) for text in texts], np.int32)
    guessed, counts = map(np.asarray, guess_by_ngram(NGramText(jnp.asarray(tokens), jnp.asarray(known)), 4))
    for text, own, count in zip(texts, guessed, counts, strict=True):
        assert tuple(own[:count]) == NGramDrafter(text).guess(4)


def test_steps_of_one_program_guess_and_verify_on_the_device():
    """Each answer is that without drafts: greedy and sampled, with its own limit, beside others, at a stop token."""
    model = open_tiny()
    config = EngineConfig(slots=4, page_size=4, chunk=16, context=90, draft_tokens=3, drafts="always", decode_steps=6)
    counts = (33, 17, 24, 2)
    asked = [*zip(prompts([9, 4, 20, 13]), counts, SAMPLINGS[:4], range(4), strict=True)]
    with Engine(model, config, warm_up=False) as engine:
        with engine.together():
            handles = [engine.submit(p, count, sampling, seed=seed) for p, count, sampling, seed in asked]
        for handle, request in zip(handles, asked, strict=True):
            assert handle.result() == expected(model, *request)
        whole = expected(model, [7] * 6, 40)
        handle = engine.submit([7] * 6, 40, GREEDY, stop_tokens=[whole[20]])
        assert handle.result() == whole[: whole.index(whole[20])]
        stats = engine.stats
        assert 0 < stats.accepted_tokens < stats.draft_tokens and engine.pool.used == 0
        assert stats.steps > 3 * stats.programs["decode"], "most programs had several steps"
