"""Which tokens the cache of a draft model lacks, because steps without drafts do not run that model on their tokens.

A row that is to have drafts again first catches up: its missing tokens are computed as chunks, like those of a prompt.
That is one run of a small model for many tokens, where running it beside every step without drafts would slow them all.
Prompts are caught up with in the same way, unless they have to enter its cache as they are computed, see
`DraftPrograms.fills_prompts`. What the cache has changes only which tokens are guessed, not the distribution of the
text, so that nothing depends on it where a row cannot catch up.
"""

from jaxstack.decoding.requests import Request


class DraftLag:
    """Records for each request and each shared page whether a draft model has run its tokens.

    Args:
      page_size: tokens of a page.
    """

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._lacking = set[int]()
        """Pages with tokens that the draft model has not run, some of which may be free."""

    def admit(self, request: Request) -> None:
        """Set how many tokens the draft model has of a request that starts with shared pages."""
        pages = request.pages[: request.filled // self._page_size]
        complete = next((number for number, page in enumerate(pages) if page in self._lacking), len(pages))
        request.drafted = complete * self._page_size

    def advance(self, request: Request, start: int, end: int, *, drafted: bool) -> None:
        """Record that a step computes a request's tokens from `start` to `end`.

        Args:
          drafted: the draft model runs them too. If it lacks tokens before them, they count as missing nevertheless.
        """
        pages = request.pages[start // self._page_size : -(-end // self._page_size)]
        if drafted and request.drafted >= start:
            request.drafted = end
            self._lacking.difference_update(pages)
        else:
            request.drafted = min(request.drafted, start)
            self._lacking.update(pages)
