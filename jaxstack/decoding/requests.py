"""A request to the engine: its prompt and settings, its answer, and how far the engine has come with it."""

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal, Protocol

import numpy as np
from jaxtyping import Array, Float, Int

from jaxstack.decoding.adapter_places import PlacedAdapter
from jaxstack.decoding.ngram_draft import Foreseen, NGramDrafter
from jaxstack.decoding.pages import ROOT
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.scores import TokenScore, unpack_scores
from jaxstack.errors import JaxstackError

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""Reason for the end of an answer: a stop token, the token limit, `Request.cancel`, or a failure of the engine."""


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


@dataclasses.dataclass
class Times:
    """Timestamps of a request's stages in seconds of `time.perf_counter`; None until a stage is reached."""

    submitted: float = dataclasses.field(default_factory=time.perf_counter)
    started: float | None = None
    """When the request got a slot."""
    first_token: float | None = None
    newest_token: float | None = None


class Request:
    """A prompt, the settings of its answer, and the answer, which is read while it is generated.

    Reading, `cancel` and `listen` are thread-safe. What is listed under "progress" is for the engine's thread alone.

    Args:
      prompt: token ids.
      max_tokens: token limit of the answer.
      sampling: temperature and limits.
      seed: the answer depends on it and on the prompt alone; with drafts by multi-token prediction, which know less
        after a cached prefix, its distribution does.
      stop_tokens: ids that end the answer, and are not part of it.
      constraint: which tokens are allowed; None: all of the vocabulary.
      cancel: called with this request to end it early.
      answer: tokens of the answer that are known, after which it goes on.
      priority: requests with a lower number start first, and are preempted last.

    Attributes:
      adapter: the adapter that its tokens are computed with, which the engine sets; None: none.
      root: digest of the empty prefix, which the engine sets: requests with the same share the pages of equal tokens.
      times: when it reached its stages.
      cached_tokens: prompt tokens whose keys and values were found in the prefix cache.
      finish_reason: None until the answer has ended.
      stop_token: the stop token that ended the answer, which is not part of it; None if something else did.
      error: reason for the finish reason "error".
      log_probabilities: of each generated token of the answer, and of the stop token, if the engine has
        `ScoredPrograms`. To be read once the answer is complete.
      pools: sum up the hidden states of the prompt, all of whose tokens are then computed, cached or not.
      pooled: that sum [D], float32, and the last of the hidden states; complete as soon as the answer has a token.
      scores: of each generated token that was taken and, at the end, of the stop token, if `sampling.logprobs` is set.
      prompt_scores: of each token of the prompt but the first, if `sampling.prompt_logprobs` is set; complete as soon
        as the answer has a token.
      experts: those that each token of prompt and answer was sent to, if the engine has `ExpertPrograms`. Rows after
        the last token whose keys and values were computed have no meaning.

    Progress:
      tokens: the prompt and the answer as far as the host has read it.
      number: its place in the order of arrival.
      target: number of tokens to compute before the next is sampled: those of the prompt, or of all after preemption.
      filled: tokens whose keys and values are in the pages after all dispatched steps.
      exact: those of them that all caches have, and exactly: states lack accepted drafts until the next step, and the
        pages of a draft model may have approximations.
      drafted: tokens from the first on that the cache of a draft model has, see `DraftLag`.
      sampled: tokens of the answer that dispatched steps have sampled.
      slot: its place in the batch; None while it waits.
      pages, digests: its pages in order, and the digests of the full ones.
      branch: number of tokens after which a snapshot of its states is kept; 0: there is no such place.
      described_pages: number of its pages in the table of `RowTable.describe`; -1: its settings are missing there too.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Sampling | None = None,
        *,
        seed: int = 0,
        stop_tokens: Collection[int] = (),
        constraint: Constraint | None = None,
        cancel: Callable[["Request"], None] | None = None,
        answer: Sequence[int] = (),
        priority: int = 0,
    ):
        self.prompt = tuple(prompt)
        self.max_tokens = max_tokens
        self.sampling = sampling or Sampling()
        self.seed = seed
        self.stop_tokens = frozenset(stop_tokens)
        self.constraint = constraint
        self.priority = priority
        self.adapter: PlacedAdapter | None = None
        self.root = ROOT
        self.pools = False
        self.pooled: Float[np.ndarray, "2 D"] | None = None
        self.times = Times()
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.error: JaxstackError | None = None
        self.log_probabilities: list[float] = []
        self.scores: list[TokenScore] = []
        self.prompt_scores: list[TokenScore | None] = [None] * (len(self.prompt) - 1)
        self.experts: Int[Array, "tokens layers k"] | None = None
        self._cancel = cancel
        self._taken = len(self.prompt) + len(answer)
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._listener: Callable[[], None] | None = None

        self.tokens = [*self.prompt, *answer]
        self.number = 0
        self.target = len(self.tokens)
        self.filled = 0
        self.exact = 0
        self.drafted = 0
        self.sampled = len(answer)
        self.slot: int | None = None
        self.pages: list[int] = []
        self.digests: list[bytes] = []
        self.branch = 0
        self.described_pages = -1
        self._ngrams: NGramDrafter | None = None
        self._foreseen: Foreseen | None = None

    def __iter__(self) -> Iterator[int]:
        """Yield each token of the answer once, waiting until it is generated.

        Raises:
          JaxstackError: the engine or the request's constraint failed.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._taken < len(self.tokens) or self.finish_reason is not None)
            tokens, reason = self.take()
            yield from tokens
            if reason is not None:
                if self.error is not None:
                    raise self.error
                return

    def take(self) -> tuple[list[int], FinishReason | None]:
        """Return the tokens generated since the last call and the finish reason, if any, without blocking."""
        with self._changed:
            new = self.tokens[self._taken :]
            self._taken = len(self.tokens)
            return new, self.finish_reason

    def result(self) -> list[int]:
        """Wait until the answer is complete and return all of its tokens, those that were known too.

        Raises:
          JaxstackError: the engine or the request's constraint failed.
        """
        self._ended.wait()  # wakes once, where an iterator wakes for each token
        if self.error is not None:
            raise self.error
        return self.tokens[len(self.prompt) :]

    @property
    def count(self) -> int:
        """Number of tokens of the answer so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def computes_prompt(self) -> bool:
        """True if all tokens of the prompt have to be computed, also those in the prefix cache."""
        return self.sampling.prompt_logprobs is not None or self.pools

    @property
    def single_steps(self) -> bool:
        """True if a program of several decode steps cannot generate the answer."""
        return self.constraint is not None or self.sampling.extended

    def cancel(self) -> None:
        """End the answer early and free its KV-cache pages."""
        if self._cancel is not None:
            self._cancel(self)

    def listen(self, listener: Callable[[], None]) -> None:
        """Register a function that the engine's thread calls whenever the answer gets tokens or ends."""
        self._listener = listener
        listener()

    def draft_by_ngram(self, count: int) -> tuple[int, ...]:
        """Guess up to `count` next tokens by finding the last n-gram earlier in the text. For the engine only."""
        self.foresee_by_ngram(count)
        assert self._ngrams is not None
        return self._ngrams.guess(count)

    def foresee_by_ngram(self, count: int) -> float:
        """Return how many tokens a step with up to `count` n-gram drafts can be expected to give. For the engine only.

        All calls have the same `count`, but for the last tokens of an answer.
        """
        if self._ngrams is None or self._foreseen is None:
            self._ngrams = NGramDrafter(self.tokens)
            self._foreseen = Foreseen(self._ngrams, count)
        self._foreseen.extend(self.tokens[self._ngrams.count :])
        return self._foreseen.tokens_per_step

    def add_states(self, start: int, pooled: Float[np.ndarray, "2 D"]) -> None:
        """Add the sum of the hidden states of prompt tokens from `start` on, and the last one. For the engine only."""
        before = 0 if start == 0 or self.pooled is None else self.pooled[0]
        self.pooled = np.stack([pooled[0] + before, pooled[1]])

    def append(self, tokens: Sequence[int], packed: Int[np.ndarray, "tokens columns"] | None = None) -> None:
        """Append generated tokens, of which readers learn by `notify`. For the engine only.

        Args:
          tokens: those of the answer.
          packed: scores of these tokens, of the stop token if there is one, and of further ones.
        """
        with self._changed:
            if packed is not None:
                own = packed[: len(tokens) + (self.stop_token is not None)]
                if self.sampling.logprobs is not None:
                    self.scores += unpack_scores(own, self.sampling.logprobs)
                elif own.shape[1] == 2:
                    self.log_probabilities += own[:, 1].view(np.float32).tolist()
            if not tokens:
                return
            now = time.perf_counter()
            self.times.first_token = self.times.first_token or now
            self.times.newest_token = now
            self.tokens += tokens

    def notify(self, reason: FinishReason | None = None, error: JaxstackError | None = None) -> None:
        """Wake the readers, and end the answer if a finish reason is given. For the engine only."""
        with self._changed:
            if self.finish_reason is not None:
                return
            self.finish_reason = reason
            self.error = error
            self._changed.notify_all()
        if reason is not None:
            self._ended.set()
        if self._listener is not None:
            self._listener()


def until_end(request: Request, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
    """Return the new tokens of an answer up to its end, and the reason of the end; None: it has not ended.

    A stop token is set as the request's.
    """
    room = request.max_tokens - request.count
    added = [*tokens[:room]]
    if not request.stop_tokens.isdisjoint(added):
        place = next(place for place, token in enumerate(added) if token in request.stop_tokens)
        request.stop_token = added[place]
        return added[:place], "stop"
    return added, "length" if len(added) == room else None


def until_end_of_constraint(
    request: Request, constraint: Constraint, tokens: Sequence[int]
) -> tuple[list[int], FinishReason | None, ConstraintFailed | None]:
    """Return as `until_end`, with the constraint advanced by each token, and its failure as a third value."""
    added = list[int]()
    for token in tokens:
        if token in request.stop_tokens:
            request.stop_token = token
            return added, "stop", None
        added.append(token)
        try:
            complete = not constraint.accept(token)
        except ConstraintFailed as failure:
            return added, "error", failure
        if complete:
            return added, "stop", None
        if request.count + len(added) >= request.max_tokens:
            return added, "length", None
    return added, None, None
