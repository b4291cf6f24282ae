"""Chats as text, by Jinja templates such as models are published with, rendered in Jinja's sandbox.

A template sees the messages and the names that `transformers` gives it; it reaches no file, no module and no clock, so
that a chat gives the same text on every day.
"""

import datetime
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from jaxstack.data.chat_format import ChatFormat, read_template_file
from jaxstack.errors import ConfigError, JaxstackError

FOLDER = Path(__file__).parent / "templates"
Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
"""Characters of a text: first, and one behind the last."""


class ChatError(JaxstackError):
    """A chat that a template refuses or cannot be split by."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` around what the model writes: puts the environment's marks there."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        first, last = self.environment.globals["generation_marks"]
        return f"{first}{caller()}{last}"


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class ChatTemplate:
    """A template, compiled.

    Args:
      source: its text.
      tokens: what `bos_token`, `eos_token`, ... stand for in it.
      date: what it takes for today.

    Raises:
      ConfigError: it is no Jinja template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], date: datetime.date):
        self.source, self.tokens = source, dict(tokens)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        nonce = secrets.token_hex(8)  # no chat can hold the marks
        self._marks = f"\x00{nonce}(", f"\x00{nonce})"
        environment.filters["tojson"] = _to_json
        noon = datetime.datetime.combine(date, datetime.time(12))
        environment.globals.update(
            raise_exception=_raise, strftime_now=noon.strftime, generation_marks=self._marks, **self.tokens
        )
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}.") from None

    @property
    def written_tokens(self) -> list[str]:
        """What looks like special tokens in a chat as this template writes it."""
        try:
            text = self.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        except ChatError:
            return []
        return sorted(set(re.findall(r"<\|?\w+\|?>", text)))

    def render(self, messages: Messages, tools: Any = None, *, prompt: bool = False) -> str:
        """The text of a chat; with `prompt` up to where the model's next answer begins.

        Raises:
          ChatError: the template refuses the chat, or fails on it.
        """
        text = self._render(messages, tools, prompt)
        for mark in self._marks:
            text = text.replace(mark, "")
        return text

    def split(self, messages: Messages, tools: Any = None, *, last: bool = False) -> tuple[str, list[Span]]:
        """The text of a chat, and where the answers of the assistant stand in it (with `last`: the last one alone).

        An answer is what the template marks as generated; without marks, what the text of the chat up to this answer
        has behind the text that asks for it, with everything that the template adds to an answer's end.

        Raises:
          ChatError: as `render`, or the text does not grow turn by turn, so that answers cannot be told from the rest.
        """
        text = self._render(messages, tools, False)
        if self._marks[0] in text:
            text, spans = self._cut_out(text)
        else:
            turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
            spans = [self._turn(messages, tools, text, turn) for turn in (turns[-1:] if last else turns)]
        return text, spans[-1:] if last else spans

    def _turn(self, messages: Messages, tools: Any, text: str, turn: int) -> Span:
        asked = self.render(messages[:turn], tools, prompt=True)
        answered = self.render(messages[: turn + 1], tools)
        if not text.startswith(answered) or not answered.startswith(asked):
            raise ChatError(
                f"the chat template writes message {turn + 1}, an answer, in another way where the chat goes on or "
                "begins there, so that the answer's tokens cannot be told; learn the last answer of each chat only "
                "(data.chat.answers=last), or give a template that has {% generation %} marks (data.chat.template)"
            )
        return len(asked), len(answered)

    def _cut_out(self, text: str) -> tuple[str, list[Span]]:
        parts, spans, length = [], [], 0
        first, last = self._marks
        before, *marked = text.split(first)
        for part in (before, *marked):
            answer, _, rest = part.rpartition(last) if parts else ("", "", part)
            if parts:
                spans.append((length, length + len(answer)))
            parts += [answer, rest]
            length += len(answer) + len(rest)
        return "".join(parts), spans

    def _render(self, messages: Messages, tools: Any, prompt: bool) -> str:
        try:
            chat = [dict(message) for message in messages]
            return self._template.render(messages=chat, tools=tools, documents=None, add_generation_prompt=prompt)
        except Exception as error:  # a template is a program
            reason = str(error).rstrip(".") or type(error).__name__
            raise ChatError(f"the chat template cannot write this chat: {reason}") from None


def template_names() -> list[str]:
    """The templates that come with jaxstack."""
    return sorted(path.stem for path in FOLDER.glob("*.jinja"))


def choose_template(wanted: str, own: ChatFormat | None, date: datetime.date) -> ChatTemplate:
    """The template of a name: auto (the tokenizer's own), one of `template_names`, or a file.

    Raises:
      ConfigError: there is none.
    """
    own = own or ChatFormat()
    named = ", ".join(template_names())
    if wanted == "auto":
        if own.template is None:
            raise ConfigError(
                f"the tokenizer has no chat template; set data.chat.template to one of {named}, or to a file."
            )
        return ChatTemplate(own.template, own.tokens, date)
    path = FOLDER / f"{wanted}.jinja" if wanted in template_names() else Path(wanted).expanduser()
    if not path.is_file():
        raise ConfigError(f"data.chat.template: {wanted!r} is no file, and none of auto, none, {named}.")
    return ChatTemplate(read_template_file(path), own.tokens, date)
