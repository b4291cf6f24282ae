"""Anthropic's messages API: its request as one of the chat completion API, its JSON and its stream events."""

import dataclasses
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from jaxstack.config.base import Component
from jaxstack.config.loader import build_component
from jaxstack.serve.answers import Answers, usage_of
from jaxstack.serve.chat_request import ChatRequest
from jaxstack.serve.refusals import Refused, messages_error
from jaxstack.serve.request_fields import drop_neutral
from jaxstack.serve.token_details import Part

_NEUTRAL: dict[str, tuple[object, ...]] = {"container": (None,), "mcp_servers": (None, [])}
"""Fields that are not supported here, with the values that are accepted: those that do nothing."""
_IGNORED = (
    "metadata", "service_tier", "cache_control", "context_management", "diagnostics", "inference_geo", "speed",
    "user_profile_id", "workspace_id",
)  # fmt: skip
"""Fields that are accepted and ignored, because they do not change the answer. Prefixes are cached unasked."""


class Block(Component):
    """A block of a message's content: text, reasoning, a call of a tool, or its result."""

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    """Kind of the block."""
    text: str = ""
    """The text."""
    thinking: str = ""
    """The reasoning."""
    id: str | None = None
    """Tells the calls apart."""
    name: str | None = None
    """Name of the tool that is called."""
    input: dict[str, Any] = {}
    """Arguments of the call."""
    tool_use_id: str | None = None
    """The call that a result is of."""
    content: Any = None
    """The result: a text, or blocks with texts."""
    is_error: bool | None = None
    """Ignored, as are the other fields: a result says in its text that it is an error."""
    signature: str | None = None
    data: str | None = None
    cache_control: Any = None
    citations: Any = None
    caller: Any = None

    @model_validator(mode="after")
    def _is_whole(self) -> "Block":
        needed = {"tool_use": ("id", "name"), "tool_result": ("tool_use_id",)}
        missing = [name for name in needed.get(self.type, ()) if getattr(self, name) is None]
        if missing:
            raise ValueError(f"{missing[0]} is required in a block of the type {self.type!r}")
        if self.type == "tool_result":
            _join_texts(self.content)
        return self


def _as_blocks(content: object) -> object:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _join_texts(content: object) -> str:
    """Return the text of a text, or of a list of blocks with texts.

    Raises:
      ValueError: a block has no text.
    """
    blocks = [] if content is None else _as_blocks(content)
    if not isinstance(blocks, list):
        raise ValueError(f"it must be a text or a list of blocks; found a value of type {type(content).__name__}")
    for place, block in enumerate(blocks):
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise ValueError(f"only blocks of the type 'text' are supported here; block {place} is none")
    return "".join(block["text"] for block in blocks)


class Turn(Component):
    """A message of a chat in Anthropic's form."""

    role: Literal["user", "assistant"]
    """Who speaks."""
    content: Annotated[Annotated[list[Block], Field(max_length=10_000, fail_fast=True)], BeforeValidator(_as_blocks)]
    """A text, or blocks."""

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> "Turn":
        known = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "redacted_thinking", "tool_use")}
        wrong = next((block.type for block in self.content if block.type not in known[self.role]), None)
        if wrong is not None:
            raise ValueError(f"a message of the role {self.role!r} has no blocks of the type {wrong!r}")
        return self

    @property
    def as_messages(self) -> list[dict[str, Any]]:
        """The same as messages of the chat completion API: each result of a tool is one of its own."""
        if self.role == "assistant":
            calls = [_as_call(block) for block in self.content if block.type == "tool_use"]
            message = {"role": "assistant", "content": "".join(block.text for block in self.content)}
            thought = "".join(block.thinking for block in self.content)
            return [message | {k: v for k, v in (("tool_calls", calls), ("reasoning_content", thought)) if v}]
        found: list[dict[str, Any]] = []
        for block in self.content:
            if block.type == "tool_result":
                content = _join_texts(block.content)
                found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
            elif found and found[-1]["role"] == "user":
                found[-1]["content"] += block.text
            else:
                found.append({"role": "user", "content": block.text})
        return found


def _as_call(block: Block) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


class MessagesTool(Component):
    """A tool in Anthropic's form."""

    type: Literal["custom"] | None = None
    """Only tools of the client are supported."""
    name: str
    """Its name."""
    description: str | None = None
    """Description for the model of what the tool does."""
    input_schema: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """Ignored, as are the others."""
    cache_control: Any = None
    input_examples: Any = None
    eager_input_streaming: bool | None = None


class ToolSelection(Component):
    """Choice of the tool that the answer calls, if any."""

    type: Literal["auto", "any", "tool", "none"]
    """auto: the model decides; any: it must call one; tool: the one of `name`; none: it calls none."""
    name: str | None = None
    """The tool to call."""
    disable_parallel_tool_use: bool | None = None
    """True: an answer that must call a tool has one call."""


class Thinking(Component):
    """Switch for reasoning before the answer, for templates with a variable `enable_thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    """disabled: it does not."""
    budget_tokens: int | None = None
    """Ignored, as is the other."""
    display: str | None = None


class OutputFormat(Component):
    """Format of the answer."""

    type: Literal["json_schema"]
    """JSON of a schema."""
    schema_: dict[str, Any] = Field(alias="schema")
    """The schema."""


class OutputConfig(Component):
    """Options of the answer."""

    format: OutputFormat | None = None
    """Its format."""
    effort: str | None = None
    """Effort of the reasoning, such as low, for templates with a variable `reasoning_effort`."""


class CountRequest(Component):
    """JSON body of a request to /v1/messages/count_tokens."""

    model: str | None = None
    """Name of the model, as /v1/models gives it."""
    messages: Annotated[list[Turn], Field(min_length=1, max_length=10_000, fail_fast=True)]
    """The chat."""
    system: Annotated[str | None, BeforeValidator(lambda given: None if given is None else _join_texts(given))] = None
    """A message of the system before the chat: a text, or blocks with texts."""
    tools: Annotated[list[MessagesTool], Field(max_length=1024, fail_fast=True)] | None = None
    """Tools that the model may call."""
    tool_choice: ToolSelection | None = None
    """Choice of the tool."""
    thinking: Thinking | None = None
    """Switch for reasoning."""
    output_config: OutputConfig | None = None
    """Format of the answer, and how long the model reasons."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, fields: object) -> object:
        return drop_neutral(fields, _NEUTRAL, _IGNORED)

    @property
    def further_fields(self) -> dict[str, Any]:
        """Fields of the request in the chat completion API for what only an answer needs."""
        return {}

    @property
    def as_chat_request(self) -> ChatRequest:
        """The same request of the chat completion API.

        Raises:
          ConfigError: a field is wrong.
        """
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        tools = [
            {
                "type": "function",
                "function": {"name": one.name, "description": one.description, "parameters": one.input_schema},
            }
            for one in self.tools or ()
        ]
        chosen = self.tool_choice or ToolSelection(type="auto")
        named = {"type": "function", "function": {"name": chosen.name or ""}}
        config = self.output_config or OutputConfig()
        form = None if config.format is None else {"schema": config.format.schema_}
        continues = self.messages[-1].role == "assistant"
        thinks = {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        fields = {
            "model": self.model,
            "messages": messages + [message for turn in self.messages for message in turn.as_messages],
            "tools": tools or None,
            "tool_choice": {"any": "required", "tool": named}.get(chosen.type, chosen.type) if tools else None,
            "parallel_tool_calls": False if chosen.disable_parallel_tool_use else None,
            "response_format": None if form is None else {"type": "json_schema", "json_schema": form},
            "reasoning_effort": config.effort,
            "chat_template_kwargs": thinks or None,
            "continue_final_message": continues,
            "add_generation_prompt": not continues,
        }
        return build_component(ChatRequest, fields | self.further_fields, "the request")


class MessagesRequest(CountRequest):
    """JSON body of a request to /v1/messages."""

    max_tokens: int = Field(ge=1)
    """Token limit of the answer."""
    temperature: float | None = Field(default=None, ge=0)
    """Divisor of the logits, 1 by default; 0 takes the likeliest token."""
    top_k: int | None = Field(default=None, ge=-1)
    """Sample from this many likeliest tokens."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the likeliest tokens whose probabilities first reach this sum."""
    stop_sequences: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    """Texts that end the answer."""
    stream: bool | None = None
    """Send the answer as events."""

    @property
    def further_fields(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_k", "top_p")}
        return own | {"stop": self.stop_sequences}


class MessageEnvelope:
    """Builds the JSON response and the stream events for one request to /v1/messages."""

    def __init__(self, model: str, request_id: str, request: MessagesRequest):
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._stops = request.stop_sequences or ()

    def whole(self, answers: Answers, part: Part) -> dict[str, Any]:
        """Return the response, given the whole answer."""
        writer = BlockWriter()
        for _ in (*writer.add(part), *writer.close()):
            pass
        return {**self._head, "content": writer.blocks, **self._end(answers, part), "usage": _usage(answers)}

    async def events(self, answers: Answers) -> AsyncIterator[str]:
        """Yield the answer to a request as server-sent events, in Anthropic's order."""
        writer = BlockWriter()
        begun = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(answers)}
        yield _event({"type": "message_start", "message": begun})
        last = Part("")
        try:
            async for _, part in answers.stream():
                for event in writer.add(part):
                    yield _event(event)
                last = part
        except Refused as error:
            yield _event(messages_error(str(error), error.status))
            return
        for event in writer.close():
            yield _event(event)
        yield _event({"type": "message_delta", "delta": self._end(answers, last), "usage": _usage(answers)})
        yield _event({"type": "message_stop"})

    def _end(self, answers: Answers, last: Part) -> dict[str, Any]:
        """Return the reason of an answer's end."""
        stop = answers.answers[0].stop_text
        if last.finish_reason == "stop" and stop in self._stops:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        return {"stop_reason": reasons.get(last.finish_reason or "", "end_turn"), "stop_sequence": None}


@dataclasses.dataclass
class BlockWriter:
    """Makes the events of an answer from its parts, and the blocks of its content.

    Attributes:
      blocks: blocks of the content so far, the last one with the text of the events so far.
    """

    blocks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    _open: bool = False

    def add(self, part: Part) -> Iterator[dict[str, Any]]:
        """Add a part of the answer; yield its events. A call comes as one piece, in the last part."""
        if part.reasoning:
            yield from self._extend("thinking", part.reasoning)
        if part.text:
            yield from self._extend("text", part.text)
        for call in part.calls:
            function = call["function"]
            head = {"type": "tool_use", "id": call["id"], "name": function["name"]}
            yield from self._begin({**head, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})
            self.blocks[-1] = {**head, "input": json.loads(function["arguments"])}

    def close(self) -> Iterator[dict[str, Any]]:
        """End the newest block, if there is one."""
        if self._open:
            self._open = False
            if self.blocks[-1]["type"] == "thinking":  # clients expect one; there is nothing to sign
                yield self._delta({"type": "signature_delta", "signature": ""})
            yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _extend(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if not self._open or self.blocks[-1]["type"] != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, kind: "", **more})
        self.blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        self._open = True
        self.blocks.append(block)
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": {**block}}

    def _delta(self, delta: Mapping[str, str]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _event(body: Mapping[str, Any]) -> str:
    return f"event: {body['type']}\ndata: {json.dumps(body, ensure_ascii=False)}\n\n"


def _usage(answers: Answers) -> dict[str, int]:
    """Return numbers of tokens: those of the prompt that were cached are not among `input_tokens`."""
    usage = usage_of(answers, 1)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
