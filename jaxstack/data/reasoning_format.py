"""The form in which a chat template writes a model's reasoning before an answer, derived from its text of an example.

Most models reason between tags, such as `<think>` and `</think>`; gpt-oss writes a message of its own, in the channel
`analysis`, before that of the answer.
"""

import dataclasses
import os
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from jaxstack.data.chat_format import ChatError

if TYPE_CHECKING:  # it needs the optional dependency jinja2
    from jaxstack.data.chat_template import ChatTemplate

_QUESTION = {"role": "user", "content": "question"}
_REASONING = "reasoning 5512"
_WORDS = "words 9034"
_TAG = r"[<\[][^<>\[\]\s]+[>\]]"
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message by which templates know its reasoning: of most models, of vLLM's API, and of gpt-oss."""


@dataclasses.dataclass(frozen=True)
class ReasoningFormat:
    """Texts around the reasoning of an answer, without the white space beside them.

    Attributes:
      opening: before the reasoning.
      closing: after it.
      turn: after `closing`, as the header of the message with the answer; "": the answer is in the same message.
      plain: before the answer itself.
    """

    opening: str
    closing: str
    turn: str = ""
    plain: str = ""

    @property
    def preamble(self) -> str:
        """Text before what an answer says ahead of its calls, a message of gpt-oss in `commentary`; "": it has none."""
        return self.opening.replace("analysis", "commentary") if self.turn and "analysis" in self.opening else ""

    def opens(self, prompt: str) -> bool:
        """Return True if a prompt ends with the opening, so that an answer begins with reasoning."""
        return prompt.rstrip().endswith(self.opening)


def derive_reasoning_format(template: "ChatTemplate", special_tokens: Collection[str]) -> ReasoningFormat | None:
    """Return the form in which a template writes the reasoning of its last answer; None if it knows of none.

    A template that leaves out the reasoning of all answers in a chat, but writes the tags `<think>` or `</think>`
    itself, has the form of these tags.
    """
    try:
        asked = template.render([_QUESTION], prompt=True)
        plain = template.render([_QUESTION, {"role": "assistant", "content": _WORDS}])
        turn = {"role": "assistant", "content": _WORDS, **dict.fromkeys(REASONING_KEYS, _REASONING)}
        text = template.render([_QUESTION, turn])
    except ChatError:
        return None
    before, found, rest = text.partition(_REASONING)
    between = rest.partition(_WORDS)[0].strip()
    if not found or not between:
        return ReasoningFormat("<think>", "</think>") if "think>" in template.source else None
    opening = _added(asked, before) or _last_tag(asked)
    closing = max((token for token in special_tokens if token and between.startswith(token)), key=len, default=between)
    header = between.removeprefix(closing).strip()
    direct = _added(asked, plain.partition(_WORDS)[0])
    if not opening or not header:
        return ReasoningFormat(opening, closing) if opening else None
    if direct and header.endswith(direct):
        return ReasoningFormat(opening, closing, header.removesuffix(direct).strip(), direct)
    return ReasoningFormat(opening, closing, plain=header)


def _added(asked: str, before: str) -> str:
    """Return what a template writes before a text in addition to the prompt that asks for it."""
    return before[len(os.path.commonprefix([asked, before])) :].strip()


def _last_tag(text: str) -> str:
    found = re.search(f"{_TAG}$", text.rstrip())
    return "" if found is None else found[0]
