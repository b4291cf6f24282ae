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
        self._fresh = True
        """True: white space that comes next is dropped."""
        self.answers = False
        """True once all that follows is the answer."""
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
        if not self.reasons and not self.answers:
            self._begin()
        while self.reasons:
            reasoning += self._take_reasoning()
            if self.reasons:
                return reasoning, ""
            self._begin()
        return reasoning, self._take(len(self._held)) if self.answers else ""

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
        openings = [opening for opening in (form.opening, form.plain) if opening]
        found = next((opening for opening in openings if first.startswith(opening)), None)
        if found is None and any(start.startswith(first) for start in (*openings, "" if turns else form.turn)):
            return
        self._held = first.removeprefix(found or "")
        self._fresh = found is not None
        self.reasons = found == form.opening
        self.answers = not self.reasons

    def _take_reasoning(self) -> str:
        place = self._held.find(self._form.closing)
        end = place if place >= 0 else len(self._held) - overlap(self._held, self._form.closing)
        piece = self._take(len(self._held[:end].rstrip()))
        if place >= 0:
            self._held = self._held.lstrip().removeprefix(self._form.closing)
            self.reasons = False
        return piece

    def _take(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return text
