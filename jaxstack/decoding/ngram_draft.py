"""N-gram drafts for speculative decoding: next tokens guessed from earlier text, which one model step verifies.

A step computes the newest token and its drafts as one short chunk, and samples after each of them with the random
numbers of that position. Drafts are accepted up to the first that differs from its sample, so the answer is the same
as without drafts, greedy or sampled.
"""

from collections.abc import Sequence

LENGTHS = (3, 2)
"""Lengths of the newest n-gram to look up, in this order; the first that is found is used."""
LONGEST_TEXT = 4096
"""Newest tokens of a text in which its last n-gram is looked up."""
_KEPT = 0.9
"""Weight of a step in `Foreseen` beside that of the next one."""
_FIRST = 4.0
"""Steps without an accepted draft from which `Foreseen` starts, as nothing is known of an answer then."""


class NGramDrafter:
    """Guesses next tokens by finding the text's last n-gram earlier in the text (prompt lookup, Saxena 2023).

    Args:
      tokens: the tokens so far.
    """

    def __init__(self, tokens: Sequence[int]):
        self._tokens: list[int] = []
        self._followers: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    @property
    def count(self) -> int:
        """Number of tokens of the text so far."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append new tokens of the prompt or answer to the text that drafts are looked up in."""
        for token in tokens:
            end = len(self._tokens)
            for length in LENGTHS:
                if end >= length:
                    self._followers[tuple(self._tokens[end - length :])] = end
            self._tokens.append(token)

    def guess(self, count: int) -> tuple[int, ...]:
        """Return up to `count` draft tokens to follow the text.

        There are none if its last n-gram has not occurred before in its newest `LONGEST_TEXT` tokens.
        """
        first = max(0, len(self._tokens) - LONGEST_TEXT)
        for length in LENGTHS:
            place = self._followers.get(tuple(self._tokens[-length:]), 0)
            if place - length >= first:
                return tuple(self._tokens[place : place + count])
        return ()


class Foreseen:
    """Counts how many tokens steps with n-gram drafts would give an answer, whether its steps have drafts or not.

    A guess costs the host a look-up, and the tokens that follow tell how much of it was right.

    Args:
      drafter: what guesses, with the text so far.
      count: number of drafts of a step.
    """

    def __init__(self, drafter: NGramDrafter, count: int):
        self._drafter = drafter
        self._count = count
        self._steps = _FIRST
        self._tokens = _FIRST
        self._guessed = drafter.guess(count)
        self._right = 0

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens that a step would have given, in which the newest steps count most."""
        return self._tokens / self._steps

    def extend(self, tokens: Sequence[int]) -> None:
        """Append new tokens of the answer to the drafter's text, and compare them with its guesses."""
        for token in tokens:
            self._drafter.extend([token])
            if self._right < len(self._guessed) and self._guessed[self._right] == token:
                self._right += 1
                continue
            self._steps = _KEPT * self._steps + 1
            self._tokens = _KEPT * self._tokens + self._right + 1
            self._guessed = self._drafter.guess(self._count)
            self._right = 0


def accept(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """Return the tokens that a speculative step adds to an answer: the accepted drafts and the sample after them.

    Args:
      drafts: the guesses.
      sampled: the tokens sampled after the newest token and after each of the guesses.
    """
    kept = 0
    while kept < len(drafts) and drafts[kept] == sampled[kept]:
        kept += 1
    return list(sampled[: kept + 1])
