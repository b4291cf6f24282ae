"""Drafts from earlier occurrences of the newest tokens."""

import pytest

from jaxstack.decoding.ngram_draft import NGramDrafter, accept


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


def test_drafts_are_accepted_up_to_the_first_that_differs():
    assert accept((4, 5, 6), (4, 5, 7, 8)) == [4, 5, 7]
    assert accept((4, 5), (4, 5, 6)) == [4, 5, 6]
    assert accept((), (3,)) == [3]
