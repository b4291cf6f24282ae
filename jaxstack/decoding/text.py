"""From generated tokens to text, piece by piece: whole characters only, up to a stop string or the end of the text."""

import codecs
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.decode import Decoder
from jaxstack.decoding.sampling import Sampling
from jaxstack.errors import ConfigError

_CONTEXT = 8
"""Tokens before new ones that decide how these are written: a space before a word, a character in several tokens."""
_LONGEST_CHARACTER = 4
"""Tokens that may go by before what is not yet a character is given up."""
Reason = Literal["stop", "length"]


class _ByteText:
    """Text of tokens that stand for bytes one after the other; bytes of a character wait for the rest."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.decode_bytes([token]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WordText:
    """Text of tokens that are written differently after others: what a token adds is what the longer text has more."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._start, self._shown = 0, len(self._ids)

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._added()
        if text.endswith("\ufffd") and len(self._ids) - self._shown < _LONGEST_CHARACTER:
            return ""
        return self._take(text)

    def flush(self) -> str:
        return self._take(self._added())

    def _added(self) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._shown])
        return self._tokenizer.decode(self._ids[self._start :])[len(before) :]

    def _take(self, text: str) -> str:
        self._start = max(0, self._shown - _CONTEXT)
        self._shown = len(self._ids)
        return text


class TextStream:
    """The text of one row, a token at a time.

    Args:
      prompt: the ids before it.
      stop: strings that end the text; they, and what comes after them, are not part of it.
      stop_tokens: ids that do.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        stop_tokens: Collection[int] = (),
    ):
        self._text: Any = _ByteText(tokenizer) if tokenizer.writes_bytes else _WordText(tokenizer, prompt)
        self._stop, self._stop_tokens, self._ids = tuple(stop), frozenset(stop_tokens), tokenizer.vocab_size
        self._held = ""
        self.reason: Reason | None = None
        """Why the text has ended; None while it has not."""

    def push(self, token: int) -> str:
        """What is certain to come next in the text: nothing while it may be part of a character or a stop string."""
        if token in self._stop_tokens:
            return self.finish("stop")
        return self._release(self._text.push(token)) if token < self._ids else ""

    def finish(self, reason: Reason = "length") -> str:
        """Ends the text; returns what was held back."""
        piece = self._release(self._text.flush())
        if self.reason is None:
            self.reason, piece = reason, piece + self._held
        return piece

    def _release(self, new: str) -> str:
        text = self._held + new
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.reason, self._held = "stop", ""
            return text[: min(found)]
        begun = max((_begun(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]


def _begun(text: str, stop: str) -> int:
    """How many of the last characters of `text` are the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Text that row `row` goes on with; with its last piece, which may be empty, comes the reason of its end."""

    row: int
    text: str
    reason: Reason | None = None


class TextGenerator:
    """Text in, text out.

    Args:
      opening: ids that a text begins with.
      stop_tokens: ids that end one.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, opening: Sequence[int] = (), stop_tokens: Collection[int] = ()
    ):
        self.decoder, self.tokenizer = decoder, tokenizer
        self.opening, self.stop_tokens = tuple(opening), frozenset(stop_tokens)

    def encode(self, text: str) -> list[int]:
        """The ids of a text from its beginning on."""
        return [*self.opening, *map(int, self.tokenizer.encode(text))]

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        *,
        seed: int | Sequence[int] = 0,
        stop: Sequence[str] = (),
    ) -> Iterator[Piece]:
        """Pieces of all rows as they come, until each has ended. Arguments as of `Decoder.generate`.

        Args:
          stop: strings that end a text, wherever tokens cut them.

        Raises:
          ConfigError: as `Decoder.generate`, or a stop string is empty.
        """
        if "" in stop:
            raise ConfigError("a stop string must have at least one character.")
        rows = [TextStream(self.tokenizer, prompt, stop, self.stop_tokens) for prompt in prompts]
        options: dict[str, Any] = {"seed": seed, "stop_tokens": self.stop_tokens}
        for tokens in self.decoder.generate(prompts, max_tokens, sampling, **options):
            for number, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
                if row.reason is None:
                    text = row.push(token)
                    if text or row.reason is not None:
                        yield Piece(number, text, row.reason)
            if all(row.reason is not None for row in rows):
                return
        for number, row in enumerate(rows):
            if row.reason is None:
                yield Piece(number, row.finish(), row.reason)

    def generate(
        self,
        prompts: Sequence[str],
        max_tokens: int,
        sampling: Sampling,
        *,
        seed: int | Sequence[int] = 0,
        stop: Sequence[str] = (),
    ) -> list[str]:
        """What each prompt goes on with; see `stream`."""
        texts = [""] * len(prompts)
        ids = [self.encode(prompt) for prompt in prompts]
        for piece in self.stream(ids, max_tokens, sampling, seed=seed, stop=stop):
            texts[piece.row] += piece.text
        return texts
