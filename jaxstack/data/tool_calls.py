"""Finds the calls of tools in answers, in the format in which the model's own chat template writes them.

The format is derived from the text that the template makes of an example, so that no table of model families is needed.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

_TEXT = "some words 8213"
_NAME = "some_tool_5081"
_ARGUMENTS = {"text_4402": _TEXT, "count_6190": 7}
"""An example: a name that no template writes itself, and arguments of two types."""
_DECODER = json.JSONDecoder()


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A tool call in an answer.

    Attributes:
      name: name of the tool; "" if it cannot be read.
      arguments: their values by name.
      error: why the call cannot be read; None: it can.
    """

    name: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    error: str | None = None

    def as_message(self, number: int) -> dict[str, Any]:
        """Return an entry of `tool_calls` in a message of the assistant; `number` tells the calls of one apart."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"id": f"call{number:05d}", "type": "function", "function": function}

    def as_reply(self, number: int, text: str) -> dict[str, Any]:
        """Return the message that has the result of the call."""
        return {"role": "tool", "name": self.name, "tool_call_id": f"call{number:05d}", "content": text}


EXAMPLE = ToolCall(_NAME, _ARGUMENTS)
"""The call from whose text `derive_format` learns how a template writes calls."""


class ToolFormat(Protocol):
    """Interface of a format of tool calls."""

    @property
    def openings(self) -> tuple[str, ...]:
        """Texts one of which is before each call in an answer; (): there is none, and the whole answer is a call."""
        ...

    def parse(self, text: str) -> list[ToolCall]:
        """Return the calls in an answer, in order; [] if there are none."""
        ...


def derive_format(one: str, two: str | None) -> ToolFormat | None:
    """Return the format in which a chat template writes tool calls; None if it is none of the known ones.

    Known are JSON objects with a name and arguments, as of Qwen, Llama and Mistral; a name and then arguments in JSON,
    as of DeepSeek and gpt-oss; and a name and then each argument in tags, as of GLM and Qwen3-Coder.

    Args:
      one: answer of the call `EXAMPLE`, as the template writes it.
      two: answer of two such calls; None: the template writes one call only.
    """
    for derive in (_JsonObjects.derive, _JsonArguments.derive, _Tags.derive):
        found = derive(one, two)
        if found is None:
            continue
        if found.parse(one) == [EXAMPLE] and (two is None or found.parse(two) == [EXAMPLE] * 2):
            return found
    return None


@dataclasses.dataclass(frozen=True)
class _JsonObjects:
    """Calls such as `<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>`, also several in a list."""

    opening: str
    """Text before each object in an answer; "": there is none, and the whole answer is one."""
    name: str
    arguments: str
    """Keys of the object."""

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.opening,) if self.opening else ()

    @classmethod
    def derive(cls, one: str, two: str | None) -> "_JsonObjects | None":
        for match in re.finditer(r"\{", one):
            value = _read_json(one, match.start())
            if not isinstance(value, dict) or _NAME not in value.values():
                continue
            keys = {json.dumps(entry, sort_keys=True): key for key, entry in value.items()}
            arguments = keys.get(json.dumps(_ARGUMENTS, sort_keys=True))
            if arguments is None:
                continue
            opening = one[: match.start()]
            between = _between(two).rpartition("{")[0]
            if not between.rstrip().endswith(","):  # otherwise several calls are a list
                opening = _common_end(opening, between) if two else opening
            return cls(opening.strip().removesuffix("[").rstrip(), keys[json.dumps(_NAME)], arguments)
        return None

    def parse(self, text: str) -> list[ToolCall]:
        calls = []
        for start in self._starts(text):
            value = _read_json(text, start)
            entries = value if isinstance(value, list) else [value]
            calls += [self._call(entry) for entry in entries]
        return calls

    def _starts(self, text: str) -> list[int]:
        if self.opening:
            return [match.end() for match in re.finditer(re.escape(self.opening) + r"\s*", text)]
        start = len(text) - len(text.lstrip())
        return [start] if isinstance(_read_json(text, start), dict | list) else []

    def _call(self, entry: Any) -> ToolCall:
        if not isinstance(entry, dict):
            return ToolCall("", error="the call is not a JSON object")
        name = entry.get(self.name)
        arguments = entry.get(self.arguments, {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return ToolCall(
                "", error=f"a call is a JSON object with {self.name}, a text, and {self.arguments}, an object"
            )
        return ToolCall(name, arguments)


@dataclasses.dataclass(frozen=True)
class _JsonArguments:
    """Calls such as `<|call|>add<|sep|>{"x": 1}<|end|>`: a name, and then its arguments in JSON.

    gpt-oss's template writes ` to=functions.add<|channel|>commentary json<|message|>{"x": 1}`, but the model itself
    writes the channel first: `<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"x": 1}`.
    """

    opening: str
    between: str

    @property
    def openings(self) -> tuple[str, ...]:
        words = self.between.split()
        return (self.opening, f"{words[0]} {self.opening}") if len(words) > 1 else (self.opening,)

    @classmethod
    def derive(cls, one: str, two: str | None) -> "_JsonArguments | None":
        before, found, after = one.partition(_NAME)
        start = next((m.start() for m in re.finditer(r"\{", after) if _read_json(after, m.start()) == _ARGUMENTS), None)
        if not found or start is None:
            return None
        between = _between(two)
        opening = (_common_end(before, between) if two else before).strip()
        return cls(opening, after[:start].strip()) if opening and start else None

    def parse(self, text: str) -> list[ToolCall]:
        calls = []
        for part in text.split(self.opening)[1:]:
            name, found, rest = part.partition(self.between)
            if not self.between or not found:
                start = part.find("{")
                name = re.split(r"[\s<]", part[:start].strip())[0]
                rest = part[start:]
            value = _read_json(rest, len(rest) - len(rest.lstrip()))
            if not isinstance(value, dict):
                calls.append(ToolCall("", error="the arguments of a call are a JSON object"))
            else:
                calls.append(ToolCall(name.strip(), value))
        return calls


@dataclasses.dataclass(frozen=True)
class _Tags:
    """Calls such as `<function=add><parameter=x>1</parameter></function>`: a name, and each argument between tags."""

    opening: str
    before_key: str
    before_value: str
    after_value: str
    after_name: str
    """Text after the name of a call without arguments."""

    @property
    def openings(self) -> tuple[str, ...]:
        return (self.opening,)

    @classmethod
    def derive(cls, one: str, two: str | None) -> "_Tags | None":
        (first, text), (second, count) = _ARGUMENTS.items()
        form = "(.*?)".join(map(re.escape, (_NAME, first, str(text), second, str(count))))
        found = re.search(form, one, re.DOTALL)
        if found is None:
            return None
        to_key, to_value, to_next, *_ = found.groups()
        before = one[: found.start()]
        rest = one[found.end() :]
        if two:
            before = _common_end(before, _between(two).rpartition(str(count))[2])
        tag = _common_end(to_key, to_next)
        before_key = tag[tag.rfind("<") :]
        after_value = os.path.commonprefix([to_next, rest]).rpartition(">")[0].strip() + ">"
        opening = before[before.find("<") :].strip()
        if "<" not in tag or "<" not in after_value or "<" not in opening or not to_value.strip():
            return None
        after_name = to_key.removesuffix(before_key).strip()
        return cls(opening, before_key.strip(), to_value.strip(), after_value, after_name)

    def parse(self, text: str) -> list[ToolCall]:
        return [self._call(part) for part in text.split(self.opening)[1:]]

    def _call(self, part: str) -> ToolCall:
        head, *arguments = part.split(self.before_key)
        lines = head.split(self.after_name, 1)[0].split() if self.after_name else head.split()
        values = {}
        for argument in arguments:
            key, found, rest = argument.partition(self.before_value)
            value, ended, _ = rest.partition(self.after_value)
            if not found or not ended:
                return ToolCall(
                    "", error=f"an argument has {self.before_value!r} before its value and then {self.after_value!r}"
                )
            values[key.strip()] = _plain(value.removeprefix("\n").removesuffix("\n"))
        return ToolCall(lines[0], values) if lines else ToolCall("", error="the call has no name")


def _plain(text: str) -> Any:
    """Return what a text means as JSON, or else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _read_json(text: str, start: int) -> Any:
    """Return the JSON value that begins at `start`; None if there is none."""
    try:
        return _DECODER.raw_decode(text, start)[0]
    except (ValueError, RecursionError):
        return None


def _between(two: str | None) -> str:
    """Return the text between the names of two calls."""
    return (two or "").partition(_NAME)[2].partition(_NAME)[0]


def _common_end(first: str, second: str) -> str:
    return os.path.commonprefix([first[::-1], second[::-1]])[::-1]


def describe_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """Return `tool_calls` of a message of the assistant."""
    return [call.as_message(number) for number, call in enumerate(calls)]
