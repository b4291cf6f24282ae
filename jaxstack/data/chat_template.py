"""Turns chats into text with Jinja chat templates, like those published with models, rendered in Jinja's sandbox.

A template sees the messages and the same names as in `transformers`. It has no access to files, modules or the clock,
so that a chat gives the same text on every day.
"""

import datetime
import json
import os
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jaxstack.data.chat_format import ChatError, ChatFormat, read_template_file
from jaxstack.errors import ConfigError

FOLDER = Path(__file__).parent / "templates"
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None
Span = tuple[int, int]
"""Characters of a text: first, and last (exclusive)."""


class _Generation(jinja2.ext.Extension):
    """Jinja extension for `{% generation %}` blocks: marks where the model's answers begin and end in the text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        first, last = self.environment.globals["generation_marks"]
        return f"{first}{caller()}{last}"


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class ChatTemplate:
    """A compiled Jinja chat template, which turns a list of messages into text.

    Args:
      source: the text of the template.
      tokens: the texts of `bos_token`, `eos_token`, ... in it.
      date: the date of "today" for templates that write it.
      named: further templates by name; `tool_use` writes chats with tools in place of `source`.

    Raises:
      ConfigError: `source`, or the template of chats with tools, is not a Jinja template.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str], date: datetime.date, named: Mapping[str, str] | None = None
    ):
        self.source = source
        self.tokens = dict(tokens)
        self.named = dict(named or {})
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        nonce = secrets.token_hex(8)  # so that no chat can contain the marks
        self._marks = f"\x00{nonce}(", f"\x00{nonce})"
        environment.filters["tojson"] = _to_json
        noon = datetime.datetime.combine(date, datetime.time(12))
        environment.globals.update(
            raise_exception=_raise, strftime_now=noon.strftime, generation_marks=self._marks, **self.tokens
        )
        try:
            self._template = environment.from_string(source)
            self._tool_template = environment.from_string(self.named.get("tool_use", source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}.") from None

    @property
    def written_tokens(self) -> list[str]:
        """Likely special tokens: words such as `<|im_end|>` that the template writes for an example chat."""
        try:
            text = self.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        except ChatError:
            return []
        return sorted(set(re.findall(r"<\|?\w+\|?>", text)))

    def render(
        self,
        messages: Messages,
        tools: Tools = None,
        *,
        prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a chat as text.

        Args:
          messages, tools: the chat.
          prompt: append the header of the model's next answer (`add_generation_prompt`).
          variables: further variables of the template, such as `enable_thinking`.

        Raises:
          ChatError: the template refuses the chat, or fails.
        """
        text = self._render(messages, tools, prompt, variables)
        for mark in self._marks:
            text = text.replace(mark, "")
        return text

    def split(self, messages: Messages, tools: Tools = None, *, last: bool = False) -> tuple[str, list[Span]]:
        """Return the text of a chat and the spans of the assistant's answers in it.

        An answer is what the template marks as generated. Without marks it is the difference between the text of the
        chat up to this answer and the text that asks for it, including all that the template adds after the answer.

        Args:
          messages: the chat.
          tools: tools of the chat, for templates that describe them.
          last: return the span of the last answer only.

        Raises:
          ChatError: as `render`, or the text does not grow turn by turn, so that answers cannot be located.
        """
        text = self._render(messages, tools, False)
        if self._marks[0] in text:
            text, spans = self._cut_out(text)
        else:
            turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
            spans = [self._turn(messages, tools, text, turn) for turn in (turns[-1:] if last else turns)]
        return text, spans[-1:] if last else spans

    def _turn(self, messages: Messages, tools: Tools, text: str, turn: int) -> Span:
        asked = self.render(messages[:turn], tools, prompt=True)
        answered = self.render(messages[: turn + 1], tools)
        if not answered.startswith(asked):
            extra = asked[len(os.path.commonprefix([asked, answered])) :]
            raise ChatError(
                f"the chat template asks for message {turn + 1}, an answer, with {extra!r}, which it does not write "
                "before that answer, so that the answer's tokens cannot be told; give a template that writes both "
                "alike, or has {% generation %} marks (data.chat.template)"
            )
        if not text.startswith(answered):
            raise ChatError(
                f"the chat template writes message {turn + 1}, an answer, in another way where the chat goes on, so "
                "that the answer's tokens cannot be told; learn the last answer of each chat only "
                "(data.chat.answers=last), or give a template that has {% generation %} marks (data.chat.template)"
            )
        return len(asked), len(answered)

    def find_answer_end(self, special_tokens: Collection[str]) -> str:
        """Return the text that ends an answer: a special token, or all that the template writes after the answer.

        It is what follows the answer in the text of an example chat, "" if nothing does.

        Raises:
          ChatError: the template refuses the example.
        """
        answer = secrets.token_hex(8)  # a text that the template cannot write itself
        chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
        after = self.render(chat).rpartition(answer)[2].strip()
        return leading_token(after, special_tokens) or after

    def _cut_out(self, text: str) -> tuple[str, list[Span]]:
        parts = []
        spans = []
        length = 0
        first, last = self._marks
        before, *marked = text.split(first)
        for part in (before, *marked):
            answer, _, rest = part.rpartition(last) if parts else ("", "", part)
            if parts:
                spans.append((length, length + len(answer)))
            parts += [answer, rest]
            length += len(answer) + len(rest)
        return "".join(parts), spans

    def _render(
        self, messages: Messages, tools: Tools, prompt: bool, variables: Mapping[str, Any] | None = None
    ) -> str:
        try:
            chat = [dict(message) for message in messages]
            template = self._tool_template if tools else self._template
            known = {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": prompt}
            return template.render(**{**(variables or {}), **known})
        except Exception as error:  # a template is a program, which can raise anything
            reason = str(error).rstrip(".") or type(error).__name__
            raise ChatError(f"the chat template cannot write this chat: {reason}") from None


def leading_token(text: str, special_tokens: Collection[str]) -> str:
    """Return the longest special token with which a text begins; "" if it begins with none."""
    return max((token for token in special_tokens if token and text.startswith(token)), key=len, default="")


def template_names() -> list[str]:
    """Return the names of the chat templates that come with jaxstack."""
    return sorted(path.stem for path in FOLDER.glob("*.jinja"))


def choose_template(wanted: str, own: ChatFormat | None, date: datetime.date) -> ChatTemplate:
    """Return the chat template that a setting names: `auto` (the tokenizer's), one of its names, a built-in, or a file.

    Raises:
      ConfigError: it does not exist.
    """
    own = own or ChatFormat()
    named = ", ".join(template_names())
    if wanted == "auto":
        if own.template is None:
            raise ConfigError(
                f"the tokenizer has no chat template; set data.chat.template to one of {named}, or to a file."
            )
        return ChatTemplate(own.template, own.tokens, date, own.named)
    if wanted in own.named:
        return ChatTemplate(own.named[wanted], own.tokens, date)
    path = FOLDER / f"{wanted}.jinja" if wanted in template_names() else Path(wanted).expanduser()
    if not path.is_file():
        named = ", ".join([*own.named, *template_names()])
        raise ConfigError(f"data.chat.template: {wanted!r} is not a file, nor one of auto, none, {named}.")
    return ChatTemplate(read_template_file(path), own.tokens, date)
