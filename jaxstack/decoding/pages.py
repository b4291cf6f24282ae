"""Allocation of KV-cache pages by the host, with reference counts and a cache of shared prefixes.

A page holds the keys and values of `page_size` consecutive tokens of one sequence, in every layer. A full page is
identified by a digest of its tokens and of all tokens before them, so that requests with a common prefix share pages
(Kwon et al. 2023, arXiv:2309.06180).

A layer with a state of fixed size has nothing in pages: a prefix can be reused only where a snapshot of the state after
it was kept. It belongs to the last page of its prefix, and is dropped when that page is evicted.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ROOT = b""
"""Digest of the empty prefix; adapters have others."""
_SALTED = b"cache salt"
"""Sets salted roots apart from the digests of pages."""


def salted_root(root: bytes, salt: str | None) -> bytes:
    """Return the digest of the empty prefix for the prompts of one salt, which share no pages with others.

    Args:
      root: that without a salt.
      salt: any text; None: no salt.
    """
    if salt is None:
        return root
    return hashlib.blake2b(root + b"\0" + salt.encode(), digest_size=16, person=_SALTED).digest()


def page_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the prefix-cache key of a full KV-cache page: a hash of its tokens and of all tokens before them.

    Args:
      parent: digest of the page before it, `ROOT` for the first page.
      tokens: the ids in the page.
    """
    return hashlib.blake2b(parent + np.asarray(tokens, "<i4").tobytes(), digest_size=16).digest()


class Prefix(NamedTuple):
    """Cached prefix of a prompt, whose pages a sequence shares."""

    pages: list[int]
    """Its pages in order."""
    digests: list[bytes]
    """Their digests."""
    snapshot: int | None
    """Number of the snapshot of the states after it; None: there is no prefix, or there are no states."""
    known: int
    """Tokens of the longest prefix whose pages are cached, whether it has a snapshot or not."""


class PagePool:
    """Allocates the pages of a KV cache: each is free, used by one or more sequences, or cached for later ones.

    Args:
      count: number of pages.
      page_size: tokens per page.
      cache_prefixes: keep full pages after their last use, until the space is needed.
      snapshots: number of snapshots of states that are kept, without any of which no prefix is cached; None: the model
        has no states, and pages are all that a prefix needs.
    """

    def __init__(self, count: int, page_size: int, *, cache_prefixes: bool = True, snapshots: int | None = None):
        self.count = count
        self.page_size = page_size
        self.cache_prefixes = cache_prefixes and snapshots != 0
        self.keeps_snapshots = self.cache_prefixes and snapshots is not None
        self._free_snapshots = list(reversed(range(snapshots or 0)))
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # by the prefix's digest, least recently used first
        self._free = deque(range(count))
        self._users = [0] * count
        self._digests: list[bytes | None] = [None] * count
        self._by_digest: dict[bytes, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # cached pages without users, least recently used first

    @property
    def available(self) -> int:
        """Number of pages that `allocate` can return: free pages and unused cached pages."""
        return len(self._free) + len(self._unused)

    @property
    def used(self) -> int:
        """Number of pages that sequences use."""
        return self.count - self.available

    def users(self, page: int) -> int:
        """Return the number of sequences that share a KV-cache page."""
        return self._users[page]

    def share_prefix(self, tokens: Sequence[int], root: bytes = ROOT) -> Prefix:
        """Return a prompt's longest cached prefix that can be reused, and increment the reference counts of its pages.

        The page of the last token is never included, because its logits have to be computed.

        Args:
          tokens: the prompt.
          root: digest of the empty prefix.
        """
        pages = []
        digests = []
        digest = root
        for start in range(0, (len(tokens) - 1) // self.page_size * self.page_size, self.page_size):
            digest = page_digest(digest, tokens[start : start + self.page_size])
            page = self._by_digest.get(digest)
            if page is None:
                break
            pages.append(page)
            digests.append(digest)
        known = len(pages) * self.page_size
        snapshot = None
        if self.keeps_snapshots:
            while digests and digests[-1] not in self._snapshots:
                pages.pop()
                digests.pop()
            if digests:
                snapshot = self._snapshots[digests[-1]]
                self._snapshots.move_to_end(digests[-1])
        for page in pages:
            self._users[page] += 1
            self._unused.pop(page, None)
        return Prefix(pages, digests, snapshot, known)

    def allocate(self, count: int) -> list[int] | None:
        """Allocate KV-cache pages, evicting the least recently used cached ones; None if too few are left."""
        if count > self.available:
            return None
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.popleft()
            else:
                page, _ = self._unused.popitem(last=False)
                self._forget(page)
            self._users[page] = 1
            pages.append(page)
        return pages

    def register(self, page: int, digest: bytes) -> None:
        """Add a full page to the prefix cache under its digest, so that other sequences can share it.

        A second page with the same content stays private to its sequence.
        """
        if self.cache_prefixes and self._digests[page] is None and digest not in self._by_digest:
            self._digests[page] = digest
            self._by_digest[digest] = page

    def add_snapshot(self, digest: bytes) -> int | None:
        """Return the number of a snapshot for the states after a cached page, which the caller then copies there.

        If all are in use, that is the least recently used one.

        Args:
          digest: of the page.

        Returns:
          None if the prefix has a snapshot already, or the page is not in the prefix cache.
        """
        if digest in self._snapshots or digest not in self._by_digest:
            return None
        number = self._free_snapshots.pop() if self._free_snapshots else self._snapshots.popitem(last=False)[1]
        self._snapshots[digest] = number
        return number

    def release(self, pages: Sequence[int]) -> None:
        """Decrement the reference counts of a sequence's pages; unused pages become free, or stay cached until evicted.

        Of the cached pages, the last ones of the sequence are evicted first.
        """
        for page in reversed(pages):
            if self._users[page] < 1:
                raise ValueError(f"page {page} is released more often than it was taken.")
            self._users[page] -= 1
            if self._users[page]:
                continue
            if self._digests[page] is None:
                self._free.append(page)
            else:
                self._unused[page] = None

    def clear_cache(self) -> None:
        """Drop all cached prefixes, for example after new weights; pages in use stay allocated."""
        for page in list(self._by_digest.values()):
            self._forget(page)
        self._free.extend(self._unused)
        self._unused.clear()

    def _forget(self, page: int) -> None:
        digest = self._digests[page]
        self._digests[page] = None
        if digest is not None:
            del self._by_digest[digest]
            if digest in self._snapshots:
                self._free_snapshots.append(self._snapshots.pop(digest))
