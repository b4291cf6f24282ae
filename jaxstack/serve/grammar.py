"""Structured output: constrains answers to a JSON schema, a regular expression, choices, or a Lark grammar.

Grammars are compiled by the library llguidance, which the extra `serve` installs.
"""

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxstack.data.tokenizer import Tokenizer
from jaxstack.decoding.requests import ConstraintFailed
from jaxstack.errors import ConfigError

Kind = Literal["json", "regex", "choice", "grammar"]

if TYPE_CHECKING:
    from jaxstack.serve.grammar_process import GrammarProcess

_MOST_CACHED = 64
"""Number of compiled grammars that are kept for later requests."""


class Grammars:
    """Compiles JSON schemas, regular expressions and other grammars into token constraints for one tokenizer.

    Compiled grammars are kept, so that requests with the same grammar compile it once. Thread-safe.

    Args:
      tokenizer: the model's tokenizer, each of whose ids must decode to fixed bytes.
      stop_tokens: ids that end an answer.
      seconds: time limit for compiling a grammar.
    """

    def __init__(self, tokenizer: Tokenizer, stop_tokens: Collection[int], seconds: float = 10.0):
        self._tokenizer = tokenizer
        self._seconds = seconds
        self._stop_tokens = sorted(stop_tokens)
        self._compiled = OrderedDict[tuple[Kind, str], Future[Any]]()
        self._lock = threading.Lock()

    def find(self, kind: Kind, value: object) -> "GrammarConstraint | None":
        """Return a grammar as the constraint for one answer if it is compiled already; arguments as in `compile`."""
        with self._lock:
            known = self._compiled.get((kind, json.dumps(value)))
            if known is None or not known.done():
                return None
        return self._constraint(known)

    def compile(self, kind: Kind, value: object) -> "GrammarConstraint":
        """Compile a grammar, unless it is known, and return it as the constraint for one answer.

        Args:
          kind: what `value` is.
          value: a JSON schema (True: any JSON value), a regular expression, a list of texts, or a Lark grammar.

        Raises:
          ConfigError: the grammar is wrong or takes too long to compile, llguidance is not installed, or the tokenizer
            does not fit.
        """
        key = (kind, json.dumps(value))
        with self._lock:
            known = self._compiled.get(key)
            future = self._compiled[key] = known or Future[Any]()
            self._compiled.move_to_end(key)
            if len(self._compiled) > _MOST_CACHED:
                self._compiled.popitem(last=False)
        if known is None:
            try:
                future.set_result(self._compile(kind, value))
            except BaseException as error:
                future.set_exception(error)
        return self._constraint(future)

    def _constraint(self, compiled: Future[Any]) -> "GrammarConstraint":
        matcher = compiled.result()
        with self._lock:
            return GrammarConstraint(matcher.deep_copy())

    def _compile(self, kind: Kind, value: object) -> Any:
        """Return llguidance's matcher at the start of an answer."""
        _import_llguidance()
        from jaxstack.serve.grammar_process import compile_grammar

        try:
            self._process.check(kind, value)
            matcher = compile_grammar(kind, value, self._ll_tokenizer)
            # What is computed here is kept for all copies: for counted repetitions it can take half a second, for which
            # the engine would hold up all answers.
            matcher.compute_bitmask()
            if matcher.is_error():
                raise ValueError(matcher.get_error())
        except (ValueError, TypeError) as error:
            raise ConfigError(f"the {kind} of the structured output is wrong: {_reason(str(error))}") from None
        return matcher

    @cached_property
    def _process(self) -> "GrammarProcess":
        from jaxstack.serve.grammar_process import GrammarProcess

        return GrammarProcess(self._seconds)

    @cached_property
    def _ll_tokenizer(self) -> Any:
        tokenizer = self._tokenizer
        if not tokenizer.writes_bytes:
            raise ConfigError("structured output needs a tokenizer whose ids stand for fixed bytes (byte-level BPE).")
        return _import_llguidance().LLTokenizer(_TokenTable(tokenizer, self._stop_tokens), eos_token=self._stop_tokens)


_FREE_SECONDS = 1.0
_SECONDS_PER_TOKEN = 0.005
"""Limit on the time of the processor for the constraint of an answer: so much at once, and so much for each token. The
engine computes for no other answer in this time."""


class GrammarConstraint:
    """Constraint of one answer to a grammar: parses the answer, and allows only tokens that keep it valid."""

    def __init__(self, matcher: Any):
        self._matcher = matcher
        self._seconds = 0.0
        self._tokens = 0

    def fill_mask(self, mask: np.ndarray) -> None:
        start = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._seconds += time.thread_time() - start

    def accept(self, token: int) -> bool:
        # llguidance does not raise: beyond its limits it enters an error state, in which it also counts as stopped.
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            raise ConstraintFailed(
                f"the answer cannot be constrained further ({_reason(self._matcher.get_error())}); simplify the schema "
                "or grammar."
            )
        self._tokens += 1
        if self._seconds > _FREE_SECONDS + _SECONDS_PER_TOKEN * self._tokens:
            raise ConstraintFailed(
                f"the answer's constraint took {self._seconds:.1f} s for {self._tokens} tokens, and holds up other "
                "answers; simplify the schema or grammar, such as large counted repetitions."
            )
        return not self._matcher.is_stopped()


def _reason(message: str) -> str:
    """Return llguidance's error message as one line: what is wrong, without the excerpt of the grammar."""
    first, *others = message.splitlines() or ["unknown reason"]
    if first == "NoExtensionBias":  # an error of its parser of regular expressions
        return "it refers only to itself, so that no text matches; give it a part that does not."
    details = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    return ": ".join([first[:500].rstrip(": "), *details])


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


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise ConfigError("structured output needs llguidance: pip install 'jaxstack[serve]'.") from None
    return llguidance
