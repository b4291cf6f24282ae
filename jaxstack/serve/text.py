"""Conversion between text and tokens: encodes chats as prompts, and decodes answers up to a stop string."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxstack.data.config import ChatConfig
from jaxstack.data.streams import import_chat
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.requests import Request
from jaxstack.decoding.text_stream import TextStream
from jaxstack.errors import ConfigError, JaxstackError


class ChatFormatter:
    """Encodes chats as token ids of a prompt, using a chat template.

    Args:
      tokenizer: the model's tokenizer.
      template: as in `ChatConfig.template`: auto, the name of a template, or a file.

    Attributes:
      stop_tokens: ids that end an answer in this template.
      stop: texts that end an answer in this template, if they are not single tokens.

    Raises:
      ConfigError: there is no such template, or jinja2 is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, template: str = "auto"):
        self._tokenizer = tokenizer
        chosen = import_chat().open_chats(ChatConfig(template=template), tokenizer).template
        if chosen is None:
            raise ConfigError("server.chat_template must be auto, the name of a template, or a file; found none.")
        self._template = chosen
        end = chosen.find_answer_end(tokenizer.special_tokens)
        special = tokenizer.special_tokens.get(end)
        self.stop_tokens = frozenset() if special is None else frozenset({special})
        self.stop = (end,) if end and special is None else ()

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a chat, up to where the next answer begins.

        Raises:
          JaxstackError: the template refuses the chat, or a text in it contains a special token, with which it could
            pass for another turn.
        """
        for place, message in enumerate(messages):
            found = next((token for token in self._tokenizer.special_tokens if token in str(message["content"])), None)
            if found is not None and message["role"] != "assistant":
                raise ConfigError(
                    f"messages.{place}.content contains {found!r}, a special token, with which the text could pass for "
                    "another turn; write it differently."
                )
        return self._tokenizer.encode_marked([self._template.render(messages, prompt=True)])[0][0].tolist()


class TextAnswer:
    """Decodes the answer to one request into text, as its tokens are generated.

    Args:
      request: the request in the engine.
      tokenizer: the model's tokenizer.
      stop: strings that end the answer; they, and what follows them, are not part of it.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self.request = request
        self._text = TextStream(tokenizer, request.prompt, stop)
        self.tokens = 0
        """Number of tokens up to the end of the answer."""
        self.finish_reason: str | None = None
        """ "stop" or "length" once the answer has ended; None before, and after a cancellation."""

    @property
    def ended(self) -> bool:
        """True if the answer has ended and all of its text has been returned."""
        return self.finish_reason is not None or self.request.finish_reason == "cancelled"

    def take(self) -> str:
        """Return the text that was generated since the last call, without waiting.

        Raises:
          JaxstackError: the engine failed.
        """
        if self.ended:
            return ""
        tokens, reason = self.request.take()
        pieces = []
        for token in tokens:
            self.tokens += 1
            pieces.append(self._text.push(token))
            if self._text.finish_reason is not None:
                self.request.cancel()
                self.finish_reason = "stop"
                return "".join(pieces)
        if reason == "error":
            raise self.request.error or JaxstackError("the engine has failed")
        if reason is not None and reason != "cancelled":
            pieces.append(self._text.finish("stop" if reason == "stop" else "length"))
            self.finish_reason = self._text.finish_reason
        return "".join(pieces)
