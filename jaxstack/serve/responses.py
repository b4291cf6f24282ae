"""OpenAI's responses API: its request as one of the chat completion API, its JSON and stream events."""

import dataclasses
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from jaxstack.config.base import Component
from jaxstack.config.loader import build_component
from jaxstack.decoding.scores import MOST_LIKELIEST
from jaxstack.serve.answers import Answers, usage_of
from jaxstack.serve.chat_request import ChatRequest
from jaxstack.serve.refusals import Refused
from jaxstack.serve.request_fields import RequestId, drop_neutral
from jaxstack.serve.token_details import Part, TokenDetails
from jaxstack.serve.tools import Function

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "background": (False, None),
    "prompt": (None,),
    "max_tool_calls": (None,),
    "context_management": (None, []),
}
"""Fields that are not supported here, with the values that are accepted: those that do nothing."""
_KEPT = "this server keeps no responses: send the earlier items in input"
_REASONS = {"previous_response_id": _KEPT, "conversation": _KEPT, "background": f"{_KEPT}, and wait for the answer"}
_IGNORED = (
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "stream_options",
)  # fmt: skip
"""Fields that are accepted and ignored, because they do not change the answer. No response is stored."""
LOG_PROBABILITIES = "message.output_text.logprobs"
"""The entry of `include` that asks for log-probabilities."""
_SAME = (
    "model", "temperature", "top_p", "seed", "parallel_tool_calls", "chat_template_kwargs", "priority", "cache_salt",
)  # fmt: skip
"""Fields that mean the same in requests for chats."""
_PARTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")


def _join_parts(content: object) -> object:
    """Return the text of a content that is a text or a list of parts with texts; name the first wrong part only."""
    if not isinstance(content, list):
        return content
    texts = []
    for place, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in _PARTS or not isinstance(part.get("text"), str):
            raise ValueError(
                f"only parts with a text are supported, of the types {', '.join(_PARTS)}; see part {place}"
            )
        texts.append(part["text"])
    return "".join(texts)


Text = Annotated[str | None, BeforeValidator(_join_parts)]
"""A text, or parts that are joined to one."""


class InputItem(Component):
    """An item of the input, also of an earlier answer: a message, a call of a function, its output, or reasoning."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    """Kind of the item."""
    role: Literal["system", "developer", "user", "assistant"] | None = None
    """Who speaks, in a message."""
    content: Text = None
    """Text of a message, or of reasoning."""
    name: str | None = None
    """Name of the function that is called."""
    call_id: str | None = None
    """Tells the calls apart; an output has that of its call."""
    arguments: str | None = None
    """JSON of the arguments of a call."""
    output: Text = None
    """Result of a function, as text."""
    summary: Any = None
    """Ignored, as are the other fields."""
    encrypted_content: str | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, fields: object) -> object:
        if not isinstance(fields, Mapping):
            raise ValueError("an item must be a JSON object")
        return {name: value for name, value in fields.items() if value is not None}

    @model_validator(mode="after")
    def _is_whole(self) -> "InputItem":
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
        }
        missing = [name for name in needed[self.type] if getattr(self, name) is None]
        if missing:
            raise ValueError(f"{missing[0]} is required in an item of the type {self.type!r}")
        return self

    @property
    def as_call(self) -> dict[str, Any]:
        """The call as an entry of `tool_calls` in a message of the chat API."""
        return {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def _check_input(given: object) -> object:
    """Check that the input is a text or a list of items, each a JSON object."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise ValueError(f"it must be a text or a list of items; found a value of type {type(given).__name__}")
    return given


class ResponseTool(Function):
    """A tool in the form of the responses API."""

    type: Literal["function"]
    """Only functions are supported."""


class ChosenTool(Component):
    """The function that an answer calls."""

    type: Literal["function"]
    """Only functions are supported."""
    name: str
    """Its name."""


class TextFormat(Component):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    """Any text, any JSON object, or JSON of a schema."""
    name: str | None = None
    """Ignored."""
    description: str | None = None
    """Ignored."""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """The schema, for the type json_schema."""
    strict: bool | None = None
    """Ignored: answers always match."""

    @property
    def as_response_format(self) -> dict[str, Any]:
        """The same as `response_format` of the chat API."""
        schema = {} if self.schema_ is None else {"json_schema": {"schema": self.schema_}}
        return {"type": self.type, **schema}


class TextOptions(Component):
    """Options of the text of an answer."""

    format: TextFormat | None = None
    """Its format."""
    verbosity: str | None = None
    """Ignored."""


class ReasoningOptions(Component):
    """Options of the reasoning before an answer."""

    effort: str | None = None
    """Effort of the reasoning, such as low, for templates with a variable reasoning_effort."""
    summary: str | None = None
    """Ignored: reasoning is returned as it is."""
    generate_summary: str | None = None
    """Ignored."""


class ResponsesRequest(Component):
    """JSON body of a request to /v1/responses."""

    model: str | None = None
    """Name of the model, as /v1/models gives it."""
    input: Annotated[
        Annotated[list[InputItem], Field(min_length=1, max_length=10_000, fail_fast=True)],
        BeforeValidator(_check_input),
    ]
    """A text, or the items of a chat."""
    instructions: str | None = None
    """A message of the system before the input."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Token limit of the answer."""
    temperature: float | None = Field(default=None, ge=0)
    """Divisor of the logits, 1 by default; 0 takes the likeliest token."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the likeliest tokens whose probabilities first reach this sum."""
    seed: int | None = None
    """Seed of the answer, by default another for each request; no field of OpenAI's."""
    stream: bool | None = None
    """Send the answer as events."""
    tools: Annotated[list[ResponseTool], Field(max_length=1024, fail_fast=True)] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    """auto: the model decides whether to call a function; none: never; required: it must; or the function to call."""
    parallel_tool_calls: bool | None = None
    """False: an answer that must call a function has one call."""
    text: TextOptions | None = None
    """Format of the answer."""
    reasoning: ReasoningOptions | None = None
    """Options of the reasoning."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template; no field of OpenAI's."""
    priority: int | None = None
    """Requests with a lower number start first, 0 by default; no field of OpenAI's."""
    cache_salt: str | None = Field(default=None, min_length=1)
    """Chats share cached prefixes only with those of the same text here; no field of OpenAI's."""
    request_id: RequestId = None
    """Text that the id of the response contains; no field of OpenAI's."""
    truncation: Literal["auto", "disabled"] | None = None
    """auto: leave out the beginning of a chat that is too long; otherwise it is refused."""
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    """Further fields of the answer: `message.output_text.logprobs`, the log-probabilities of its tokens; others are
    ignored."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LIKELIEST)
    """Name this many likeliest tokens beside each one."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, fields: object) -> object:
        return drop_neutral(fields, _NEUTRAL, _IGNORED, _REASONS)

    @model_validator(mode="after")
    def _tokens_are_scored(self) -> "ResponsesRequest":
        if self.top_logprobs and not self.scored:
            raise ValueError(f'top_logprobs ({self.top_logprobs}) needs include: ["{LOG_PROBABILITIES}"]')
        return self

    @property
    def scored(self) -> bool:
        """True if the text has the log-probabilities of its tokens."""
        return LOG_PROBABILITIES in (self.include or ())

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the chat: reasoning, text and calls of an answer, which are items of their own, are one."""
        found: list[dict[str, Any]] = []
        if self.instructions is not None:
            found.append({"role": "system", "content": self.instructions})
        for item in self.input:
            if item.type == "function_call_output":
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
            elif item.type == "message" and item.role != "assistant":
                found.append({"role": item.role, "content": item.content})
            else:
                _add_to_answer(found, item)
        return found

    @property
    def as_chat_request(self) -> ChatRequest:
        """The same request of the chat completion API.

        Raises:
          ConfigError: a field is wrong.
        """
        tools = [
            {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
            for tool in self.tools or ()
        ]
        choice: object = self.tool_choice
        if isinstance(choice, ChosenTool):
            choice = {"type": "function", "function": {"name": choice.name}}
        form = None if self.text is None or self.text.format is None else self.text.format.as_response_format
        fields = {
            "messages": self.messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": tools or None,
            "tool_choice": choice,
            "response_format": form,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "logprobs": self.scored,
            "top_logprobs": self.top_logprobs,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
        }
        return build_component(ChatRequest, fields | {name: getattr(self, name) for name in _SAME}, "the request")


def _add_to_answer(messages: list[dict[str, Any]], item: InputItem) -> None:
    """Add an item to the last message if that is of the same answer, or else begin another message."""
    last: dict[str, Any] = messages[-1] if messages else {"role": None}
    order = ("reasoning_content", "content", "tool_calls")
    key = {"reasoning": order[0], "message": order[1], "function_call": order[2]}[item.type]
    follows = order.index(key) + (key == "tool_calls")
    if last["role"] != "assistant" or any(later in last for later in order[follows:]):
        last = {"role": "assistant"}
        messages.append(last)
    if item.type == "function_call":
        last.setdefault("tool_calls", []).append(item.as_call)
    elif item.content:
        last[key] = item.content


def _tools_of(request: ResponsesRequest) -> Sequence[Mapping[str, Any]]:
    """Return the tools of a request, as its response repeats them."""
    return [{"parameters": None, "strict": None, **tool.model_dump(exclude_none=True)} for tool in request.tools or ()]


class ResponseEnvelope:
    """Builds the JSON response and the stream events for one request to /v1/responses."""

    def __init__(self, model: str, request_id: str, request: ResponsesRequest):
        self._head = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }
        form = {"type": "text"}
        if request.text is not None and request.text.format is not None:
            form = request.text.format.model_dump(by_alias=True, exclude_none=True)
        effort = None if request.reasoning is None else request.reasoning.effort
        choice = "auto" if request.tool_choice is None else request.tool_choice
        self._settings = {
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "tools": _tools_of(request),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "text": {"format": form},
            "reasoning": {"effort": effort, "summary": None},
            "top_logprobs": request.top_logprobs or 0,
            "truncation": request.truncation or "disabled",
            "previous_response_id": None,
            "store": False,
            "metadata": {},
        }

    def whole(self, answers: Answers, part: Part) -> dict[str, Any]:
        """Return the response, given the whole answer."""
        writer = EventWriter(answers.answers[0].details)
        for _ in (*writer.add(part), *writer.finish(part)):
            pass
        return self.response(writer.items, part.finish_reason, usage_of(answers, 1))

    def response(
        self, items: list[dict[str, Any]], reason: str | None, usage: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the response with the items of its output, before its end (reason None) or after it."""
        status = {None: "in_progress", "length": "incomplete"}.get(reason, "completed")
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": items,
            "usage": None if usage is None else _usage(usage),
            **self._settings,
        }

    async def events(self, answers: Answers) -> AsyncIterator[str]:
        """Yield the answer to a request as server-sent events, in OpenAI's order."""
        writer = EventWriter(answers.answers[0].details)
        for kind in ("response.created", "response.in_progress"):
            yield writer.write({"type": kind, "response": self.response([], None)})
        last = Part("")
        try:
            async for _, part in answers.stream():
                for event in writer.add(part):
                    yield writer.write(event)
                last = part
        except Refused as error:
            failed = {**self.response(writer.items, None), "status": "failed"}
            failed["error"] = {"code": "server_error", "message": str(error)}
            yield writer.write({"type": "response.failed", "response": failed})
            return
        for event in writer.finish(last):
            yield writer.write(event)
        ended = self.response(writer.items, last.finish_reason, usage_of(answers, 1))
        yield writer.write({"type": f"response.{ended['status']}", "response": ended})


@dataclasses.dataclass
class EventWriter:
    """Makes the events of an answer from its parts, and the items of its output.

    Attributes:
      details: describes the tokens of the text.
      items: items of the output so far, the last one with the text of the events so far.
    """

    details: TokenDetails
    items: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    _count: int = 0

    def write(self, event: Mapping[str, Any]) -> str:
        """Return an event as text, numbered in order."""
        numbered = {**event, "sequence_number": self._count}
        self._count += 1
        return f"event: {event['type']}\ndata: {json.dumps(numbered, ensure_ascii=False)}\n\n"

    def add(self, part: Part) -> Iterator[dict[str, Any]]:
        """Add a part of the answer; yield its events."""
        if part.reasoning:
            yield from self._extend("reasoning", part.reasoning, {})
        if part.text:
            yield from self._extend("message", part.text, {"logprobs": self.details.describe_text(part)})

    def finish(self, last: Part) -> Iterator[dict[str, Any]]:
        """End the answer; yield the last events. A call comes as one item, in the last part."""
        status = "incomplete" if last.finish_reason == "length" else "completed"
        if not self.items and not last.calls:
            yield from self._open("message")
        yield from self._close(status)
        for call in last.calls:
            yield from self._call(call)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _extend(self, kind: str, text: str, more: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
        if not self.items or self.items[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._open(kind)
        content = self.items[-1]["content"][0]
        content["text"] += text
        for name, entries in more.items():
            content[name] += entries
        yield {"type": f"response.{_NAMES[kind]}.delta", **self._place, "content_index": 0, "delta": text, **more}

    def _open(self, kind: str) -> Iterator[dict[str, Any]]:
        item: dict[str, Any] = {"id": f"{_PREFIXES[kind]}_{secrets.token_hex(16)}", "type": kind}
        item |= {"status": "in_progress", "content": []}
        item |= {"role": "assistant"} if kind == "message" else {"summary": [], "encrypted_content": None}
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": {**item}}
        part = {"type": _NAMES[kind], "text": ""}
        part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
        item["content"] = [{**part, "logprobs": []} if kind == "message" else {**part}]
        yield {"type": "response.content_part.added", **self._place, "content_index": 0, "part": part}

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        """End the newest item of text, if there is one."""
        if not self.items:
            return
        item = self.items[-1]
        item["status"] = status
        kind = item["type"]
        part = item["content"][0]
        ended = {"type": f"response.{_NAMES[kind]}.done", **self._place, "content_index": 0, "text": part["text"]}
        yield ended | ({"logprobs": part["logprobs"]} if kind == "message" else {})
        yield {"type": "response.content_part.done", **self._place, "content_index": 0, "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        name = call["function"]["name"]
        arguments = call["function"]["arguments"]
        item = {"id": f"fc_{secrets.token_hex(16)}", "type": "function_call", "call_id": call["id"], "name": name}
        self.items.append({**item, "arguments": arguments, "status": "completed"})
        number = len(self.items) - 1
        opened = {**item, "arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": number, "item": opened}
        yield {"type": "response.function_call_arguments.delta", **self._place, "delta": arguments}
        ended = {"name": name, "arguments": arguments}
        yield {"type": "response.function_call_arguments.done", **self._place, **ended}
        yield {"type": "response.output_item.done", "output_index": number, "item": self.items[-1]}


_PREFIXES = {"reasoning": "rs", "message": "msg"}
_NAMES = {"reasoning": "reasoning_text", "message": "output_text"}
"""Types of the part of an item of text, by the type of the item."""


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
