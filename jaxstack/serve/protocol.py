"""Request types of OpenAI's completion API, with vLLM's additional fields, and the JSON of the responses."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from jaxstack.config.base import Component
from jaxstack.decoding.sampling import Sampling
from jaxstack.serve.grammar import Kind

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "repetition_penalty": (1, None),
    "logit_bias": ({}, None),
    "logprobs": (False, None),
    "top_logprobs": (0, None),
    "best_of": (1, None),
    "suffix": ("", None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
    "min_tokens": (0, None),
    "length_penalty": (1, None),
    "use_beam_search": (False, None),
    "prompt_logprobs": (0, None),
    "include_stop_str_in_output": (False, None),
    "skip_special_tokens": (True, None),
    "spaces_between_special_tokens": (True, None),
    "add_generation_prompt": (True, None),
    "modalities": (["text"], None),
}
"""Fields of other servers that are not supported here, with the values that are accepted: those that do nothing."""
_NEUTRAL_IN_MESSAGES = ("refusal", "tool_calls", "function_call", "audio", "annotations")
"""Fields of the messages of an answer, which clients send back in the next request; only empty ones are accepted."""
_IGNORED = ("user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key")
"""Fields that are accepted and ignored, because they do not change the answer."""


_MOST_STOPS = 64
"""Largest number of texts that end an answer: each is looked for after every token."""
Choices: TypeAlias = Annotated[list[str], Field(max_length=10_000, fail_fast=True)]
"""The possible answers of a request."""


def _check_prompt(prompt: object) -> object:
    """Check that a prompt is a text, token ids, or a list of either; name the first wrong item only."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise ValueError("it must be a text, a list of token ids, or a list of texts or of lists of token ids")
    if not prompt:
        raise ValueError("it must have at least one text or token id")
    kind = type(prompt[0])
    for place, item in enumerate(prompt):
        ids = item if isinstance(item, list) else ()
        if kind not in (str, int, list) or type(item) is not kind or any(type(token) is not int for token in ids):
            raise ValueError(
                f"it must be a text, token ids (whole numbers), or a list of either; item {place} does not fit"
            )
    return prompt


def _check_stop(stop: object) -> object:
    """Check that stop texts are a text or a short list of texts; name the first wrong item only."""
    texts = stop if isinstance(stop, list) else [] if stop is None else [stop]
    if len(texts) > _MOST_STOPS:
        raise ValueError(f"at most {_MOST_STOPS} texts can end an answer; found {len(texts)}")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"it must be a text or a list of texts; item {place} is no text")
        if not text:
            raise ValueError("a stop text must have at least one character")
    return stop


class StreamOptions(Component):
    """OpenAI's `stream_options`: what a streamed response contains in addition to the text."""

    include_usage: bool = False
    """Send the numbers of tokens after the last piece."""
    include_obfuscation: bool = False
    """Accepted and ignored."""


class JsonSchema(Component):
    """A named JSON schema that the answer must match, as in OpenAI's `response_format`."""

    name: str = "schema"
    """Ignored."""
    description: str | None = None
    """Ignored."""
    schema_: dict[str, Any] = Field(default={}, alias="schema")
    """The schema."""
    strict: bool | None = None
    """Ignored: answers always match."""


class ResponseFormat(Component):
    """OpenAI's `response_format`: the output format of an answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    """Any text, any JSON value, or JSON of a schema."""
    json_schema: JsonSchema | None = None
    """The schema, for the type json_schema."""

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('json_schema must be given with the type "json_schema", and only with it')
        return self


class StructuredOutputs(Component):
    """vLLM's `structured_outputs`: a constraint on the answer; exactly one field is set."""

    json_: dict[str, Any] | None = Field(default=None, alias="json")
    """A JSON schema."""
    regex: str | None = None
    """A regular expression."""
    choice: Choices | None = None
    """The possible answers."""
    grammar: str | None = None
    """A grammar in the syntax of Lark."""


class GenerationRequest(Component):
    """Fields that the request bodies of /v1/completions and /v1/chat/completions have in common."""

    model: str | None = None
    """Name of the model, as /v1/models gives it."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Token limit of each answer."""
    temperature: float | None = Field(default=None, ge=0)
    """Divisor of the logits, 1 by default; 0 takes the likeliest token."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the likeliest tokens whose probabilities first reach this sum."""
    top_k: int | None = Field(default=None, ge=-1)
    """Sample from this many likeliest tokens; 0 or -1: all."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    """Sample from tokens at least this many times as likely as the likeliest one."""
    seed: int | None = None
    """Seed of the first answer, the next has seed + 1; by default another for each request."""
    n: int | None = Field(default=None, ge=1, le=128)
    """Answers per prompt."""
    stop: Annotated[str | list[str] | None, BeforeValidator(_check_stop)] = None
    """Texts that end an answer."""
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1024, fail_fast=True)] | None = None
    """Further ids that end an answer."""
    ignore_eos: bool | None = None
    """Go on after the ids that end a text, up to max_tokens."""
    stream: bool | None = None
    """Send the answer in pieces as server-sent events."""
    stream_options: StreamOptions | None = None
    """Options of streamed answers."""
    response_format: ResponseFormat | None = None
    """Form of the answer."""
    structured_outputs: StructuredOutputs | None = None
    """Form of the answer, as vLLM has it."""
    guided_json: dict[str, Any] | None = None
    """A JSON schema that the answer matches."""
    guided_regex: str | None = None
    """A regular expression that the answer matches."""
    guided_choice: Choices | None = None
    """The possible answers."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, fields: object) -> object:
        if not isinstance(fields, Mapping):
            raise ValueError("the body must be a JSON object")
        kept = dict(fields)
        for name, neutral in _NEUTRAL.items():
            if name in kept and name not in cls.model_fields and not _is_one_of(kept.pop(name), neutral):
                raise ValueError(f"{name} is not supported; leave it out")
        return {name: value for name, value in kept.items() if name not in _IGNORED}

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer when they are generated."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of the request: temperature, top_k, top_p and min_p."""
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = None if self.top_p == 1 else self.top_p
        return Sampling(temperature, self.top_k if self.top_k and self.top_k > 0 else None, top_p, self.min_p or None)

    @property
    def first_seed(self) -> int:
        """Random seed of the request's first answer: `seed`, or a random number."""
        return secrets.randbits(32) if self.seed is None else self.seed

    @property
    def grammar(self) -> tuple[Kind, object] | None:
        """Kind and definition of the grammar that the answer must match; None for unconstrained text.

        Raises:
          ValueError: several are given.
        """
        found: list[tuple[Kind, object]] = []
        if self.response_format is not None and self.response_format.type != "text":
            schema = self.response_format.json_schema
            found.append(("json", {"type": "object"} if schema is None else schema.schema_))
        outputs = self.structured_outputs or StructuredOutputs()
        named: list[tuple[Kind, object]] = [
            ("json", outputs.json_), ("regex", outputs.regex), ("choice", outputs.choice), ("grammar", outputs.grammar),
            ("json", self.guided_json), ("regex", self.guided_regex), ("choice", self.guided_choice),
        ]  # fmt: skip
        found.extend(choice for choice in named if choice[1] is not None)
        if len(found) > 1:
            raise ValueError("several forms of the answer are given (response_format, structured_outputs, guided_*)")
        return found[0] if found else None


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    """Return True if `value` is one of the `neutral` values, which change nothing; 0 and False differ here."""
    return any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in neutral)


class CompletionRequest(GenerationRequest):
    """JSON body of a request to /v1/completions."""

    prompt: Annotated[Any, BeforeValidator(_check_prompt)]
    """A text or its token ids, or a list of either."""
    echo: bool | None = None
    """Begin each answer with its prompt."""

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts of the request, each a text or a list of token ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt


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

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, fields: object) -> object:
        if not isinstance(fields, Mapping):
            raise ValueError("a message must be a JSON object")
        for name in _NEUTRAL_IN_MESSAGES:
            if fields.get(name) not in (None, "", [], {}):
                raise ValueError(f"{name} is not supported in messages; leave it out")
        return {name: value for name, value in fields.items() if name not in _NEUTRAL_IN_MESSAGES}

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is required in a message of the role {self.role!r}")
        if (self.role == "tool") != bool(self.tool_call_id):
            raise ValueError("tool_call_id must be given in messages of the role 'tool', and only there")
        return self

    @property
    def as_template_input(self) -> dict[str, str]:
        """Return the chat message as the dict that chat templates expect."""
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | {
            key: value for key, value in (("name", self.name), ("tool_call_id", self.tool_call_id)) if value
        }


class ChatRequest(GenerationRequest):
    """JSON body of a request to /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=10_000, fail_fast=True)
    """The chat."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The newer name of max_tokens."""


class Envelope:
    """Builds the JSON responses and stream events for one request to the completion or chat route."""

    def __init__(self, model: str, *, chat: bool):
        self._model = model
        self._chat = chat
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def whole(self, choices: Sequence[tuple[str, str | None]], usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the complete JSON response of a request, from (text, finish reason) of each answer."""
        return {
            **self._head("chat.completion" if self._chat else "text_completion"),
            "choices": [self._choice(i, text, reason) for i, (text, reason) in enumerate(choices)],
            "usage": usage,
        }

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the stream event that opens an answer; None for completions, which have no such event."""
        if not self._chat:
            return None
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def piece(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """Return the stream event with new text of an answer."""
        if not self._chat:
            return {**self._head("text_completion"), "choices": [self._choice(index, text, reason)]}
        choice = {"index": index, "delta": {"content": text} if text else {}, "finish_reason": reason}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the last stream event of a response, which contains the token usage."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        if self._chat:
            message = {"role": "assistant", "content": text, "refusal": None}
            return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


_MOST_CHARACTERS = 2000
"""Largest length of an error message."""


def error_body(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """Return an error as JSON in OpenAI's format."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    if len(message) > _MOST_CHARACTERS:  # it may repeat what the client sent
        message = message[:_MOST_CHARACTERS] + "..."
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
