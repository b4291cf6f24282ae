"""Answers as text: chats encoded as prompts, tokens decoded up to a stop text, sent as JSON or server-sent events."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxstack.data.config import ChatConfig
from jaxstack.data.streams import import_chat
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.requests import ConstraintFailed, Request
from jaxstack.decoding.text_stream import TextStream, check_chat_text
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.serve.metrics import Metrics
from jaxstack.serve.protocol import Envelope, error_body


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
        try:
            chosen = import_chat().open_chats(ChatConfig(template=template), tokenizer).template
        except ConfigError as error:
            raise ConfigError(str(error).replace("data.chat.template", "server.chat_template")) from None
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
            for name, value in message.items():
                if name != "content" or message["role"] != "assistant":
                    check_chat_text(self._tokenizer, f"messages.{place}.{name}", str(value), self.stop)
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


class Refused(Exception):
    """Raised when a request is rejected; the client receives it as an HTTP error response.

    Args:
      status: HTTP status.
      message: what is wrong and what helps.
    """

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code


class Answers:
    """All answers to one HTTP request, one for each combination of prompt and sample, generated by the engine.

    Args:
      answers: one for each choice.
      metrics: records when tokens were generated.
      timeout: seconds after which `stream` gives up.
    """

    def __init__(self, answers: Sequence[TextAnswer], metrics: Metrics, timeout: float):
        self.answers = answers
        self._metrics = metrics
        self._until = time.monotonic() + timeout
        self._timeout = timeout
        self._newest: list[float | None] = [None] * len(answers)
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._notified = False
        self._refusal: Refused | None = None
        for answer in answers:
            answer.request.listen(self._notify)

    async def stream(self) -> AsyncIterator[tuple[int, str, str | None]]:
        """Yield (index of the answer, new text, finish reason or None) as the engine generates text.

        Raises:
          Refused: the request took longer than `timeout`, or the engine failed.
        """
        left = set(range(len(self.answers)))
        while left:
            try:
                await asyncio.wait_for(self._event.wait(), self._until - time.monotonic())
            except TimeoutError:
                raise Refused(504, f"the request took longer than {self._timeout:g} s (server.timeout).") from None
            self._event.clear()
            if self._refusal is not None:
                raise self._refusal
            for index in sorted(left):
                answer = self.answers[index]
                try:
                    text = self._take(index)
                except ConstraintFailed as error:
                    raise Refused(400, str(error)) from None
                except JaxstackError as error:
                    raise Refused(500, str(error)) from None
                if text or answer.finish_reason is not None:
                    yield index, text, answer.finish_reason
                if answer.ended:
                    left.discard(index)

    def refuse(self, refusal: Refused) -> None:
        """End `stream` with an error, for example because the server shuts down."""
        self._refusal = refusal
        self._event.set()

    def cancel(self) -> None:
        """Cancel all unfinished answers, for example after the client has disconnected."""
        for answer in self.answers:
            if not answer.ended:
                answer.request.cancel()

    def _take(self, index: int) -> str:
        answer = self.answers[index]
        before = self.answers[index].tokens
        text = answer.take()
        now = time.perf_counter()
        if answer.tokens > before:
            newest = answer.request.times.newest_token or now
            self._metrics.observe(answer.request, answer.tokens - before, self._newest[index], newest)
            self._newest[index] = newest
        if answer.ended:
            self._metrics.observe_end(answer.request, now)
        return text

    def _notify(self) -> None:
        """Wake the server's event loop to read new tokens, unless a wake-up is pending; runs in the engine's thread."""
        if not self._notified:
            self._notified = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._notified = False
        self._event.set()


class EventStream(StreamingResponse):
    """HTTP response of server-sent events; cancels text generation if the client disconnects."""

    def __init__(self, answers: Answers, events: AsyncIterator[str]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()


async def collect(answers: Answers, texts: list[str]) -> None:
    """Append the generated text of each answer to its entry of `texts` until all answers have ended."""
    async for index, text, _ in answers.stream():
        texts[index] += text


async def events(
    answers: Answers, envelope: Envelope, opening: Sequence[str], samples: int, *, usage: bool
) -> AsyncIterator[str]:
    """Yield the answers to a request as server-sent events in the format of OpenAI's API."""
    for index, text in enumerate(opening):
        if (first := envelope.first(index)) is not None:
            yield _event(first)
        if text:
            yield _event(envelope.piece(index, text, None))
    try:
        async for index, text, reason in answers.stream():
            yield _event(envelope.piece(index, text, reason))
    except Refused as error:
        yield _event(error_body(str(error), error.status, error.code))
        return
    if usage:
        yield _event(envelope.usage(usage_of(answers, samples)))
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def usage_of(answers: Answers, samples: int) -> dict[str, Any]:
    """Return the token counts of a response (OpenAI's `usage`); a prompt with several samples counts once."""
    prompts = [answer.request for answer in answers.answers[::samples]]
    prompt = sum(len(request.prompt) for request in prompts)
    completion = sum(answer.tokens for answer in answers.answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in prompts)},
    }
