"""Generated text: tokens decoded as they come, in whole characters up to a stop text; answers to questions in chats."""

import codecs
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, Protocol

from jaxstack.data.config import ChatConfig
from jaxstack.data.streams import import_chat
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.decoder import Decoder
from jaxstack.decoding.sampling import Sampling
from jaxstack.errors import ConfigError

_CONTEXT = 8
"""Number of tokens before new ones that are decoded with them: a leading space, or a character, may depend on them."""
_LONGEST_CHARACTER = 4
"""Number of tokens after which an incomplete character is given up and shown as U+FFFD."""
FinishReason = Literal["stop", "length"]
"""Reason for the end of a text: "stop" for a stop string or stop token, "length" for the token limit."""


class _TokenText(Protocol):
    """Interface of incremental decoding from tokens to text."""

    def push(self, token: int) -> str:
        """Add a token, and return the text that it completes."""
        ...

    def flush(self) -> str:
        """End the decoding, and return the text that was held back because it was incomplete."""
        ...


class _ByteText:
    """Decodes tokens to the bytes that they represent; the bytes of a character are held back until it is complete."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(self._tokenizer.decode_bytes([token]))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WordText:
    """Decodes tokens whose text depends on earlier tokens, by decoding the text with and without the newest tokens.

    Tokens that represent single bytes (byte fallback) are decoded as bytes: the tokenizer decodes a run of them as a
    whole, and would turn all of a run whose beginning is not in the context to U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._ids = list(prompt[-_CONTEXT:])
        self._start = 0
        self._shown = len(self._ids)
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        for token in prompt[-_LONGEST_CHARACTER:]:
            self._push_byte(tokenizer.fallback_byte(token))

    def push(self, token: int) -> str:
        byte = self._tokenizer.fallback_byte(token)
        self._ids.append(token)
        if byte is not None:
            before = self._take(self._pending_before(1))
            return before + self._push_byte(byte)
        ended = self._push_byte(None)
        text = self._pending()
        if text.endswith("\ufffd") and len(self._ids) - self._shown < _LONGEST_CHARACTER:
            return ended
        return ended + self._take(text)

    def flush(self) -> str:
        return self._push_byte(None) + self._take(self._pending())

    def _push_byte(self, byte: bytes | None) -> str:
        """Return the characters that a byte completes; None ends the run of bytes."""
        if byte is None:
            text = self._bytes.decode(b"", final=True)
            self._bytes.reset()
            return text
        return self._bytes.decode(byte)

    def _pending_before(self, count: int) -> str:
        """Return the text of the newest tokens but the last `count`, as `_pending` does for all of them."""
        before = self._tokenizer.decode(self._ids[self._start : self._shown])
        return self._tokenizer.decode(self._ids[self._start : len(self._ids) - count])[len(before) :]

    def _pending(self) -> str:
        """Return the text that the newest tokens, those not yet returned as text, add to the text before them."""
        return self._pending_before(0)

    def _take(self, text: str) -> str:
        self._start = max(0, self._shown - _CONTEXT)
        self._shown = len(self._ids)
        return text


class TextStream:
    """Decodes the generated tokens of one sequence to text, one by one, up to a stop string or stop token.

    Args:
      tokenizer: the model's tokenizer.
      prompt: the ids before the text.
      stop: strings that end the text; what follows them is not part of it, nor are they, except for those in `kept`.
      stop_tokens: ids that end the text.
      min_tokens: number of the first tokens whose text may have the strings in it.
      marks: special tokens that the text has too, by their ids.
      kept: those of `stop` that are part of the text which they end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        stop_tokens: Collection[int] = (),
        min_tokens: int = 0,
        *,
        marks: Mapping[int, str] | None = None,
        kept: Collection[str] = (),
    ):
        self._text: _TokenText = _ByteText(tokenizer) if tokenizer.writes_bytes else _WordText(tokenizer, prompt)
        self._stop = tuple(stop)
        self._kept = kept
        self._stop_tokens = frozenset(stop_tokens)
        self._vocab_size = tokenizer.vocab_size
        self._withheld = ""
        self._unchecked = min_tokens
        self._marks = marks or {}
        self.finish_reason: FinishReason | None = None
        """None until the text has ended."""
        self.stop_text: str | None = None
        """The stop string that ended the text, if one did."""

    def push(self, token: int) -> str:
        """Add a generated token, and return the new text that no later token can change.

        Text is withheld while it may be part of an incomplete character or of a stop string.
        """
        if token in self._stop_tokens:
            return self.finish("stop")
        if token in self._marks:
            new = self._text.flush() + self._marks[token]
        else:
            new = self._text.push(token) if token < self._vocab_size else ""
        if self._unchecked > 0:
            self._unchecked -= 1
            return new
        return self._release(new)

    def finish(self, reason: FinishReason = "length") -> str:
        """End the text, and return the part of it that was withheld until now."""
        piece = self._release(self._text.flush())
        if self.finish_reason is None:
            self.finish_reason = reason
            piece = piece + self._withheld
        return piece

    def _release(self, new: str) -> str:
        text = self._withheld + new
        found = [(at, stop) for at, stop in ((text.find(stop), stop) for stop in self._stop) if at >= 0]
        if found:
            self.finish_reason = "stop"
            self._withheld = ""
            end, self.stop_text = min(found)
            return text[:end] + self.stop_text * (self.stop_text in self._kept)
        held = max((overlap(text, stop) for stop in self._stop), default=0)
        self._withheld = text[len(text) - held :]
        return text[: len(text) - held]


def overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of the stop string `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A newly generated piece of text of one sequence in a batch.

    Attributes:
      row: index of the text among those of the call.
      text: continuation of that text; may be empty in its last piece.
      finish_reason: set in the last piece of a text, None before.
    """

    row: int
    text: str
    finish_reason: FinishReason | None = None


class TextGenerator:
    """Generates text that continues text prompts, with a tokenizer and a decoder.

    Args:
      decoder: the model on its mesh.
      tokenizer: its tokenizer.
      opening: ids that each text begins with, such as the document start.
      stop_tokens: ids that end a text.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, opening: Sequence[int] = (), stop_tokens: Collection[int] = ()
    ):
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.opening = tuple(opening)
        self.stop_tokens = frozenset(stop_tokens)

    def encode(self, text: str) -> list[int]:
        """Return a prompt's token ids, beginning with the ids that open every text, such as the document-start id."""
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
        """Continue a batch of prompts: yield pieces of the generated texts as tokens are generated.

        Args:
          prompts: ids of each prompt, from `encode`.
          max_tokens, sampling, seed: as in `Decoder.generate`.
          stop: strings that end a text; they may begin and end within a token.

        Raises:
          ConfigError: a stop string is empty, or `Decoder.generate` refuses a prompt.
        """
        if "" in stop:
            raise ConfigError("a stop string must have at least one character.")
        rows = [TextStream(self.tokenizer, prompt, stop, self.stop_tokens) for prompt in prompts]
        for tokens in self.decoder.generate(prompts, max_tokens, sampling, seed=seed, stop_tokens=self.stop_tokens):
            for number, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
                if row.finish_reason is None:
                    text = row.push(token)
                    if text or row.finish_reason is not None:
                        yield Piece(number, text, row.finish_reason)
            if all(row.finish_reason is not None for row in rows):
                return
        for number, row in enumerate(rows):
            if row.finish_reason is None:
                yield Piece(number, row.finish(), row.finish_reason)

    def generate(
        self,
        prompts: Sequence[str],
        max_tokens: int,
        sampling: Sampling,
        *,
        seed: int | Sequence[int] = 0,
        stop: Sequence[str] = (),
    ) -> list[str]:
        """Return the generated continuation of each text prompt; the other arguments are those of `stream`."""
        texts = [""] * len(prompts)
        ids = [self.encode(prompt) for prompt in prompts]
        for piece in self.stream(ids, max_tokens, sampling, seed=seed, stop=stop):
            texts[piece.row] += piece.text
        return texts


class ChatGenerator(TextGenerator):
    """Generates answers to questions, using the tokenizer's chat template and stopping where the answer ends.

    Args:
      generator: a generator for the same model; its `opening` is not used, because the template opens a chat.

    Raises:
      ConfigError: the tokenizer has no chat template.
      JaxstackError: the template cannot format a question with its answer.
    """

    def __init__(self, generator: TextGenerator):
        tokenizer = generator.tokenizer
        if tokenizer.chat is None or tokenizer.chat.template is None:
            raise ConfigError(
                "the tokenizer has no chat template: leave out --chat (in Python: chat=True), or add the model's "
                "chat_template.jinja next to the files of its tokenizer."
            )
        template = import_chat().open_chats(ChatConfig(), tokenizer).template
        assert template is not None
        end = template.find_answer_end(tokenizer.special_tokens)
        special = tokenizer.special_tokens.get(end)
        stop_tokens = generator.stop_tokens if special is None else generator.stop_tokens | {special}
        super().__init__(generator.decoder, tokenizer, (), stop_tokens)
        self._template = template
        self._stop = (end,) if end and special is None else ()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a chat with one question, up to where the model's answer begins.

        Raises:
          ConfigError: the question contains a special token.
        """
        check_chat_text(self.tokenizer, "the prompt", text, self._stop)
        question = self._template.render([{"role": "user", "content": text}], prompt=True)
        return self.tokenizer.encode_marked([question])[0][0].tolist()

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        *,
        seed: int | Sequence[int] = 0,
        stop: Sequence[str] = (),
    ) -> Iterator[Piece]:
        """Answer a batch of questions: yield pieces of the answers as tokens are generated."""
        return super().stream(prompts, max_tokens, sampling, seed=seed, stop=(*stop, *self._stop))


def check_chat_text(tokenizer: Tokenizer, name: str, text: str, ends: Sequence[str] = ()) -> None:
    """Raise ConfigError if the text of a chat, called `name`, contains a special token, as it could begin a turn.

    Args:
      ends: what else ends a turn, in a template whose texts are no special tokens of the tokenizer.
    """
    found = next((token for token in (*tokenizer.special_tokens, *ends) if token in text), None)
    if found is not None:
        raise ConfigError(
            f"{name} contains {found!r}, a special token, with which the text could pass for another turn; write it "
            "differently."
        )
