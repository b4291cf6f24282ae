"""Allocation of KV-cache pages by the host, with reference counts and a cache of shared prefixes.

A page holds the keys and values of `page_size` consecutive tokens of one sequence, in every layer. A full page is
identified by a digest of its tokens and of all tokens before them, so that requests with a common prefix share pages
(Kwon et al. 2023, arXiv:2309.06180).
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np

ROOT = b""
"""Digest of the empty prefix."""


def page_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the prefix-cache key of a full KV-cache page: a hash of its tokens and of all tokens before them.

    Args:
      parent: digest of the page before it, `ROOT` for the first page.
      tokens: the ids in the page.
    """
    return hashlib.blake2b(parent + np.asarray(tokens, "<i4").tobytes(), digest_size=16).digest()


class PagePool:
    """Allocates the pages of a KV cache: each is free, used by one or more sequences, or cached for later ones.

    Args:
      count: number of pages.
      page_size: tokens per page.
      cache_prefixes: keep full pages after their last use, until the space is needed.
    """

    def __init__(self, count: int, page_size: int, *, cache_prefixes: bool = True):
        self.count = count
        self.page_size = page_size
        self.cache_prefixes = cache_prefixes
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

    def share_prefix(self, tokens: Sequence[int]) -> tuple[list[int], list[bytes]]:
        """Return the pages of a prompt's longest cached prefix, and increment their reference counts.

        The page of the last token is never included, because its logits have to be computed.

        Returns:
          The pages in order, and their digests.
        """
        pages = []
        digests = []
        digest = ROOT
        for start in range(0, (len(tokens) - 1) // self.page_size * self.page_size, self.page_size):
            digest = page_digest(digest, tokens[start : start + self.page_size])
            page = self._by_digest.get(digest)
            if page is None:
                break
            pages.append(page)
            digests.append(digest)
        for page in pages:
            self._users[page] += 1
            self._unused.pop(page, None)
        return pages, digests

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
