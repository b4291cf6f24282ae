"""Constraints of an answer without a grammar: to given tokens, and to texts without given words."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from jaxtyping import Int

from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.requests import Constraint, ConstraintFailed
from jaxstack.errors import ConfigError


class AllowedTokens:
    """Constraint of an answer to some tokens, at each place.

    Args:
      tokens: their ids.
    """

    def __init__(self, tokens: Collection[int]):
        bits = np.zeros(32 * (max(tokens) // 32 + 1), np.uint8)
        bits[[*tokens]] = 1
        self._words = np.packbits(bits, bitorder="little").view("<i4")

    def fill_mask(self, mask: np.ndarray) -> None:
        mask[:] = 0
        mask[: len(self._words)] = self._words

    def accept(self, token: int) -> bool:
        return True


class BadWords:
    """Words that answers must not contain, as tokens: the last one of a word is forbidden after the others.

    That is what vLLM does. So a word is found only where it is written with the tokens that the tokenizer writes it
    with, at the beginning of a text or after a space.

    Args:
      words: the words.
      tokenizer: the model's tokenizer.

    Raises:
      ConfigError: the tokenizer writes a word with no token.
    """

    def __init__(self, words: Iterable[str], tokenizer: Tokenizer):
        found = dict[tuple[int, ...], list[int]]()
        for word in words:
            for tokens in _written(word, tokenizer):
                found.setdefault(tokens[:-1], []).append(tokens[-1])
        self._last = {before: np.array(last) for before, last in found.items()}
        """The tokens that are forbidden after these."""
        self._lengths = sorted({len(before) for before in found})

    @property
    def longest(self) -> int:
        """Number of tokens before the one that is forbidden, at most."""
        return self._lengths[-1]

    def forbid_after(self, tokens: Sequence[int], mask: Int[np.ndarray, " words"]) -> None:
        """Clear the bits of the tokens that are forbidden after these of an answer; `mask` as in `fill_mask`."""
        bits = mask.view(np.uint32)
        for length in self._lengths:
            last = self._last.get(tuple(tokens[-length:] if length else ()))
            if last is not None:
                np.bitwise_and.at(bits, last // 32, ~(np.uint32(1) << (last % 32).astype(np.uint32)))


def _written(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the tokens of a word: at the beginning of a text, and after a space if that makes it another token."""
    text = word.lstrip() or word
    plain, spaced = (tuple(tokenizer.encode(before + text).tolist()) for before in ("", " "))
    if not plain:
        raise ConfigError(f"the tokenizer writes the word {word[:100]!r} of bad_words with no token; leave it out.")
    return [plain, spaced] if spaced[0] != plain[0] and len(spaced) == len(plain) else [plain]


class WithoutWords:
    """Constraint of one answer to a text without bad words, which may obey another constraint too.

    Args:
      words: the words.
      form: the other constraint; None: there is none.
    """

    def __init__(self, words: BadWords, form: Constraint | None):
        self._words = words
        self._form = form
        self._tokens: list[int] = []
        self._stuck = False

    def fill_mask(self, mask: np.ndarray) -> None:
        mask[:] = -1
        if self._form is not None:
            self._form.fill_mask(mask)
        left = mask.copy()
        self._words.forbid_after(self._tokens, left)
        self._stuck = not left.any()
        if not self._stuck:  # a step has to sample something
            mask[:] = left

    def accept(self, token: int) -> bool:
        if self._stuck:
            raise ConstraintFailed("bad_words forbid all tokens with which an answer of this form could go on.")
        self._tokens = [*self._tokens, token][-self._words.longest :] if self._words.longest else []
        return self._form is None or self._form.accept(token)
