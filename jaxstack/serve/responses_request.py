"""Request type of OpenAI's responses API, and the same request as one of the chat completion API."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from jaxstack.config.base import Component
from jaxstack.config.loader import build_component
from jaxstack.decoding.scores import MOST_LIKELIEST
from jaxstack.serve.chat_request import ChatRequest
from jaxstack.serve.protocol import drop_neutral
from jaxstack.serve.tools import Function

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "background": (False, None),
    "prompt": (None,),
    "truncation": ("disabled", None),
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
    """How long the model reasons, for templates with a variable reasoning_effort."""
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
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    """With `message.output_text.logprobs` the text has the log-probabilities of its tokens; others are ignored."""
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
        }
        same = ("model", "temperature", "top_p", "seed", "parallel_tool_calls", "chat_template_kwargs", "priority")
        return build_component(ChatRequest, fields | {name: getattr(self, name) for name in same}, "the request")


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


def tools_of(request: ResponsesRequest) -> Sequence[Mapping[str, Any]]:
    """Return the tools of a request, as its response repeats them."""
    return [{"parameters": None, "strict": None, **tool.model_dump(exclude_none=True)} for tool in request.tools or ()]
