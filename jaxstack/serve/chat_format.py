"""The form of a model's chats: messages as the token ids of a prompt, and reasoning apart from the answer.

The answer of a model that reasons first may be constrained; its reasoning is not.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxstack.data.chat_turns import read_tool_format
from jaxstack.data.config import ChatConfig
from jaxstack.data.reasoning_format import REASONING_KEYS, ReasoningFormat, derive_reasoning_format
from jaxstack.data.streams import import_chat
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.data.tool_calls import ToolFormat
from jaxstack.decoding.requests import Constraint
from jaxstack.decoding.text_stream import check_chat_text, overlap
from jaxstack.errors import ConfigError, JaxstackError
from jaxstack.serve.tools import Tools

_END = "\ue000\ue001\ue000 "
"""Characters without a meaning that mark the end of a text in a chat; a template that strips texts takes the space."""


class ReasoningReader:
    """Splits generated text into reasoning and answer, and drops the markers and the white space between them.

    Args:
      form: markers of the beginning and the end of reasoning.
      begun: the prompt ends with the opening, so that the text begins with reasoning.
    """

    def __init__(self, form: ReasoningFormat, *, begun: bool = False):
        self._form = form
        self._held = ""
        self._goes_on = False
        """True if another message follows the one that is being read."""
        self._fresh = True
        """True while white space is dropped, at the beginning of a message."""
        self.answers = False
        """True while the text is the answer."""
        self.reasons = begun
        """True while the text is reasoning."""

    @property
    def marks(self) -> str:
        """The markers joined to one text, which may contain special tokens."""
        return "".join((self._form.opening, self._form.closing, self._form.turn, self._form.plain))

    def push(self, text: str) -> tuple[str, str]:
        """Add generated text; return the reasoning and the answer in it, without text that may be part of a marker."""
        self._held += text
        reasoning = ""
        answer = ""
        while True:
            if not self.reasons and not self.answers:
                self._begin()
            if self.reasons:
                reasoning += self._take_message()
            elif self.answers and self._goes_on:
                answer += self._take_message()
            else:
                return reasoning, answer + (self._take(len(self._held)) if self.answers else "")
            if self.reasons or self.answers:
                return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """Return the rest of the reasoning, and that of the answer, at the end of the text."""
        rest = self._take(len(self._held))
        return (rest.rstrip(), "") if self.reasons else ("", rest)

    def _begin(self) -> None:
        """Decide whether reasoning or the answer follows, once the text that was held back shows which."""
        form = self._form
        text = self._held.lstrip()
        turns = bool(form.turn) and text.startswith(form.turn)
        first = text.removeprefix(form.turn).lstrip() if turns else text
        openings = [opening for opening in (form.opening, form.plain, form.preamble) if opening]
        found = next((opening for opening in openings if first.startswith(opening)), None)
        if found is None and any(start.startswith(first) for start in (*openings, "" if turns else form.turn)):
            return
        self._held = first.removeprefix(found or "")
        self._fresh = found is not None
        self.reasons = found == form.opening
        self.answers = not self.reasons
        self._goes_on = bool(found) and found == form.preamble

    def _take_message(self) -> str:
        """Return the text of the current message, without text that may be part of its end marker; note its end."""
        place = self._held.find(self._form.closing)
        end = place if place >= 0 else len(self._held) - overlap(self._held, self._form.closing)
        piece = self._take(len(self._held[:end].rstrip()))
        if place >= 0:
            self._held = self._held.lstrip().removeprefix(self._form.closing)
            self.reasons = False
            self.answers = False
        return piece

    def _take(self, end: int) -> str:
        text = self._held[:end]
        self._held = self._held[end:]
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return text


class AfterReasoning:
    """Constraint of a text that may begin with reasoning: the answer after it obeys another constraint.

    During the reasoning all tokens are allowed except stop tokens. The text that the template writes between the
    reasoning and the answer, such as the header of gpt-oss's channel `final`, is enforced token by token. The model may
    leave out the reasoning, unless the prompt opens it.

    Args:
      answer: constraint of the answer.
      form: markers of the beginning and the end of reasoning.
      tokenizer: the model's tokenizer.
      stop_tokens: ids that end the text; they are forbidden before the answer.
      begun: True if the prompt ends with the opening marker, so that the text begins with reasoning.
    """

    def __init__(
        self,
        answer: Constraint,
        form: ReasoningFormat,
        tokenizer: Tokenizer,
        stop_tokens: Collection[int],
        *,
        begun: bool = False,
    ):
        self._answer = answer
        self._closing = form.closing
        self._tokenizer = tokenizer
        self._stop_tokens = list(stop_tokens)
        self._opening = self._encode(form.opening)
        self._plain = self._encode(form.plain)
        self._header = self._encode(form.turn) + self._plain
        self._reasons = begun
        self._newest: list[int] = []
        """The newest tokens of the reasoning, as many as the closing marker can have."""
        self._written: list[int] = []
        """Tokens of the marker that is being written."""
        paths = [self._opening, self._plain] if self._plain else [self._opening][: len(self._opening) == 1]
        self._paths = [] if begun else paths
        """Token ids of the markers that may be written here, each beginning with `_written`; [] when none may be."""

    def fill_mask(self, mask: np.ndarray) -> None:
        if self._reasons:
            mask[:] = -1
            for token in self._stop_tokens:
                mask.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
            return
        if not self._paths or not self._plain:
            self._answer.fill_mask(mask)
        else:
            mask[:] = 0
        for path in self._paths:
            token = path[len(self._written)]
            mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token: int) -> bool:
        if self._reasons:
            return self._accept_reasoning(token)
        place = len(self._written)
        self._written.append(token)
        self._paths = [path for path in self._paths if path[place] == token]
        if not self._paths:
            return self._answer.accept(token)
        ended = next((path for path in self._paths if path == self._written), None)
        if ended is not None:
            self._reasons = ended == self._opening
            self._paths = []
        return True

    def _accept_reasoning(self, token: int) -> bool:
        self._newest = [*self._newest[-len(self._closing.encode()) :], token]
        _, found, rest = self._tokenizer.decode_marked(self._newest).rpartition(self._closing)
        if not found:
            return True
        self._reasons = False
        self._written = []
        self._paths = [self._header] if self._header else []
        if self._paths:
            return True
        # A token may end the reasoning and begin the answer, where the closing is no token by itself.
        return all(self._answer.accept(one) for one in self._encode(rest.lstrip()))

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_marked([text])[0][0].tolist() if text else []


_OPENING_TOKENS = 64
"""Number of tokens at the end of a prompt that have the text before an answer's reasoning, if it is there."""


class ChatFormatter:
    """Encodes chats as token ids of a prompt, using a chat template.

    Args:
      tokenizer: the model's tokenizer.
      template: as in `ChatConfig.template`: auto, the name of a template, or a file.

    Attributes:
      stop_tokens: ids that end an answer in this template.
      stop: texts that end an answer in this template, if they are not single tokens.
      reasoning: the form of reasoning in this template; None: it has none.

    Raises:
      ConfigError: there is no such template, or jinja2 is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, template: str = "auto"):
        self._tokenizer = tokenizer
        try:
            chosen = import_chat().open_chats(ChatConfig(template=template), tokenizer).template
        except ConfigError as error:
            raise ConfigError(str(error).replace("data.chat.template", "server.chat_template")) from None
        if chosen is None:
            raise ConfigError("server.chat_template must be auto, the name of a template, or a file; found none.")
        self._template = chosen
        end = chosen.find_answer_end(tokenizer.special_tokens)
        special = tokenizer.special_tokens.get(end)
        self.stop_tokens = frozenset() if special is None else frozenset({special})
        self.stop = (end,) if end and special is None else ()
        self.reasoning = derive_reasoning_format(chosen, tokenizer.special_tokens)

    def tool_format(self, tools: Tools, ends: Collection[int]) -> ToolFormat:
        """Return the format in which the template writes tool calls; an answer ends with one of the ids `ends`.

        Raises:
          ConfigError: the template does not tell the model of tools, or has another form of calls than the known ones.
        """
        try:
            return read_tool_format(self._tokenizer, self._template, {*ends, *self.stop_tokens}, tools.described)
        except JaxstackError as error:
            way_out = "leave out tools, or start the server with another server.chat_template"
            raise ConfigError(f"{str(error).rstrip('.')}; {way_out}.") from None

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        begins: bool = True,
        continues: bool = False,
    ) -> list[int]:
        """Return the token ids of a chat, up to where the next answer begins.

        Args:
          messages: the chat; the reasoning of an answer, `reasoning_content`, is there for templates that read it.
          tools: tools of the chat.
          variables: further variables of the template, such as `enable_thinking`.
          begins: append the header of the next answer.
          continues: leave out what the template writes after the text of the last message, which the answer continues.

        Raises:
          JaxstackError: the template refuses the chat, or changes the text that is continued; or a text in it contains
            a special token, with which it could pass for another turn.
        """
        for place, message in enumerate(messages):
            for name, value in message.items():
                if name != "content" or message["role"] != "assistant":
                    check_chat_text(self._tokenizer, f"messages.{place}.{name}", str(value), self.stop)
        described = None if tools is None else list(tools.described)
        for name, value in (("tools", described), ("chat_template_kwargs", variables)):
            check_chat_text(self._tokenizer, name, json.dumps(value, ensure_ascii=False), self.stop)
        turns = [*map(_with_reasoning, messages)]
        if continues:
            turns[-1] = {**turns[-1], "content": turns[-1]["content"] + _END}
        text = self._template.render(turns, described, prompt=begins, variables=variables)
        if continues:
            text, mark, rest = text.rpartition(_END.strip())
            if not mark:
                raise ConfigError("the last message cannot be continued: the chat template leaves its text out.")
            text = text if rest.startswith(" ") else text.rstrip()  # the template strips texts
        return self._tokenizer.encode_marked([text])[0][0].tolist()

    def reader(self, prompt: Sequence[int]) -> ReasoningReader | None:
        """Return a reader that separates the reasoning of an answer from the answer; None without reasoning."""
        if self.reasoning is None:
            return None
        return ReasoningReader(self.reasoning, begun=self._opens(self.reasoning, prompt))

    def constrain(self, answer: Constraint, prompt: Sequence[int], stop_tokens: Collection[int]) -> Constraint:
        """Return a constraint that leaves the reasoning unconstrained, and applies another one to the answer after it.

        Args:
          answer: the constraint of the answer.
          prompt: token ids of the prompt, which may end with the beginning of the reasoning.
          stop_tokens: ids that end an answer.
        """
        if self.reasoning is None:
            return answer
        begun = self._opens(self.reasoning, prompt)
        return AfterReasoning(answer, self.reasoning, self._tokenizer, stop_tokens, begun=begun)

    def _opens(self, form: ReasoningFormat, prompt: Sequence[int]) -> bool:
        return form.opens(self._tokenizer.decode_marked(prompt[-_OPENING_TOKENS:]))


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its reasoning under each of the keys that templates read it from."""
    reasoning = message.get("reasoning_content")
    return {**message, **dict.fromkeys(REASONING_KEYS, reasoning)} if reasoning else message
