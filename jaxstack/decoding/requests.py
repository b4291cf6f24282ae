"""Generation requests to the serving engine, and handles from which their tokens are read."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

import numpy as np

from jaxstack.decoding.sampling import Sampling
from jaxstack.errors import JaxstackError

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""Reason for the end of an answer: a stop token, the token limit, `Handle.cancel`, or a failure of the engine."""


class ConstraintFailed(JaxstackError):
    """Raised when a constraint can no longer tell which tokens are allowed, for example beyond a parser's limits."""


class Constraint(Protocol):
    """Restricts which tokens an answer may contain, for example by a grammar. For the engine's thread only."""

    def fill_mask(self, mask: np.ndarray) -> None:
        """Write the tokens that may come next into a bitmask, int32 [words]: bit i of word w is token 32 w + i."""
        ...

    def accept(self, token: int) -> bool:
        """Advance the constraint by one generated token; return False if the answer is complete.

        Raises:
          ConstraintFailed: the token is not allowed, or a limit is exceeded; the answer ends with an error.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and the settings for generating its answer.

    Attributes:
      prompt: token ids.
      max_tokens: token limit of the answer.
      sampling: temperature and limits.
      seed: the answer depends on it and on the prompt alone.
      stop_tokens: ids that end the answer, and are not part of it.
      constraint: which tokens are allowed; None: all of the vocabulary.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    constraint: Constraint | None = None


@dataclasses.dataclass
class Times:
    """Timestamps of a request's stages in seconds of `time.perf_counter`; None until a stage is reached."""

    submitted: float = dataclasses.field(default_factory=time.perf_counter)
    started: float | None = None
    """When the request got a slot."""
    first_token: float | None = None
    newest_token: float | None = None


class Handle:
    """Handle of a submitted request, from which its tokens are read as they are generated. Thread-safe.

    Args:
      request: the request.
      cancel: called with this handle to end it early.
    """

    def __init__(self, request: Request, cancel: Callable[["Handle"], None]):
        self.request = request
        self.times = Times()
        self.cached_tokens = 0
        """Prompt tokens whose keys and values were found in the prefix cache."""
        self.finish_reason: FinishReason | None = None
        """None until the answer has ended."""
        self.stop_token: int | None = None
        """The stop token that ended the answer, which is not part of it; None if something else did."""
        self.error: JaxstackError | None = None
        """Reason for the finish reason "error"."""
        self._cancel = cancel
        self._tokens = list[int]()
        self._read = 0
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._listener: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[int]:
        """Yield each token of the answer once, waiting until it is generated.

        Raises:
          JaxstackError: the engine or the request's constraint failed.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._read < len(self._tokens) or self.finish_reason is not None)
            tokens, reason = self.take()
            yield from tokens
            if reason is not None:
                if self.error is not None:
                    raise self.error
                return

    def take(self) -> tuple[list[int], FinishReason | None]:
        """Return the tokens generated since the last call and the finish reason, if any, without blocking."""
        with self._changed:
            new = self._tokens[self._read :]
            self._read = len(self._tokens)
            return new, self.finish_reason

    def result(self) -> list[int]:
        """Wait until the answer is complete and return all of its tokens.

        Raises:
          JaxstackError: the engine or the request's constraint failed.
        """
        self._ended.wait()  # wakes once, where an iterator wakes for each token
        if self.error is not None:
            raise self.error
        return list(self._tokens)

    @property
    def count(self) -> int:
        """Number of tokens generated so far."""
        return len(self._tokens)

    def cancel(self) -> None:
        """End the answer early and free its KV-cache pages."""
        self._cancel(self)

    def listen(self, listener: Callable[[], None]) -> None:
        """Register a function that the engine's thread calls whenever the answer gets tokens or ends."""
        self._listener = listener
        listener()

    def push(self, tokens: list[int], reason: FinishReason | None = None, error: JaxstackError | None = None) -> None:
        """Append generated tokens, and end the answer if a finish reason is given. For the engine only."""
        with self._changed:
            if self.finish_reason is not None:
                return
            now = time.perf_counter()
            if tokens:
                self.times.first_token = self.times.first_token or now
                self.times.newest_token = now
            self._tokens += tokens
            self.finish_reason = reason
            self.error = error
            self._changed.notify_all()
        if reason is not None:
            self._ended.set()
        self._listener()
