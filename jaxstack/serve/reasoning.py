"""Answers of models that reason first: separates the reasoning from the answer, and constrains the answer only."""

from collections.abc import Collection

import numpy as np

from jaxstack.data.reasoning_format import ReasoningFormat
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.requests import Constraint
from jaxstack.decoding.text_stream import overlap


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
        text, self._held = self._held[:end], self._held[end:]
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
