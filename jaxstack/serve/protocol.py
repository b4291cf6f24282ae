"""Request types of OpenAI's completion API, with vLLM's additional fields, and the JSON of the responses."""

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from jaxstack.config.base import Component
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.scores import MOST_LIKELIEST
from jaxstack.serve.grammar import Kind
from jaxstack.serve.request_fields import IGNORED, PromptRequest, as_prompts, check_prompt, drop_neutral
from jaxstack.serve.token_details import Part

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "logprobs": (False, None),
    "top_logprobs": (0, None),
    "best_of": (1, None),
    "suffix": ("", None),
    "functions": ([], None),
    "length_penalty": (1, None),
    "use_beam_search": (False, None),
    "spaces_between_special_tokens": (True, None),
    "add_generation_prompt": (True, None),
    "add_special_tokens": (False, None),
    "detokenize": (True, None),
    "modalities": (["text"], None),
    "echo": (False, None),
    "continue_final_message": (False, None),
    "documents": ([], None),
    "function_call": ("none", None),
}
"""Fields of other servers that are not supported here, with the values that are accepted: those that do nothing."""
_NEUTRAL_IN_OUTPUTS: dict[str, tuple[object, ...]] = {
    "disable_fallback": (False, None),
    "disable_any_whitespace": (False, None),
    "disable_additional_properties": (False, None),
    "whitespace_pattern": (None,),
    "structural_tag": (None,),
}
"""The same for fields of `structured_outputs`."""


_MOST_STOPS = 64
"""Largest number of texts that end an answer: each is looked for after every token."""
Choices: TypeAlias = Annotated[list[str], Field(max_length=10_000, fail_fast=True)]
"""The possible answers of a request."""
Words: TypeAlias = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=10_000, fail_fast=True)]
"""Texts with at least one character each."""


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


def _check_bias(bias: object) -> object:
    """Check a mapping of token ids, which JSON has as texts, to what is added to their logits; name the first wrong."""
    if bias is None:
        return bias
    if not isinstance(bias, dict):
        raise ValueError(f"it must map token ids to numbers from -100 to 100; found {type(bias).__name__}")
    found = dict[int, float]()
    for token, value in bias.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not re.fullmatch("[0-9]{1,9}", str(token)) or not number or not -100 <= value <= 100:
            shown = str(value)[:100]
            raise ValueError(f"it must map token ids to numbers from -100 to 100; found {str(token)[:100]!r}: {shown}")
        found[int(token)] = float(value)
    return found


class StreamOptions(Component):
    """OpenAI's `stream_options`: what a streamed response contains in addition to the text."""

    include_usage: bool = False
    """Send the numbers of tokens after the last piece."""
    continuous_usage_stats: bool = False
    """With include_usage: send those so far with each piece too, as vLLM has it."""
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


def _read_schema(schema: object) -> object:
    """Return a JSON schema that is given as an object or, as vLLM's clients may, as the text of one."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it must be a JSON schema, as an object or its text; the text is no JSON: {error}") from None


Schema: TypeAlias = Annotated[dict[str, Any] | None, BeforeValidator(_read_schema)]
"""A JSON schema."""


class StructuredOutputs(Component):
    """vLLM's `structured_outputs`: a constraint on the answer; exactly one field is set."""

    json_: Schema = Field(default=None, alias="json")
    """A JSON schema."""
    json_object: bool | None = None
    """True: any JSON object."""
    regex: str | None = None
    """A regular expression."""
    choice: Choices | None = None
    """The possible answers."""
    grammar: str | None = None
    """A grammar in the syntax of Lark."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, fields: object) -> object:
        return drop_neutral(fields, _NEUTRAL_IN_OUTPUTS, ())


class GenerationRequest(PromptRequest):
    """Fields that the request bodies of /v1/completions and /v1/chat/completions have in common."""

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
    include_stop_str_in_output: bool | None = None
    """The answer has the text of `stop` that ended it, as vLLM has it."""
    skip_special_tokens: bool | None = None
    """False: the answer has the names of special tokens too, except for one that ended it, as vLLM has it."""
    allowed_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)] | None = None
    """The only ids that the answer may have, as vLLM has it."""
    bad_words: Words | None = None
    """Texts that the answer must not have, by their tokens, as vLLM has it."""
    ignore_eos: bool | None = None
    """Go on after the ids that end a text, up to max_tokens."""
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    """Subtracted from the logits of tokens that the answer has already."""
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    """The same for each time that the answer has the token."""
    repetition_penalty: float | None = Field(default=None, gt=0)
    """Divisor of the positive logits of tokens that the prompt or the answer has, factor of the negative ones."""
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_check_bias)] = None
    """Numbers that are added to the logits of tokens, by their ids."""
    min_tokens: int | None = Field(default=None, ge=0)
    """Number of tokens before which the answer does not end by itself."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MOST_LIKELIEST)
    """Log-probabilities of the tokens of the prompt, each with those of this many likeliest tokens, as vLLM has it."""
    return_token_ids: bool | None = None
    """Return the ids of the prompt's and the answer's tokens, as vLLM has it."""
    return_tokens_as_token_ids: bool | None = None
    """Name tokens `token_id:198` in place of their texts beside log-probabilities, as vLLM has it."""
    stream: bool | None = None
    """Send the answer in pieces as server-sent events."""
    stream_options: StreamOptions | None = None
    """Options of streamed answers."""
    response_format: ResponseFormat | None = None
    """Form of the answer."""
    structured_outputs: StructuredOutputs | None = None
    """Form of the answer, as vLLM has it."""
    guided_json: Schema = None
    """A JSON schema that the answer matches."""
    guided_regex: str | None = None
    """A regular expression that the answer matches."""
    guided_choice: Choices | None = None
    """The possible answers."""
    guided_grammar: str | None = None
    """A grammar in the syntax of Lark that the answer matches."""

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, fields: object) -> object:
        own = cls.model_fields
        return drop_neutral(fields, {name: known for name, known in _NEUTRAL.items() if name not in own}, IGNORED)

    @model_validator(mode="after")
    def _prompt_is_scored_at_once(self) -> "GenerationRequest":
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs come with a whole answer only; leave out stream")
        return self

    @property
    def likeliest(self) -> int | None:
        """Number of likeliest tokens to name beside each token of the answer; None: no log-probabilities."""
        return None

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer when they are generated."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of the request."""
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p = None if self.top_p == 1 else self.top_p
        return Sampling(
            temperature,
            self.top_k if self.top_k and self.top_k > 0 else None,
            top_p,
            self.min_p or None,
            self.presence_penalty or 0.0,
            self.frequency_penalty or 0.0,
            self.repetition_penalty or 1.0,
            self.logit_bias or None,
            self.min_tokens or 0,
        )

    @property
    def samples(self) -> int:
        """Number of answers that are generated for each prompt; the best `n` of them are returned."""
        return self.n or 1

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
            ("json", {"type": "object"} if outputs.json_object else None),
            ("json", self.guided_json), ("regex", self.guided_regex), ("choice", self.guided_choice),
            ("grammar", self.guided_grammar),
        ]  # fmt: skip
        found.extend(choice for choice in named if choice[1] is not None)
        if len(found) + (self.allowed_token_ids is not None) > 1:
            raise ValueError(
                "several forms of the answer are given (response_format, structured_outputs, guided_*, "
                "allowed_token_ids)"
            )
        return found[0] if found else None


class CompletionRequest(GenerationRequest):
    """JSON body of a request to /v1/completions."""

    prompt: Annotated[Any, BeforeValidator(check_prompt)]
    """A text or its token ids, or a list of either."""
    max_tokens: int | None = Field(default=None, ge=0)
    """Token limit of each answer; 0, with echo: the prompt alone."""
    echo: bool | None = None
    """Begin each answer with its prompt."""
    add_special_tokens: bool = True
    """False: no document start before a text (`server.document_start`), as vLLM has it."""
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LIKELIEST)
    """Log-probabilities of the answer's tokens, with echo of the prompt's too, each with those of this many likeliest
    tokens."""

    best_of: int | None = Field(default=None, ge=1, le=128)
    """Answers that are generated per prompt, of which the `n` with the highest mean log-probability are returned."""

    @property
    def samples(self) -> int:
        return self.best_of or self.n or 1

    @model_validator(mode="after")
    def _best_can_be_chosen(self) -> "CompletionRequest":
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError(f"best_of must be at least n ({self.n}); found {self.best_of}")
        if self.stream and self.samples > (self.n or 1):
            raise ValueError(f"best_of ({self.best_of}) above n ({self.n or 1}) cannot be streamed; leave out stream")
        return self

    @model_validator(mode="after")
    def _has_tokens(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1 without echo; found 0")
        return self

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts of the request, each a text or a list of token ids."""
        return as_prompts(self.prompt)


class Envelope:
    """Builds the JSON responses and stream events for one request to the completion or chat route."""

    def __init__(self, model: str, request_id: str, *, chat: bool):
        self._model = model
        self._chat = chat
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"
        self._created = int(time.time())

    def whole(
        self,
        choices: Sequence[tuple[Part, Mapping[str, Any]]],
        prompts: Sequence[Mapping[str, Any]],
        usage: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the complete JSON response of a request.

        Args:
          choices: the whole of each answer, and its further fields.
          prompts: fields of the prompt of each answer; a chat has one prompt, so that the response has its fields.
          usage: numbers of tokens.
        """
        own = [{}] * len(choices) if self._chat else prompts
        return {
            **self._head("chat.completion" if self._chat else "text_completion"),
            "choices": [self._choice(i, part, {**own[i], **more}) for i, (part, more) in enumerate(choices)],
            "usage": usage,
            **(prompts[0] if self._chat else {}),
        }

    def first(self, index: int, prompt: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Return the stream event that opens an answer; None for completions, which have no such event."""
        if not self._chat:
            return None
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **(prompt or {})}

    def piece(self, index: int, part: Part, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return the stream event with a new part of an answer and its further fields."""
        if not self._chat:
            return {**self._head("text_completion"), "choices": [self._choice(index, part, more)]}
        delta: dict[str, Any] = {"reasoning_content": part.reasoning} if part.reasoning else {}
        delta |= {"content": part.text} if part.text else {}
        if part.calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(part.calls)]
        choice = {"index": index, "delta": delta, "finish_reason": part.finish_reason, **more}
        return {**self._head("chat.completion.chunk"), "choices": [choice]}

    def usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return the last stream event of a response, which contains the token usage."""
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head(kind), "choices": [], "usage": usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _choice(self, index: int, part: Part, more: Mapping[str, Any]) -> dict[str, Any]:
        end = {"logprobs": None, "finish_reason": part.finish_reason, **more}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": part.text, "refusal": None}
            if part.calls or part.reasoning:
                message["content"] = part.text or None
            if part.reasoning:
                message["reasoning_content"] = part.reasoning
            if part.calls:
                message["tool_calls"] = list(part.calls)
            return {"index": index, "message": message, **end}
        return {"index": index, "text": part.text, **end}
