"""Request type of OpenAI's chat completion API, and the messages and tools in it."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from jaxstack.config.base import Component
from jaxstack.decoding.scores import MOST_LIKELIEST
from jaxstack.serve.grammar import Kind
from jaxstack.serve.protocol import GenerationRequest
from jaxstack.serve.tools import MessageCall, Tool, ToolChoice, Tools

_NEUTRAL_IN_MESSAGES = ("refusal", "function_call", "audio", "annotations")
"""Fields of the messages of an answer, which clients send back in the next request; only empty ones are accepted."""
_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a chat template that a request cannot set, because its other fields do."""


class TextPart(Component):
    """A text part of a chat message whose content is a list of parts."""

    type: Literal["text"]
    """Only texts are supported."""
    text: str
    """The text."""


def _check_content(content: object) -> object:
    """Check that a message is a text or a list of texts; name the first wrong part only."""
    if not isinstance(content, list):
        if content is None or isinstance(content, str):
            return content
        raise ValueError(f"it must be a text or a list of parts; found a value of type {type(content).__name__}")
    for place, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = f" (type {part['type']!r})" if isinstance(part, dict) and isinstance(part.get("type"), str) else ""
            raise ValueError(f'only parts {{"type": "text", "text": "..."}} are supported; part {place}{kind} is none')
    return content


class Message(Component):
    """A message of a chat: its role and its content."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Who speaks; developer is the same as system."""
    content: Annotated[str | list[TextPart] | None, BeforeValidator(_check_content)] = None
    """The text of the message, or parts of it."""
    name: str | None = None
    """Passed to the chat template."""
    tool_call_id: str | None = None
    """The call that a message of the role tool answers; required there, and passed to the chat template."""
    tool_calls: Annotated[list[MessageCall], Field(max_length=1024, fail_fast=True)] | None = None
    """The calls of a message of the assistant."""
    reasoning_content: str | None = None
    """The reasoning of a message of the assistant, for templates that write it."""
    reasoning: str | None = None
    """Another name of it, as of newer versions of vLLM."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, fields: object) -> object:
        if not isinstance(fields, Mapping):
            raise ValueError("a message must be a JSON object")
        for name in _NEUTRAL_IN_MESSAGES:
            if fields.get(name) not in (None, "", [], {}):
                raise ValueError(f"{name} is not supported in messages; leave it out")
        return {k: value for k, value in fields.items() if value is not None and k not in _NEUTRAL_IN_MESSAGES}

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is required in a message of the role {self.role!r}")
        if (self.role == "tool") != bool(self.tool_call_id):
            raise ValueError("tool_call_id must be given in messages of the role 'tool', and only there")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls may be in messages of the role 'assistant' only")
        return self

    @property
    def as_template_input(self) -> dict[str, Any]:
        """Return the chat message as the dict that chat templates expect.

        Raises:
          ValueError: the arguments of a call are no JSON object.
        """
        calls = [call.as_template_input for call in self.tool_calls or ()]
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | {
            key: value
            for key, value in (
                ("name", self.name),
                ("tool_call_id", self.tool_call_id),
                ("tool_calls", calls),
                ("reasoning_content", self.reasoning_content or self.reasoning),
            )
            if value
        }


class ChatRequest(GenerationRequest):
    """JSON body of a request to /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=10_000, fail_fast=True)
    """The chat."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    """Return the log-probabilities of the answer's tokens."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LIKELIEST)
    """Name this many likeliest tokens beside each one."""
    tools: Annotated[list[Tool], Field(max_length=1024, fail_fast=True)] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    """auto: the model decides whether to call a function; none: never; required: it must; or the function to call."""
    reasoning_effort: str | None = None
    """Effort of the reasoning, such as low, medium or high, for templates with a variable of this name."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template, such as enable_thinking, as vLLM has it."""
    parallel_tool_calls: bool | None = None
    """False: an answer that must call a function has one call; what the model chooses itself is not limited."""
    add_generation_prompt: bool = True
    """False: the prompt ends after the last message, without the header of an answer, as vLLM has it."""
    continue_final_message: bool = False
    """The answer continues the last message, whose end the prompt does not have, as vLLM has it."""

    @model_validator(mode="after")
    def _continues_an_answer(self) -> "ChatRequest":
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise ValueError("continue_final_message begins no new answer: set add_generation_prompt to false")
        if self.messages[-1].role != "assistant" or self.messages[-1].tool_calls:
            raise ValueError("only a last message of the role 'assistant' without calls can be continued")
        return self

    @model_validator(mode="after")
    def _variables_are_free(self) -> "ChatRequest":
        own = next((name for name in self.chat_template_kwargs or () if name in _OWN_VARIABLES), None)
        if own is not None:
            raise ValueError(f"chat_template_kwargs cannot set {own!r}, which other fields of the request set")
        return self

    @property
    def variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})

    @model_validator(mode="after")
    def _choice_is_a_tool(self) -> "ChatRequest":
        named = [tool.function.name for tool in self.tools or ()]
        if self.tool_choice not in (None, "none", "auto") and not named:
            raise ValueError("tool_choice needs tools to choose from; add tools")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in named:
            wanted = self.tool_choice.function.name
            raise ValueError(f"tool_choice names {wanted!r}, which is none of the tools; choose one of {named}")
        return self

    @property
    def chosen_tools(self) -> Tools | None:
        """The tools of the request; None if it has none, or the answer may call none."""
        if not self.tools or self.tool_choice == "none":
            return None
        described = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in self.tools]
        functions = [tool.function for tool in self.tools]
        if isinstance(self.tool_choice, ToolChoice):
            name = self.tool_choice.function.name
            return Tools(described, [function for function in functions if function.name == name][:1])
        several = self.tool_choice == "required"
        return Tools(described, functions if several else (), several, 1 if self.parallel_tool_calls is False else None)

    @property
    def grammar(self) -> tuple[Kind, object] | None:
        given = super().grammar
        schema = None if self.chosen_tools is None else self.chosen_tools.schema
        if schema is not None and given is not None:
            raise ValueError("tool_choice asks for a call, response_format or the like for another form; leave out one")
        return given if schema is None else ("json", schema)

    @model_validator(mode="after")
    def _tokens_are_scored(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs ({self.top_logprobs}) needs logprobs: set it to true")
        return self

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
