"""Chats that go on after sampled answers: new messages are appended as tokens, and what was sampled stays as it is.

The tokens of a chat with one more turn are those of the chat before, the sampled tokens, and the tokens of the new
messages, which the template writes as a suffix. Nothing that was sampled is tokenized again.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxstack.data.chat_format import ChatError
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.data.tool_calls import EXAMPLE, ToolCall, ToolFormat, derive_format, describe_calls
from jaxstack.errors import ConfigError

if TYPE_CHECKING:  # it needs the optional dependency jinja2
    from jaxstack.data.chat_template import ChatTemplate

_QUESTION = {"role": "user", "content": "question"}
_REASONING = "reasoning 5512"
_WORDS = "words 9034"
_CONTENTS = (f"<think>\n{_REASONING}\n</think>\n\n{_WORDS}", _WORDS)
"""Answers after reasoning, which some templates leave out once a chat goes on, and without it."""
_WAY_OUT = "give another template (data.chat.template)"


class ChatTurns:
    """Reads the tool calls of sampled answers, and writes the messages that follow an answer.

    Args:
      tokenizer: the model's tokenizer.
      template: the chat template; None: texts follow each other without one.
      stop_tokens: ids that end an answer.
      tools: JSON schemas of the tools that the model may call.
      texts: messages of the user follow answers.

    Raises:
      ConfigError: the template has no tools, or writes earlier turns in another way once a chat goes on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: "ChatTemplate | None",
        stop_tokens: Collection[int],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        texts: bool = False,
    ):
        self._tokenizer = tokenizer
        self._tools = tools
        self._written: _WrittenChats | None = None
        self._format: ToolFormat | None = None
        if template is None:
            if tools:
                raise ConfigError("tools need a chat template, which tells the model of them; set data.chat.template.")
            return
        self._written = _WrittenChats(tokenizer, template, stop_tokens, tools)
        try:
            if tools:
                self._format = self._written.tool_format()
                self._written.check([EXAMPLE], EXAMPLE.as_reply(0, "12"))
            if texts:
                self._written.check([], {"role": "user", "content": "and then?"})
        except ChatError as error:
            raise ConfigError(f"{error}; {_WAY_OUT}.") from None

    def parse(self, tokens: Sequence[int]) -> tuple[str, list[ToolCall]]:
        """Return an answer as text with its special tokens, and the tool calls in it."""
        text = self._tokenizer.decode_marked(tokens)
        return text, [] if self._format is None else self._format.parse(text)

    def follow(self, called: Sequence[str], messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the ids of messages after an answer, up to where the next answer begins.

        Special tokens in their texts are left out, so that no text can pass for another turn.

        Args:
          called: names of the tools that the answer calls.
          messages: the messages, with `role` and `content`; those of the role `tool` answer the calls in order.

        Raises:
          ChatError: the template refuses them.
        """
        plain = [{**message, "content": self._without_marks(str(message.get("content", "")))} for message in messages]
        if self._written is None:
            return tuple(map(int, self._tokenizer.encode("".join(message["content"] for message in plain))))
        known = [_name_of(tool) for tool in self._tools]
        calls = [ToolCall(name if name in known else known[0], EXAMPLE.arguments) for name in called]
        end, suffix = self._written.go_on(calls, plain).after
        # Encoded with the end token before it, as some tokenizers encode the beginning of a text in another way.
        ids = self._tokenizer.encode_marked([end + suffix])[0][0]
        return tuple(map(int, ids[1:]))

    def _without_marks(self, text: str) -> str:
        special = [token for token in self._tokenizer.special_tokens if token]
        while found := next((token for token in special if token in text), None):
            text = text.replace(found, "")
        return text


def read_tool_format(
    tokenizer: Tokenizer, template: "ChatTemplate", stop_tokens: Collection[int], tools: Sequence[Mapping[str, Any]]
) -> ToolFormat:
    """Return the format in which a chat template writes tool calls.

    Args:
      tokenizer, template, stop_tokens: as in `ChatTurns`.
      tools: the tools, of which the template has to tell the model.

    Raises:
      ChatError: it writes none, or in a form that is not known, or does not tell the model of the tools.
    """
    return _WrittenChats(tokenizer, template, stop_tokens, tools).tool_format()


class _WrittenChats:
    """Example chats as a template writes them, from which its habits are read.

    Args:
      tokenizer, template, stop_tokens, tools: as in `ChatTurns`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: "ChatTemplate",
        stop_tokens: Collection[int],
        tools: Sequence[Mapping[str, Any]],
    ):
        self._template = template
        self._tools = [{**tool} for tool in tools] or None
        self._stops = {text for text, i in tokenizer.special_tokens.items() if i in stop_tokens}

    def go_on(
        self,
        calls: Sequence[ToolCall],
        replies: Sequence[Mapping[str, Any]],
        contents: Sequence[str] = _CONTENTS,
    ) -> "_Example":
        """Return a question, an answer and the messages after it as text, with the first content that suits.

        Raises:
          ChatError: the template refuses the messages, or begins or ends an answer in another way once they follow it.
        """
        turn: dict[str, Any] = {"role": "assistant", "content": contents[0]}
        if calls:
            turn["tool_calls"] = describe_calls(calls)
        asked = self._template.render([_QUESTION], self._tools, prompt=True)
        full = self._template.render([_QUESTION, turn, *replies], self._tools, prompt=True)
        if not full.startswith(asked):
            if contents[1:]:
                return self.go_on(calls, replies, contents[1:])
            raise ChatError("the chat template begins an answer in another way once the chat goes on")
        rest = full[len(asked) :]
        places = {end: rest.find(end) for end in self._stops if end in rest}
        if not places:
            raise ChatError("the chat template ends an answer before further messages with no token that ends answers")
        end = min(places, key=lambda text: (places[text], -len(text)))
        answer = rest[: places[end]]
        return _Example(turn, full, answer, (end, rest[len(answer) + len(end) :]))

    def tool_format(self) -> ToolFormat:
        """Return the format of the template's tool calls.

        Raises:
          ChatError: it writes none, or in a form that is not known, or does not tell the model of the tools.
        """
        replies = [EXAMPLE.as_reply(number, "12") for number in range(2)]
        contents = ("", *_CONTENTS)
        one = self.go_on([EXAMPLE], replies[:1], contents).answer
        if EXAMPLE.name not in one:
            raise ChatError("the chat template does not write tool calls")
        try:
            two = self.go_on([EXAMPLE] * 2, replies, contents).answer
        except ChatError:
            two = ""
        found = derive_format(one, two if two.count(EXAMPLE.name) == 2 else None)
        if found is None:
            raise ChatError(f"the chat template writes tool calls in a form that is not known, {one!r}")
        described = self._template.render([_QUESTION], self._tools, prompt=True)
        missing = [name for tool in self._tools or () if (name := _name_of(tool)) not in described]
        if missing:
            raise ChatError(f"the chat template does not tell the model of the tool {missing[0]}")
        return found

    def check(self, calls: Sequence[ToolCall], reply: Mapping[str, Any]) -> None:
        """Check that the text of a chat with one more turn begins with the text before, reasoning included.

        Raises:
          ChatError: it does not.
        """
        once = self.go_on(calls, [reply])
        twice = self.go_on(calls, [reply, once.turn, reply])
        kind = "tool calls" if calls else "messages of the user"
        reasons = _REASONING in once.text
        speaks = _WORDS in once.text
        if not twice.text.startswith(once.text) or not (speaks or calls):
            raise ChatError(f"the chat template writes earlier turns in another way once {kind} follow them")
        if speaks and not reasons and _REASONING in once.turn["content"]:
            raise ChatError(f"the chat template leaves the reasoning out of an answer once {kind} follow it")


@dataclasses.dataclass(frozen=True)
class _Example:
    """A chat that goes on after an answer, as a template writes it.

    Attributes:
      turn: the answer's message.
      text: all of it, up to the next answer.
      answer: the answer in it.
      after: the token that ends the answer, and what follows it.
    """

    turn: Mapping[str, Any]
    text: str
    answer: str
    after: tuple[str, str]


def _name_of(tool: Mapping[str, Any]) -> str:
    return str(tool.get("function", tool).get("name"))
