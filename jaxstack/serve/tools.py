"""Tools of a chat: their descriptions in a request, and the calls in an answer, whole or while it is generated."""

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from jaxstack.config.base import Component
from jaxstack.data.tool_calls import ToolCall, ToolFormat
from jaxstack.decoding.text_stream import overlap
from jaxstack.serve.schema_ids import with_own_ids


class Function(Component):
    """A function that the model may call."""

    name: str = Field(min_length=1)
    """Its name, as in calls."""
    description: str | None = None
    """Description for the model of what the function does."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments; None: it has none."""
    strict: bool | None = None
    """Ignored: calls in the template's own format are not constrained, chosen ones always match."""

    @field_validator("parameters")
    @classmethod
    def _are_an_object(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        found = "object" if parameters is None else parameters.get("type", "object")
        if found != "object":
            raise ValueError(f"parameters must be a JSON schema of type object, by name; found type {found!r}.")
        return parameters

    @property
    def arguments(self) -> dict[str, Any]:
        """JSON schema of its arguments, which are an object."""
        return {"type": "object", **(self.parameters or {})}


class Tool(Component):
    """A tool in OpenAI's form."""

    type: Literal["function"]
    """Only functions are supported."""
    function: Function
    """The function."""


class ChosenFunction(Component):
    """The name of a function."""

    name: str
    """Its name."""


class ToolChoice(Component):
    """The tool that an answer calls, in OpenAI's form."""

    type: Literal["function"]
    """Only functions are supported."""
    function: ChosenFunction
    """The function."""


class CalledFunction(Component):
    """The function of a call in a message of the assistant."""

    name: str
    """Its name."""
    arguments: str = "{}"
    """JSON of its arguments."""


class MessageCall(Component):
    """A call in a message of the assistant."""

    id: str
    """Tells the calls of a chat apart."""
    type: Literal["function"] = "function"
    """Only functions are supported."""
    function: CalledFunction
    """The function's name, and its arguments."""
    index: int | None = None
    """Ignored: its place in a streamed answer."""

    @property
    def as_template_input(self) -> dict[str, Any]:
        """Return the call as chat templates expect it, with the arguments as a mapping.

        Raises:
          ValueError: the arguments are no JSON object.
        """
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of a call must be the text of a JSON object; those of {self.id!r} are not")
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


@dataclasses.dataclass(frozen=True)
class Tools:
    """Tools of a request, as the chat template gets them, and which of them the answer must call.

    Attributes:
      described: in OpenAI's form.
      chosen: functions of which the answer is a call; (): the model chooses whether and what it calls.
      several: the answer is a list of calls, each with the name of its function.
      most: largest number of calls in this list; None: no limit.
    """

    described: Sequence[Mapping[str, Any]]
    chosen: Sequence[Function] = ()
    several: bool = False
    most: int | None = None

    @property
    def schema(self) -> dict[str, Any] | None:
        """JSON schema of the answer; None: it is free."""
        if not self.chosen:
            return None
        if not self.several:
            return self.chosen[0].arguments
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": function.name},
                    # With an $id its references are to itself, such as #/$defs/City.
                    "parameters": with_own_ids(function.arguments, f"urn:tool:{number}"),
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for number, function in enumerate(self.chosen)
        ]
        limit = {} if self.most is None else {"maxItems": self.most}
        return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}}


class ToolReader:
    """Tells the calls of an answer from its other text, as it is generated.

    Args:
      tools: tools of the request.
      form: the format in which the model writes calls, unless the answer has a schema.
    """

    def __init__(self, tools: Tools, form: ToolFormat | None):
        self._tools = tools
        self._form = form
        self._held = ""
        self.calls = bool(tools.chosen)
        """True: all that follows is, or may be, calls."""

    def push(self, text: str) -> str:
        """Add generated text; return what is certainly no part of a call."""
        self._held += text
        if self.calls or self._form is None:
            return ""
        openings = self._form.openings
        if not openings:  # an answer that begins like JSON may be a call
            begun = self._held.lstrip()
            self.calls = begun[:1] in ("{", "[")
            return self._release(len(self._held) if begun and not self.calls else 0)
        places = [place for place in map(self._held.find, openings) if place >= 0]
        self.calls = bool(places)
        held = max(overlap(self._held, opening) for opening in openings)
        place = min(places) if places else len(self._held) - held
        return self._release(len(self._held[:place].rstrip()))

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Return the rest of the text, and the calls in OpenAI's form: none if one of them cannot be read."""
        text = self._held
        self._held = ""
        calls = self._read(text)
        if not calls or any(call.error is not None for call in calls):
            return text, []
        return "", [_entry(call) for call in calls]

    def _release(self, end: int) -> str:
        text = self._held[:end]
        self._held = self._held[end:]
        return text

    def _read(self, text: str) -> list[ToolCall]:
        if not self._tools.chosen:
            return self._form.parse(text) if self._form is not None and self.calls else []
        try:
            value = json.loads(text)
        except ValueError:  # the answer has reached its token limit
            return []
        if not self._tools.several:
            return [ToolCall(self._tools.chosen[0].name, value)] if isinstance(value, dict) else []
        return [ToolCall(call["name"], call["parameters"]) for call in value]


def _entry(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
