"""Structured output of a model that reasons first: the reasoning is free, and the answer after it is constrained."""

from collections.abc import Collection

import numpy as np

from jaxstack.data.reasoning_format import ReasoningFormat
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.requests import Constraint


class AfterReasoning:
    """Constraint of a text that may begin with reasoning, after which another constraint begins.

    What a template writes between the reasoning and the answer, such as the header of gpt-oss's channel `final`, has to
    come as it writes it. Reasoning may also be left out, unless the prompt opens it.

    Args:
      answer: constraint of the answer.
      form: texts around the reasoning.
      tokenizer: the model's tokenizer.
      stop_tokens: ids that end the text, which none does before the answer.
      begun: the prompt ends with the opening, so that the text begins with reasoning.
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
        """Tokens of the reasoning, as many as its end can have."""
        self._written: list[int] = []
        """Tokens before the reasoning or the answer."""
        paths = [self._opening, self._plain] if self._plain else [self._opening][: len(self._opening) == 1]
        self._paths = [] if begun else paths
        """Ways in which the text may go on before the reasoning or the answer; []: one of them has begun."""

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
