"""Structured output: constrains answers to a JSON schema, a regular expression, a list of choices or a Lark grammar.

Grammars are compiled by the library llguidance, which the extra `serve` installs.
"""

import json
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np

from jaxstack.data.tokenizer import Tokenizer
from jaxstack.errors import ConfigError

Kind = Literal["json", "regex", "choice", "grammar"]


class Grammars:
    """Compiles JSON schemas, regular expressions and other grammars into token constraints for one tokenizer.

    Args:
      tokenizer: the model's tokenizer, whose ids must stand for fixed bytes.
      stop_tokens: ids that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Collection[int]):
        self._tokenizer = tokenizer
        self._stop_tokens = sorted(stop_tokens)

    def compile(self, kind: Kind, value: object) -> "GrammarConstraint":
        """Compile a grammar and return it as the constraint for one answer.

        Args:
          kind: what `value` is.
          value: a JSON schema (True: any JSON value), a regular expression, a list of texts, or a Lark grammar.

        Raises:
          ConfigError: the grammar is wrong, llguidance is not installed, or the tokenizer does not fit.
        """
        library = _import_llguidance()
        try:
            grammar = _write(library, kind, value)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the {kind} of the structured output is wrong: {error}") from None
        matcher = library.LLMatcher(self._ll_tokenizer, grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().splitlines()[0]
            raise ConfigError(f"the {kind} of the structured output is wrong: {reason}")
        return GrammarConstraint(matcher)

    @cached_property
    def _ll_tokenizer(self) -> Any:
        tokenizer = self._tokenizer
        if not tokenizer.writes_bytes:
            raise ConfigError("structured output needs a tokenizer whose ids stand for fixed bytes (byte-level BPE).")
        return _import_llguidance().LLTokenizer(_TokenTable(tokenizer, self._stop_tokens), eos_token=self._stop_tokens)


class GrammarConstraint:
    """Constraint of one answer to a grammar: parses the answer, and allows only tokens that keep it valid."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    def fill_mask(self, mask: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def accept(self, token: int) -> bool:
        return self._matcher.consume_token(token) and not self._matcher.is_stopped()


class _TokenTable:
    """Adapts a tokenizer to the interface that the library llguidance expects."""

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Sequence[int]):
        self._tokenizer = tokenizer
        self.eos_token_id = stop_tokens[0]
        bytes_of = [tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = [i for i, text in enumerate(bytes_of) if not text]
        # An empty text would be allowed everywhere; llguidance marks special tokens by the byte 0xff.
        self.tokens = [text or b"\xff<%d>" % i for i, text in enumerate(bytes_of)]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text).tolist()


def _write(library: Any, kind: Kind, value: object) -> str:
    """Convert a JSON schema, regular expression, choices or grammar to llguidance's text format."""
    write = library.LLMatcher
    if kind == "json":
        return write.grammar_from_json_schema(json.dumps({} if value is True else value))
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
            raise ValueError("give a list of texts")
        return write.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in value))
    if not isinstance(value, str):
        raise ValueError(f"give a text; found {type(value).__name__}")
    return write.grammar_from_regex(value) if kind == "regex" else write.grammar_from_lark(value)


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError("structured output needs llguidance: pip install 'jaxstack[serve]'.") from None
    return llguidance
