"""Answers as text: tokens decoded up to a stop text, and sent as JSON or server-sent events."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from jaxstack.decoding.requests import ConstraintFailed, Request
from jaxstack.decoding.scores import TokenScore
from jaxstack.decoding.text_stream import TextStream
from jaxstack.errors import JaxstackError
from jaxstack.serve.chat_format import ReasoningReader
from jaxstack.serve.metrics import Metrics
from jaxstack.serve.protocol import Envelope, StreamOptions
from jaxstack.serve.refusals import Refused, error_body
from jaxstack.serve.token_details import Part, TokenDetails
from jaxstack.serve.tools import ToolReader


class Readers(NamedTuple):
    """Parsers that split an answer into tool calls, reasoning and text; None for parts that the template lacks."""

    tools: ToolReader | None = None
    """Finds tool calls."""
    reasoning: ReasoningReader | None = None
    """Separates reasoning from the answer."""

    def marks(self, special_tokens: Mapping[str, int]) -> dict[int, str]:
        """Return the special tokens that the readers look for, by their ids."""
        known = "" if self.reasoning is None else self.reasoning.marks
        return {i: text for text, i in special_tokens.items() if self.tools is not None or text in known}


_PLAIN = Readers()


class TextAnswer:
    """Decodes the answer to one request into text, as its tokens are generated.

    Args:
      request: the request in the engine.
      text: decodes its tokens, up to a stop text.
      details: makes the fields of the response that describe single tokens.
      echo: the text of the prompt, which is returned at the beginning of the answer, and the number of tokens before
        that text (0 or 1: the document start). None: the prompt is not repeated.
      echo_only: end the answer after the prompt.
      readers: split the generated text into reasoning, tool calls and the answer.
      reasons: stop texts and stop tokens that the request itself names, which `stop_reason` tells.
    """

    def __init__(
        self,
        request: Request,
        text: TextStream,
        details: TokenDetails,
        *,
        echo: tuple[str, int] | None = None,
        echo_only: bool = False,
        readers: Readers = _PLAIN,
        reasons: Collection[str | int] = (),
    ):
        self.request = request
        self.details = details
        self._text = text
        self._tools, self._reasoning = readers
        self._echo = echo
        self._echo_only = echo_only
        self._reasons = reasons
        self._new = list[int]()
        self._scored = 0
        self._returned = 0
        self._before = 0
        self._spoken = 0
        self._speaks = False
        self.tokens = 0
        """Number of tokens up to the end of the answer, without a stop token."""
        self.reasoning_tokens = 0
        """Number of tokens up to the end of the reasoning."""
        self.finish_reason: str | None = None
        """ "stop" or "length" once the answer has ended; None before, and after a cancellation."""

    @property
    def prompt_fields(self) -> dict[str, Any]:
        """Fields of the response that describe the tokens of the prompt; complete once `take` has returned a part."""
        return self.details.describe_prompt(self.request.prompt, self.request.prompt_scores)

    @property
    def scores(self) -> Sequence[TokenScore]:
        """Scores of the tokens that `take` has returned, without those that the engine generated after a stop text."""
        return self.request.scores[: self._scored]

    @property
    def generated(self) -> int:
        """Number of tokens up to the end of the answer, with the stop token that ended it, as vLLM counts them."""
        return self.tokens + (not self._echo_only and self.stop_text is None and self.request.stop_token is not None)

    @property
    def stop_text(self) -> str | None:
        """The stop text that ended the answer, if one did."""
        return self._text.stop_text

    @property
    def stop_reason(self) -> str | int | None:
        """The stop text or stop token of the request that ended the answer, as vLLM has it; None if none did."""
        if self.finish_reason == "length":  # of the prompt alone, after which the engine may have met a stop token
            return None
        ended_by = self.stop_text if self.stop_text is not None else self.request.stop_token
        return ended_by if ended_by in self._reasons else None

    def describe(self, part: Part) -> dict[str, Any]:
        """Return the further fields of a part of the answer: those of its tokens, and of the last part why it ended."""
        ended = {} if part.finish_reason is None else {"stop_reason": self.stop_reason}
        return {**self.details.describe(part), **ended}

    @property
    def ended(self) -> bool:
        """True if the answer has ended and all of its text has been returned."""
        return self.finish_reason is not None or self.request.finish_reason == "cancelled"

    def take(self) -> Part | None:
        """Return what was generated since the last call, without waiting; None if there is no new text and no end.

        Raises:
          JaxstackError: the engine failed.
        """
        if self.ended:
            return None
        tokens, reason = self.request.take()
        begun = bool(tokens) or reason is not None
        echoed = self._take_echo(begun=begun)
        if self._echo_only:  # the token that the engine generates at least says nothing, nor does it end the answer
            tokens = []
            reason = reason if reason in ("error", "cancelled") else None
        reasoning, text = self._decode(tokens, reason)
        if self._echo_only and begun:
            self._end("length")
        calls = []
        if self._tools is not None and self.finish_reason is not None:
            rest, calls = self._tools.finish()
            text += rest
            self.finish_reason = "tool_calls" if calls else self.finish_reason
        if not text and not reasoning and not echoed.text and self.finish_reason is None:
            return None
        # The tokens of what may be a call come in the last part, as the call itself.
        waits = self._tools is not None and self.finish_reason is None
        count = max(0, self._spoken - self._returned) if waits else len(self._new)
        new = self._new[:count]
        self._new = self._new[count:]
        before = min(len(new), max(0, self._before - self._returned))
        spoken = max(self._spoken if calls else self.tokens, self._returned)
        self._returned += len(new)
        after = max(0, self._returned - spoken)
        scores = self.request.scores[self._scored : self._scored + len(new)]
        self._scored += len(scores)
        return echoed + Part(text, new, scores, 0, self.finish_reason, calls, reasoning, before, after)

    def _take_echo(self, *, begun: bool) -> Part:
        """Return the prompt as the first part of the answer, once, when the scores of its tokens are known."""
        scored = self.request.sampling.logprobs is not None
        if self._echo is None or (scored and not begun):
            return Part("")
        text, skipped = self._echo
        self._echo = None
        prompt = self.request.prompt[skipped:]
        scores = [None, *self.request.prompt_scores][skipped:] if scored else []
        return Part(text, prompt, scores, len(prompt))

    def _decode(self, tokens: Sequence[int], reason: str | None) -> tuple[str, str]:
        """Return the reasoning and the text of new tokens; note how the answer ends, if it does."""
        pieces = []
        for token in tokens:
            self.tokens += 1
            self._new.append(token)
            pieces.append(self._split(self._text.push(token)))
            if self._text.finish_reason is not None:
                self._end("stop")
                break
        if self.finish_reason is None and reason == "error":
            raise self.request.error or JaxstackError("the engine has failed")
        if self.finish_reason is None and reason is not None and reason != "cancelled":
            pieces.append(self._split(self._text.finish("stop" if reason == "stop" else "length")))
            self.finish_reason = self._text.finish_reason
            if self.request.stop_token is not None:
                self._new.append(self.request.stop_token)
        if self.finish_reason is not None and self._reasoning is not None:
            rest, text = self._reasoning.finish()
            pieces.append((rest, text if self._tools is None else self._tools.push(text)))
        reasoning, text = ("".join(parts) for parts in zip(("", ""), *pieces, strict=True))
        return reasoning, text

    def _split(self, text: str) -> tuple[str, str]:
        """Return the reasoning and the answer in the text of the newest token, without text that may be a tool call."""
        reasoning = ""
        if self._reasoning is not None:
            before = self._reasoning.reasons
            reasoning, text = self._reasoning.push(text)
            if before or self._reasoning.reasons:
                self.reasoning_tokens = self.tokens
            if not text and not self._speaks and (self.reasoning_tokens or self._reasoning.answers):
                self._before = self.tokens
        self._speaks |= bool(text)
        if self._tools is not None:
            text = self._tools.push(text)
            if not self._tools.calls:
                self._spoken = self.tokens
        return reasoning, text

    def _end(self, reason: str) -> None:
        self.request.cancel()
        self.finish_reason = reason


class Answers:
    """All answers to one HTTP request, one for each combination of prompt and sample, generated by the engine.

    Args:
      answers: one for each choice.
      metrics: records the latencies of the tokens.
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

    async def stream(self) -> AsyncIterator[tuple[int, Part]]:
        """Yield (index of the answer, new part of it) as the engine generates text.

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
                    part = self._take(index)
                except ConstraintFailed as error:
                    raise Refused(400, str(error)) from None
                except JaxstackError as error:
                    raise Refused(500, str(error)) from None
                if part is not None:
                    yield index, part
                if answer.ended:
                    left.discard(index)
        self._metrics.observe_longest(max(answer.generated for answer in self.answers))

    async def collect(self) -> list[Part]:
        """Return the whole of each answer, once all have ended.

        Raises:
          Refused: as `stream`.
        """
        parts = [Part("")] * len(self.answers)
        async for index, part in self.stream():
            parts[index] += part
        return parts

    def refuse(self, refusal: Refused) -> None:
        """End `stream` with an error, for example because the server shuts down."""
        self._refusal = refusal
        self._event.set()

    def cancel(self) -> None:
        """Cancel all unfinished answers, for example after the client has disconnected."""
        for answer in self.answers:
            if not answer.ended:
                answer.request.cancel()

    def _take(self, index: int) -> Part | None:
        answer = self.answers[index]
        before = self.answers[index].tokens
        part = answer.take()
        now = time.perf_counter()
        if answer.tokens > before:
            newest = answer.request.times.newest_token or now
            self._metrics.observe(answer.request, answer.tokens - before, self._newest[index], newest)
            self._newest[index] = newest
        if answer.ended:
            self._metrics.observe_end(answer.request, answer.generated, now)
        return part

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

    def close(self) -> None:
        """Cancel the generation of the text."""
        self._answers.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.close()


def choose_best(answers: Answers, samples: int, count: int) -> list[int]:
    """Return the numbers of the `count` answers to each prompt whose tokens have the highest mean log-probability."""

    def rank(number: int) -> float:
        scores = answers.answers[number].scores
        return -sum(score.log_probability for score in scores) / max(1, len(scores))

    firsts = range(0, len(answers.answers), samples)
    return [number for first in firsts for number in sorted(range(first, first + samples), key=rank)[:count]]


async def events(answers: Answers, envelope: Envelope, samples: int, options: StreamOptions) -> AsyncIterator[str]:
    """Yield the answers to a request as server-sent events in the format of OpenAI's API."""

    def counts() -> dict[str, Any]:
        continuous = options.include_usage and options.continuous_usage_stats
        return {"usage": usage_of(answers, samples)} if continuous else {}

    prompts = [answer.prompt_fields for answer in answers.answers]
    for index, prompt in enumerate(prompts):
        if (first := envelope.first(index, prompt)) is not None:
            yield _event({**first, **counts()})
            prompts[index] = {}
    try:
        async for index, part in answers.stream():
            more = answers.answers[index].describe(part)
            yield _event({**envelope.piece(index, part, {**prompts[index], **more}), **counts()})
            prompts[index] = {}
    except Refused as error:
        yield _event(error_body(str(error), error.status, error.code))
        return
    if options.include_usage:
        yield _event(envelope.usage(usage_of(answers, samples)))
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def usage_of(answers: Answers, samples: int) -> dict[str, Any]:
    """Return the token counts of a response (OpenAI's `usage`); a prompt with several samples counts once."""
    prompts = [answer.request for answer in answers.answers[::samples]]
    prompt = sum(len(request.prompt) for request in prompts)
    completion = sum(answer.generated for answer in answers.answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(one.reasoning_tokens for one in answers.answers)},
    }
