"""Tells the reasoning of an answer from the answer itself, while they are generated."""

from jaxstack.data.reasoning_format import ReasoningFormat
from jaxstack.decoding.text_stream import overlap


class ReasoningReader:
    """Splits generated text into reasoning and answer, without the texts around them and the white space there.

    Args:
      form: texts around the reasoning.
      begun: the prompt ends with the opening, so that the text begins with reasoning.
    """

    def __init__(self, form: ReasoningFormat, *, begun: bool = False):
        self._form = form
        self._held = ""
        self._goes_on = False
        """True: the answer is a message after which another one follows."""
        self._fresh = True
        """True: white space that comes next is dropped."""
        self.answers = False
        """True while the text is the answer."""
        self.reasons = begun
        """True while the text is reasoning."""

    @property
    def marks(self) -> str:
        """Texts around the reasoning, in which special tokens may be."""
        return "".join((self._form.opening, self._form.closing, self._form.turn, self._form.plain))

    def push(self, text: str) -> tuple[str, str]:
        """Add generated text; return what is certainly reasoning, and what is certainly the answer."""
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
        """Decide by the beginning of what is held whether reasoning follows or the answer, if it tells already."""
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
        """Return what is certainly part of the message that has begun, and note where it ends."""
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
