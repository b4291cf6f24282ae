"""The responses to one HTTP request, returned together or streamed as server-sent events."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxstack.errors import JaxstackError
from jaxstack.serve.metrics import Metrics
from jaxstack.serve.protocol import Envelope, error_body
from jaxstack.serve.text import TextAnswer


class Refused(Exception):
    """Raised when a request is rejected; the client receives it as an HTTP error response.

    Args:
      status: HTTP status.
      message: what is wrong and what helps.
    """

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


class Answers:
    """All answers to one HTTP request: one for each prompt and sample.

    Args:
      answers: one for each choice.
      metrics: records when tokens were generated.
      timeout: seconds after which `stream` gives up.
    """

    def __init__(self, answers: Sequence[TextAnswer], metrics: Metrics, timeout: float):
        self.answers, self._metrics = answers, metrics
        self._until, self._timeout = time.monotonic() + timeout, timeout
        self._newest: list[float | None] = [None] * len(answers)
        self._event, self._loop, self._notified = asyncio.Event(), asyncio.get_running_loop(), False
        for answer in answers:
            answer.handle.listen(self._notify)

    async def stream(self) -> AsyncIterator[tuple[int, str, str | None]]:
        """Yield (index of the choice, new text, finish reason or None) as the engine generates text.

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
            for index in sorted(left):
                answer = self.answers[index]
                try:
                    text = self._take(index)
                except JaxstackError as error:
                    raise Refused(500, str(error)) from None
                if text or answer.finish_reason is not None:
                    yield index, text, answer.finish_reason
                if answer.ended:
                    left.discard(index)

    def cancel(self) -> None:
        """Cancel all unfinished answers, for example after the client has disconnected."""
        for answer in self.answers:
            if not answer.ended:
                answer.handle.cancel()

    def _take(self, index: int) -> str:
        answer, before = self.answers[index], self.answers[index].tokens
        text, now = answer.take(), time.perf_counter()
        if answer.tokens > before:
            newest = answer.handle.times.newest_token or now
            self._metrics.observe(answer.handle, answer.tokens - before, self._newest[index], newest)
            self._newest[index] = newest
        if answer.ended:
            self._metrics.observe_end(answer.handle, now)
        return text

    def _notify(self) -> None:
        """Wake the event loop unless a wake-up is already scheduled; called by the engine's thread."""
        if not self._notified:
            self._notified = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._notified = False
        self._event.set()


class EventStream(StreamingResponse):
    """Streams server-sent events; cancels the answers if the client disconnects, even before the first event."""

    def __init__(self, answers: Answers, events: AsyncIterator[str]):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()


async def collect(answers: Answers, texts: list[str]) -> None:
    """Append the text of each answer to its entry of `texts` until all have ended."""
    async for index, text, _ in answers.stream():
        texts[index] += text


async def events(
    answers: Answers, envelope: Envelope, opening: Sequence[str], samples: int, *, usage: bool
) -> AsyncIterator[str]:
    """Yield the server-sent events of the answers."""
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
    """Return the token usage of a response; a prompt with several samples is counted once."""
    prompts = [answer.handle for answer in answers.answers[::samples]]
    prompt = sum(len(handle.request.prompt) for handle in prompts)
    completion = sum(answer.tokens for answer in answers.answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(handle.cached_tokens for handle in prompts)},
    }
