"""The page pool: no page leaks or has two owners, prefixes are shared, the least recently used is evicted."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from jaxstack.decoding.pages import ROOT, PagePool, page_digest, salted_root

SIZE = 4


def fill(pool: PagePool, tokens: list[int]) -> list[int]:
    """Take pages for a sequence and register the full ones, as an engine does; [] if there is no room."""
    pages, digests, *_ = pool.share_prefix(tokens)
    fresh = pool.allocate(-(-len(tokens) // pool.page_size) - len(pages))
    if fresh is None:
        pool.release(pages)
        return []
    digest = digests[-1] if digests else ROOT
    shared = len(pages)
    pages += fresh
    for index in range(shared, len(tokens) // pool.page_size):
        digest = page_digest(digest, tokens[index * pool.page_size : (index + 1) * pool.page_size])
        pool.register(pages[index], digest)
    return pages


class Pages(RuleBasedStateMachine):
    """Sequences come and go in any order, with prefixes in common."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.pool = PagePool(12, SIZE)
        self.held = []

    @rule(target=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30))
    def begin(self, tokens):
        pages = fill(self.pool, tokens)
        self.held.append(pages)
        return pages

    @rule(pages=consumes(sequences))
    def end(self, pages):
        self.held.remove(pages)
        self.pool.release(pages)

    @rule()
    def clear(self):
        self.pool.clear_cache()

    @invariant()
    def every_page_is_used_as_often_as_it_is_held(self):
        counts = [sum(page in pages for pages in self.held) for page in range(self.pool.count)]
        assert [self.pool.users(page) for page in range(self.pool.count)] == counts
        assert self.pool.used == sum(count > 0 for count in counts)

    def teardown(self):
        for pages in self.held:
            self.pool.release(pages)
        assert self.pool.available == self.pool.count
        pages = self.pool.allocate(self.pool.count)
        assert pages is not None and sorted(pages) == list(range(self.pool.count))
        assert self.pool.allocate(1) is None


Pages.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
test_pages_never_leak = Pages.TestCase


def test_a_prefix_is_shared_but_for_the_page_of_the_last_token():
    pool = PagePool(8, SIZE)
    tokens = list(range(8))
    first = fill(pool, tokens)
    shared, digests, *_ = pool.share_prefix(tokens)
    assert shared == first[:1] and digests == [page_digest(ROOT, tokens[:4])]
    assert pool.share_prefix([*tokens, 9])[0] == first
    assert pool.share_prefix([*tokens[:4], 0, 0, 0, 0, 9])[0] == first[:1]
    assert pool.share_prefix([5, *tokens])[0] == []
    assert pool.users(first[0]) == 4 and pool.users(first[1]) == 2


def test_equal_tokens_after_another_prefix_are_another_page():
    assert page_digest(page_digest(ROOT, [1, 2]), [3, 4]) != page_digest(page_digest(ROOT, [2, 1]), [3, 4])


def test_no_salt_is_the_digest_of_another_prefix():
    """Also where it has the bytes of an adapter's root, or those that the digest of a page is made of."""
    tokens = [1, 2, 3, 4]
    imitation = np.asarray(tokens, "<i4").tobytes().decode()
    roots = [salted_root(root, salt) for root in (ROOT, b"adapter 1") for salt in (None, "a", "adapter 1", imitation)]
    assert len({*roots, page_digest(ROOT, tokens)}) == 9 and salted_root(ROOT, "a") == salted_root(ROOT, "a")


def test_the_least_recently_used_page_is_evicted_first_and_a_prefix_from_its_end():
    pool = PagePool(4, SIZE)
    old = list(range(8))
    new = list(range(10, 18))
    for tokens in (old, new):
        pool.release(fill(pool, tokens))
    assert pool.available == 4 and pool.used == 0
    taken = pool.allocate(1)
    assert taken is not None
    assert len(pool.share_prefix([*old, 0])[0]) == 1 and len(pool.share_prefix([*new, 0])[0]) == 2


def test_without_a_prefix_cache_nothing_is_shared():
    pool = PagePool(8, SIZE, cache_prefixes=False)
    pool.release(fill(pool, list(range(8))))
    assert pool.share_prefix(list(range(9))) == ([], [], None, 0)


def test_a_page_cannot_be_released_twice():
    pool = PagePool(2, SIZE)
    pages = pool.allocate(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(pages)
