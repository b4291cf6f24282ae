"""Answers: a question in, written by the chat template of the tokenizer, and what the model says to it out."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxstack.data.config import ChatConfig
from jaxstack.data.streams import import_chat
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.text import Piece, TextGenerator


class ChatGenerator(TextGenerator):
    """A text generator whose prompts are what a user asks, and whose texts end where an answer does.

    Raises:
      ConfigError: the tokenizer has no chat template.
      JaxstackError: the template cannot write a question with its answer.
    """

    def __init__(self, generator: TextGenerator):
        tokenizer = generator.tokenizer
        template: Any = import_chat().open_chats(ChatConfig(), tokenizer).template
        chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        text, ((_, last),) = template.split(chat, last=True)
        end = text[:last].rpartition("answer")[2].strip()
        special = tokenizer.special_tokens.get(end)
        ends = generator.stop_tokens if special is None else generator.stop_tokens | {special}
        super().__init__(generator.decoder, tokenizer, (), ends)
        self._template, self._ends = template, (end,) if end and special is None else ()

    def encode(self, text: str) -> list[int]:
        """The ids of a chat of one question, up to its answer."""
        asked = self._template.render([{"role": "user", "content": text}], prompt=True)
        return self.tokenizer.encode_marked([asked])[0][0].tolist()

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        *,
        seed: int | Sequence[int] = 0,
        stop: Sequence[str] = (),
    ) -> Iterator[Piece]:
        return super().stream(prompts, max_tokens, sampling, seed=seed, stop=(*stop, *self._ends))
