"""The scheduler of the serving engine: chooses which tokens each step computes. Plain Python, without a device.

A step computes the next token of every running request together with chunks of prompts (Agrawal et al. 2023,
arXiv:2308.16369). Several steps without chunks are planned at once. Requests start in the order of their arrival. When
pages run out, the newest request is preempted, and later recomputed from its prompt and its tokens so far.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Rows

from jaxstack.decoding.ngram_draft import NGramDrafter
from jaxstack.decoding.pages import ROOT, PagePool, page_digest
from jaxstack.decoding.requests import Handle
from jaxstack.decoding.step_shapes import ChunkShape, choose_shape


class Sequence:
    """The scheduler's state of one request: its tokens, its progress and its KV-cache pages.

    Attributes:
      tokens: the prompt and the answer as far as the host has read it.
      target: number of tokens to compute before the next is sampled: those of the prompt, or of all after preemption.
      filled: tokens whose keys and values are in the pages after all dispatched steps.
      exact: those of them whose keys and values in the pages of a draft model are no approximations.
      sampled: tokens of the answer that dispatched steps have sampled.
      pages, digests: its pages in order, and the digests of the full ones.
      described_pages: number of its pages in the table of `Programs.describe`; -1: its settings are missing there too.
    """

    def __init__(self, handle: Handle, number: int):
        self.handle = handle
        self.number = number
        self.tokens = list(handle.request.prompt)
        self.target = len(self.tokens)
        self.filled = 0
        self.exact = 0
        self.sampled = 0
        self.pages: list[int] = []
        self.digests: list[bytes] = []
        self.slot: int | None = None
        self.described_pages = -1
        self.finished = False
        self._ngrams: NGramDrafter | None = None

    @property
    def num_read(self) -> int:
        """Number of answer tokens that the host has read from the device."""
        return len(self.tokens) - len(self.handle.request.prompt)

    def draft_by_ngram(self, count: int) -> tuple[int, ...]:
        """Guess up to `count` next tokens by finding the sequence's last n-gram earlier in its text."""
        if self._ngrams is None:
            self._ngrams = NGramDrafter(self.tokens)
        self._ngrams.extend(self.tokens[self._ngrams.count :])
        return self._ngrams.guess(count)


@dataclasses.dataclass(slots=True)
class Row:
    """Row of a step's batch: the consecutive tokens of one sequence that the step computes.

    Attributes:
      start, count: the tokens have the positions from `start` to `start + count - 1`. One step computes all of them;
        only a decoded row without drafts has one token in each of `count` steps.
      index: number in the answer of the token that is sampled after them; None: none is.
      drafts: guesses of the tokens after the newest one, which are among the `count` tokens; -1 for each that a draft
        model makes on the device.
      again: number of tokens, the newest included, that the draft model runs exactly before it guesses, if its layers
        run together.
    """

    sequence: Sequence
    start: int
    count: int
    index: int | None
    drafts: tuple[int, ...] = ()
    again: int = 1

    def set_accepted(self, accepted: int) -> None:
        """Record that a step accepted the first `accepted` tokens of this row and rejected the other drafts."""
        if self.drafts and self.index is not None:
            self.sequence.filled = self.start + accepted
            self.sequence.sampled = self.index + accepted


@dataclasses.dataclass
class StepPlan:
    """The rows of the batch that one step of the serving engine computes: sequences to decode and chunks of prompts.

    Attributes:
      decoded: decode rows.
      chunks: prompt-chunk rows.
      shape: shape that the chunks are padded to; None without chunks.
      steps: number of decode steps; 1 with chunks or drafts.
    """

    decoded: list[Row]
    chunks: list[Row]
    shape: ChunkShape | None
    steps: int = 1

    @property
    def rows(self) -> list[Row]:
        """All rows of the batch: those that decode, then those with chunks of prompts."""
        return [*self.decoded, *self.chunks]


class Scheduler:
    """Decides which requests each step computes, and allocates their KV-cache pages.

    Args:
      slots: requests that may run together.
      context: token limit of a request.
      shapes: shapes of prompt chunks that a step may have, see `chunk_shapes`.
      pool: the pages.
      draft_tokens: largest number of draft tokens per request and step. With drafts, or for a request with a
        constraint, a step is planned only when the tokens before it are known.
      draft_model: a draft model makes the drafts. Their number then does not depend on other requests, because the
        sampled tokens depend on their number.
      states: some layers keep a state of fixed size for each slot, so that the chunks of a prompt have to follow one
        another in different steps.

    Attributes:
      shapes: shapes of prompt chunks; may be replaced before the warm-up.
      shapes_beside: function depth -> shapes of prompt chunks that are allowed while answers are decoded; depth is the
        position of the chunks in the context, from 0 (start) to 1 (end). May be replaced at any time.
      approximate: the draft model's keys and values of drafts are approximations until the next step.
      decode_steps: largest number of steps of a plan without prompt chunks; may be changed at any time.
    """

    def __init__(
        self,
        slots: int,
        context: int,
        shapes: tuple[ChunkShape, ...],
        pool: PagePool,
        draft_tokens: int = 0,
        *,
        draft_model: bool = False,
        states: bool = False,
    ):
        self.context = context
        self.pool = pool
        self.shapes = shapes
        self.shapes_beside: Callable[[float], tuple[ChunkShape, ...]] = lambda depth: self.shapes
        self.decode_steps = 1
        self.draft_tokens = draft_tokens
        self._draft_model = draft_model
        self._states = states
        self.approximate = False
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_slots = list(reversed(range(slots)))
        self.preemptions = 0
        self.prefix_queries = self.prefix_hits = 0
        """Prompt tokens that were looked up in the prefix cache, and that were found."""

    def add(self, sequence: Sequence) -> None:
        """Append a new request to the waiting queue."""
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a request that has ended and release its KV-cache pages.

        A step that was dispatched before may still write to them. That is harmless: steps run in order, so that it
        writes before the pages' next owner does.
        """
        sequence.finished = True
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._release_slot(sequence)

    def plan(self, in_flight: bool) -> StepPlan | None:
        """Choose the rows of the next step and allocate their pages; None if nothing can run yet.

        Args:
          in_flight: True if tokens of dispatched steps have not been read yet; then no request may be preempted.
        """
        decoded: list[Row] = []
        before = self.preemptions
        for sequence in list(self.running):
            if sequence.slot is None or not self._decodes(sequence):
                continue
            drafts = self._guess(sequence)
            if not self._take_pages(sequence, sequence.filled + 1 + len(drafts)):
                if in_flight:
                    return None
                if not self._make_room(sequence, 1 + len(drafts), decoded):
                    continue
            again = sequence.filled + 1 - sequence.exact
            decoded.append(Row(sequence, sequence.filled, 1 + len(drafts), sequence.sampled, drafts, again))
        if self.preemptions == before:
            self._admit()
        pending = [sequence for sequence in self.running if sequence.filled < sequence.target]
        chunks, shape = self._chunk_prompts(pending)
        if not chunks:
            self._add_steps(decoded)
        return self._make_plan(decoded, chunks, shape) if decoded or chunks else None

    def register_pages(self, sequence: Sequence) -> None:
        """Add the full KV-cache pages of a sequence to the prefix cache, so that others can share them."""
        if not self.pool.cache_prefixes:
            return
        size = self.pool.page_size
        known = min(sequence.filled, len(sequence.tokens))
        if self.approximate:
            known = min(known, sequence.exact)
        for index in range(len(sequence.digests), known // size):
            parent = sequence.digests[-1] if sequence.digests else ROOT
            digest = page_digest(parent, sequence.tokens[index * size : (index + 1) * size])
            self.pool.register(sequence.pages[index], digest)
            sequence.digests.append(digest)

    def _decodes(self, sequence: Sequence) -> bool:
        """Return True if a running request's prompt is done and its next token can be computed now."""
        stepwise = self.draft_tokens or sequence.handle.request.constraint is not None
        if sequence.filled < sequence.target or (stepwise and sequence.sampled > sequence.num_read):
            return False
        return sequence.sampled < sequence.handle.request.max_tokens and sequence.filled < self.context

    def _room(self, sequence: Sequence) -> int:
        """Return how many more tokens a request may generate within its own limit and the context length."""
        return min(sequence.handle.request.max_tokens - sequence.sampled, self.context - sequence.filled)

    def _guess(self, sequence: Sequence) -> tuple[int, ...]:
        """Return draft tokens for a request; none if a grammar constrains it, which would have to check each one."""
        count = min(self.draft_tokens, self._room(sequence) - 1)
        if count < 1 or sequence.handle.request.constraint is not None:
            return ()
        if self._draft_model:
            return (-1,) * count
        drafts = sequence.draft_by_ngram(count)
        return drafts if self._take_pages(sequence, sequence.filled + 1 + len(drafts)) else ()

    def _add_steps(self, decoded: Rows[Row]) -> None:
        """Let a decode-only step generate several tokens per row, as far as limits and pages allow."""
        if self.draft_tokens or any(row.sequence.handle.request.constraint is not None for row in decoded):
            return
        steps = self.decode_steps
        if self.waiting and decoded:  # for slots or pages, which the end of an answer frees
            steps = min(steps, max(steps // 4, min(self._room(row.sequence) for row in decoded)))
        for row in decoded:
            row.count = min(steps, self._room(row.sequence))
            if not self._take_pages(row.sequence, row.start + row.count):
                row.count = min(row.count, len(row.sequence.pages) * self.pool.page_size - row.start)

    def _take_pages(self, sequence: Sequence, tokens: int) -> bool:
        """Allocate pages so that a sequence can hold `tokens` tokens; return False if too few are free."""
        lacking = -(-tokens // self.pool.page_size) - len(sequence.pages)
        if lacking <= 0:
            return True
        pages = self.pool.allocate(lacking)
        sequence.pages += pages or []
        return pages is not None

    def _make_room(self, sequence: Sequence, count: int, decoded: list[Row]) -> bool:
        """Preempt the newest requests until `sequence` has enough pages; return False if it was preempted itself."""
        while not self._take_pages(sequence, sequence.filled + count):
            last = max(self.running, key=lambda other: other.number)
            decoded[:] = [row for row in decoded if row.sequence is not last]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._release_slot(sequence)
        # With a draft model the next token must come from a decoded row, as it would have without preemption.
        decodes = self._draft_model and sequence.num_read > 0
        sequence.filled = 0
        sequence.exact = 0
        sequence.target = len(sequence.tokens) - decodes
        self.waiting.appendleft(sequence)

    def _release_slot(self, sequence: Sequence) -> None:
        """Free the batch slot and the pages of a request that no longer runs."""
        assert sequence.slot is not None
        self.register_pages(sequence)
        self.pool.release(sequence.pages)
        sequence.pages = []
        sequence.digests = []
        self._free_slots.append(sequence.slot)
        sequence.slot = None

    def _admit(self) -> None:
        """Start waiting requests, in order of arrival, while batch slots and KV-cache pages are free.

        One free page has to remain for each running request.
        """
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            size = self.pool.page_size
            sequence.pages, sequence.digests = self.pool.share_prefix(sequence.tokens)
            needed = -(-(len(sequence.tokens) + 1) // size) - len(sequence.pages)
            spare = len(self.running) if self.running else 0
            pages = self.pool.allocate(needed) if needed + spare <= self.pool.available else None
            if pages is None:
                self.pool.release(sequence.pages)
                sequence.pages = []
                sequence.digests = []
                return
            self.waiting.popleft()
            cached = len(sequence.pages) * size
            self.prefix_queries += len(sequence.tokens)
            self.prefix_hits += cached
            sequence.pages += pages
            sequence.filled = sequence.exact = cached
            sequence.slot = self._free_slots.pop()
            sequence.described_pages = -1
            if sequence.handle.times.started is None:
                sequence.handle.times.started = time.perf_counter()
                sequence.handle.cached_tokens = cached
            self.running.append(sequence)

    def _chunk_prompts(self, pending: Rows[Sequence]) -> tuple[list[Row], ChunkShape | None]:
        """Return chunks of the pending prompts, and their compiled shape, chosen for most tokens with least padding."""
        if not pending:
            return [], None
        answers = any(sequence.filled >= sequence.target for sequence in self.running)
        left = [sequence.target - sequence.filled for sequence in pending]
        depth = max(sequence.filled for sequence in pending) / self.context
        shape = choose_shape(self.shapes_beside(depth) if answers else self.shapes, left)
        rows: list[Row] = []
        for sequence in pending:
            start = sequence.filled
            most = start + shape.width if self._states else sequence.target
            while start < min(most, sequence.target) and len(rows) < shape.rows:
                count = min(shape.width, sequence.target - start)
                last = start + count == sequence.target == len(sequence.tokens)
                rows.append(Row(sequence, start, count, sequence.sampled if last else None))
                start += count
        return rows, shape

    def _make_plan(self, decoded: list[Row], chunks: list[Row], shape: ChunkShape | None) -> StepPlan:
        """Build the plan of a step from its rows, and advance their sequences to the state after the step."""
        for row in (*decoded, *chunks):
            row.sequence.filled = row.start + row.count
        for row in decoded:
            row.sequence.sampled += row.count
            row.sequence.exact = row.start + 1
        for row in chunks:
            row.sequence.exact = row.sequence.filled
            row.sequence.sampled += row.index is not None
            self.register_pages(row.sequence)
        steps = max((row.count - len(row.drafts) for row in decoded), default=1)
        return StepPlan(decoded, chunks, shape, steps)
