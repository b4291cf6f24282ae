"""The scheduler of the serving engine: chooses which tokens each step computes. Plain Python, without a device.

A step computes the next token of every running request together with chunks of prompts (Agrawal et al. 2023,
arXiv:2308.16369). Several steps without chunks are planned at once. Requests start in the order of their priority, then
of their arrival. When pages run out, the last in this order is preempted, and later recomputed from its prompt and its
tokens so far.

Where layers have states, snapshots of these are kept for the prefix cache at places that cost no further step, about
one chunk apart; and where the cached pages of a prompt show that it leaves an earlier text, for the next prompt that
does (Pan et al. 2024, arXiv:2411.19379). There a chunk ends.
"""

import bisect
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from jaxstack.decoding.draft_choice import DraftChoice
from jaxstack.decoding.draft_lag import DraftLag
from jaxstack.decoding.pages import PagePool, page_digest
from jaxstack.decoding.requests import Request
from jaxstack.decoding.step_shapes import ChunkShape, choose_shape, widest_shapes

_STATE_TOKENS = 64
"""Tokens that recurrent layers compute at a time. Chunks of prompts end at their multiples, so that the rest of a
prompt is computed in the same parts whether the states before it were cached or not."""


@dataclasses.dataclass(slots=True)
class Row:
    """Row of a step's batch: the consecutive tokens of one request that the step computes.

    Attributes:
      start, count: the tokens have the positions from `start` to `start + count - 1`. One step computes all of them;
        but a decoded row without drafts has one token in each of `count` steps, and in a plan of several steps with
        drafts `count` is the largest number of tokens that they can give it.
      index: number in the answer of the token that is sampled after them; None: none is.
      drafts: guesses of the tokens after the newest one, which are among the `count` tokens; -1 for each that is made
        on the device.
      again: number of tokens, the newest included, that the step runs again where the caches do not have them exactly.
      last: of a plan of several steps with drafts, the number of tokens that the last step of the row gave; the runner
        sets it when it reads them.
    """

    request: Request
    start: int
    count: int
    index: int | None
    drafts: tuple[int, ...] = ()
    again: int = 1
    last: int = 0

    def set_accepted(self, accepted: int) -> None:
        """Record that the steps of a plan accepted `accepted` tokens of this row, and rejected the other drafts."""
        if self.drafts and self.index is not None:
            self.request.filled = self.start + accepted
            self.request.sampled = self.index + accepted
            if self.last:
                self.request.exact = self.request.filled + 1 - self.last


@dataclasses.dataclass
class StepPlan:
    """The rows of the batch that one step of the serving engine computes: sequences to decode and chunks of prompts.

    Attributes:
      decoded: decode rows.
      chunks: prompt-chunk rows.
      shape: shape that the chunks are padded to; None without chunks.
      steps: number of decode steps; 1 with chunks. The largest number until those with drafts are read: they end when
        no row has room left.
      drafts: the step runs as one with drafts, though a row may have none.
      behind: chunks of tokens that a draft model runs before it guesses, with their shapes, see `DraftLag`.
      alone: the chunks run in a program without decoded rows, see `widest_shapes`.
      restored: rows of the caches of fixed size that are copied before the step, (from, to): snapshots to slots.
      kept: those that are copied after it: slots to snapshots.
    """

    decoded: list[Row]
    chunks: list[Row]
    shape: ChunkShape | None
    steps: int = 1
    restored: Sequence[tuple[int, int]] = ()
    kept: Sequence[tuple[int, int]] = ()
    alone: bool = False
    drafts: bool = False
    behind: Sequence[tuple[list[Row], ChunkShape]] = ()

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
      choice: decides which steps have drafts; None: all of them, if there are `draft_tokens`.
      states: some layers keep a state of fixed size for each slot, so that the chunks of a prompt have to follow one
        another in different steps.

    Attributes:
      shapes: shapes of prompt chunks; may be replaced before the warm-up.
      shapes_beside: function depth -> shapes of prompt chunks that are allowed while answers are decoded; depth is
        where the chunks end, as a share of the context. May be replaced at any time.
      has_compiled: function (shape, alone) -> True if steps may have chunks of this shape, or steps of chunks alone; at
        first all may. The smallest shape always may, beside decoded rows. May be replaced at any time.
      may_draft: steps may have drafts.
      may_start: function request -> True if it may start; others are let past those that may not. May be replaced at
        any time.
      approximate: what the caches have of accepted drafts is approximate, or missing, until the next step with drafts.
      catches_up: a draft model can run tokens that it lacks; otherwise their requests get no more drafts.
      fills_prompts: steps without drafts run a draft model on their prompts too; otherwise it lacks these.
      decode_steps, draft_steps: largest number of steps of a plan without prompt chunks, without drafts and with them;
        may be changed at any time.
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
        choice: DraftChoice | None = None,
        states: bool = False,
    ):
        self.context = context
        self.pool = pool
        self.shapes = shapes
        self.shapes_beside: Callable[[float], tuple[ChunkShape, ...]] = lambda depth: self.shapes
        self.has_compiled: Callable[[ChunkShape, bool], bool] = lambda shape, alone: True
        self.may_draft = True
        self.may_start: Callable[[Request], bool] = lambda request: True
        self.decode_steps = 1
        self.draft_steps = 1
        self.draft_tokens = draft_tokens
        self.choice = choice
        self._drafting = False
        """True if the newest step runs as one with drafts: its tokens have to be read before the next is planned."""
        self._lag = DraftLag(pool.page_size) if draft_model else None
        self._states = states
        self.approximate = False
        self.catches_up = True
        self.fills_prompts = True
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._slots = slots
        self._free_slots = list(reversed(range(slots)))
        self._restored: list[tuple[int, int]] = []
        self._stride = math.lcm(pool.page_size, _STATE_TOKENS)
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        """Prompt tokens that were looked up in the prefix cache, and that were found."""

    @property
    def shapes_alone(self) -> Sequence[ChunkShape]:
        """Shapes of chunks that run without decoded rows where nothing is decoded: none if all steps have drafts."""
        return () if self.draft_tokens and self.choice is None else widest_shapes(self.shapes)

    @property
    def spares_last_slot(self) -> bool:
        """True if a step may overwrite the states of the last slot, as one that is timed does."""
        return not self._states or self._slots - 1 in self._free_slots

    def _runs_alone(self, shape: ChunkShape) -> bool:
        """Return True if chunks of a shape may run without decoded rows."""
        return shape in self.shapes_alone and self.has_compiled(shape, True)

    def add(self, request: Request) -> None:
        """Put a new request into the waiting queue, after those that start before it."""
        bisect.insort(self.waiting, request, key=_order)

    def finish(self, request: Request) -> None:
        """Remove a request that has ended and release its KV-cache pages.

        A step that was dispatched before may still write to them. That is harmless: steps run in order, so that it
        writes before the pages' next owner does.
        """
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
            self._release_slot(request)

    def plan(self, in_flight: bool) -> StepPlan | None:
        """Choose the rows of the next step and allocate their pages; None if nothing can run yet.

        Args:
          in_flight: True if tokens of dispatched steps have not been read yet; then no request may be preempted, and
            no step with drafts be planned: requests that started in different steps would never be decoded together.
        """
        decoding = [request for request in self.running if self._generates(request)]
        drafts = self._wants_drafts(decoding)
        if in_flight and (drafts or self._drafting):
            return None
        # Steps without drafts go on from caches that have all tokens, exactly.
        self._drafting = drafts or (self.approximate and any(request.exact < request.filled for request in decoding))
        decoded: list[Row] = []
        before = self.preemptions
        for request in list(self.running):
            if request.slot is None or not self._decodes(request):
                continue
            guessed = self._guess(request) if drafts else ()
            if not self._take_pages(request, request.filled + 1 + len(guessed)):
                if in_flight:
                    return None
                if not self._make_room(request, 1 + len(guessed), decoded):
                    continue
            again = request.filled + 1 - request.exact
            decoded.append(Row(request, request.filled, 1 + len(guessed), request.sampled, guessed, again))
        if self.preemptions == before:
            self._admit()
        pending = [request for request in self.running if request.filled < request.target]
        chunks, shape = self._chunk_prompts(pending)
        steps = 1 if chunks else self._add_steps(decoded, drafts)
        return self._make_plan(decoded, chunks, shape, steps) if decoded or chunks else None

    def register_pages(self, request: Request) -> None:
        """Add the full KV-cache pages of a request to the prefix cache, so that others can share them."""
        if not self.pool.cache_prefixes:
            return
        size = self.pool.page_size
        known = min(request.filled, len(request.tokens))
        if self.approximate:
            known = min(known, request.exact)
        for index in range(len(request.digests), known // size):
            parent = request.digests[-1] if request.digests else request.root
            digest = page_digest(parent, request.tokens[index * size : (index + 1) * size])
            self.pool.register(request.pages[index], digest)
            request.digests.append(digest)

    def release_unused(self, request: Request) -> None:
        """Release the pages of a running request that were allocated for drafts which were rejected."""
        needed = -(-(request.filled + 1) // self.pool.page_size)
        if request.slot is not None and len(request.pages) > needed:
            self.pool.release(request.pages[needed:])
            del request.pages[needed:]
            request.described_pages = min(request.described_pages, needed)

    def _decodes(self, request: Request) -> bool:
        """Return True if a running request's prompt is done and its next token can be computed now."""
        stepwise = self._drafting or request.constraint is not None
        return self._generates(request) and not (stepwise and request.sampled > request.count)

    def _generates(self, request: Request) -> bool:
        """Return True if a running request's prompt is done, and further tokens of its answer are to be computed."""
        return request.filled >= request.target and self._room(request) > 0

    def _wants_drafts(self, decoding: Sequence[Request]) -> bool:
        """Return True if the next step, which decodes these requests, is to have drafts."""
        if not self.draft_tokens or not self.may_draft:
            return False
        if self.choice is None or not decoding:
            return self.choice is None
        foreseen = sum(map(self._foresee, decoding)) / len(decoding) if self.choice.foresees else 1.0
        return self.choice.wants(len(decoding), foreseen)

    def _foresee(self, request: Request) -> float:
        """Return how many tokens a step with n-gram drafts can be expected to give a request."""
        return request.foresee_by_ngram(self.draft_tokens) if _takes_drafts(request) else 1.0

    def _room(self, request: Request) -> int:
        """Return how many more tokens a request may generate within its own limit and the context length."""
        return min(request.max_tokens - request.sampled, self.context - request.filled)

    def _guess(self, request: Request) -> tuple[int, ...]:
        """Return draft tokens for a request."""
        count = min(self.draft_tokens, self._room(request) - 1)
        if count < 1 or not _takes_drafts(request):
            return ()
        if self._lag is not None:
            return (-1,) * count if self.catches_up or request.drafted >= request.filled else ()
        drafts = request.draft_by_ngram(count)
        return drafts if self._take_pages(request, request.filled + 1 + len(drafts)) else ()

    def _add_steps(self, decoded: Sequence[Row], drafts: bool) -> int:
        """Let a decode-only plan have several steps, as far as limits and pages allow; return their number."""
        steps = self.draft_steps if drafts else 1 if self._drafting else self.decode_steps
        if steps == 1 or any(row.request.single_steps for row in decoded):
            return 1
        if drafts and self._lag is not None and any(not row.drafts and self._room(row.request) > 1 for row in decoded):
            return 1  # the draft model lacks tokens of a row, which gets no drafts
        if self.waiting and decoded:  # for slots or pages, which the end of an answer frees
            steps = min(steps, max(steps // 4, min(self._room(row.request) for row in decoded)))
        if self._drafting:
            return self._add_draft_steps(decoded, steps)
        for row in decoded:
            row.count = min(steps, self._room(row.request))
            if not self._take_pages(row.request, row.start + row.count):
                row.count = min(row.count, len(row.request.pages) * self.pool.page_size - row.start)
        return max((row.count for row in decoded), default=1)

    def _add_draft_steps(self, decoded: Sequence[Row], steps: int) -> int:
        """Let a plan have up to `steps` steps with drafts, all of which have pages for every draft; return how many."""
        width = 1 + self.draft_tokens
        steps = min(steps, max((self._room(row.request) for row in decoded), default=1))
        for row in decoded:
            if not self._take_pages(row.request, row.start + min(steps * width, self._room(row.request))):
                steps = (len(row.request.pages) * self.pool.page_size - row.start) // width
        if steps < 2:
            return 1
        for row in decoded:
            row.count = min(steps * width, self._room(row.request))
            row.drafts = (-1,) * (row.count - 1)
        return steps

    def _take_pages(self, request: Request, tokens: int) -> bool:
        """Allocate pages so that a request can hold `tokens` tokens; return False if too few are free."""
        lacking = -(-tokens // self.pool.page_size) - len(request.pages)
        if lacking <= 0:
            return True
        pages = self.pool.allocate(lacking)
        request.pages += pages or []
        return pages is not None

    def _make_room(self, request: Request, count: int, decoded: list[Row]) -> bool:
        """Preempt the last requests until `request` has enough pages; return False if it was preempted itself."""
        while not self._take_pages(request, request.filled + count):
            last = max(self.running, key=_order)
            decoded[:] = [row for row in decoded if row.request is not last]
            self._preempt(last)
            if last is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self.running.remove(request)
        self._release_slot(request)
        # If all steps have drafts of a draft model, the next token must come from a decoded row, as it would have
        # without preemption. A step without drafts could not: the device has lost the newest token.
        decodes = self._lag is not None and self.choice is None and request.count > 0
        request.filled = 0
        request.exact = 0
        request.target = len(request.tokens) - decodes
        bisect.insort_left(self.waiting, request, key=_order)

    def _release_slot(self, request: Request) -> None:
        """Free the batch slot and the pages of a request that no longer runs."""
        assert request.slot is not None
        self.register_pages(request)
        self.pool.release(request.pages)
        request.pages = []
        request.digests = []
        self._free_slots.append(request.slot)
        request.slot = None

    def _admit(self) -> None:
        """Start waiting requests, in their order, while batch slots and KV-cache pages are free.

        One free page has to remain for each running request.
        """
        while self._free_slots:
            request = next(filter(self.may_start, self.waiting), None)
            if request is None:
                return
            size = self.pool.page_size
            prefix = self.pool.share_prefix([] if request.computes_prompt else request.tokens, request.root)
            request.pages = prefix.pages
            request.digests = prefix.digests
            needed = -(-(len(request.tokens) + 1) // size) - len(request.pages)
            spare = len(self.running) if self.running else 0
            pages = self.pool.allocate(needed) if needed + spare <= self.pool.available else None
            if pages is None:
                self.pool.release(request.pages)
                request.pages = []
                request.digests = []
                return
            self.waiting.remove(request)
            cached = len(request.pages) * size
            self.prefix_queries += len(request.tokens)
            self.prefix_hits += cached
            request.pages += pages
            request.filled = request.exact = cached
            if self._lag is not None:
                self._lag.admit(request)
            request.slot = self._free_slots.pop()
            request.described_pages = -1
            if prefix.snapshot is not None:
                self._restored.append((self._slots + prefix.snapshot, request.slot))
            request.branch = 0
            if request.times.started is None:
                request.branch = prefix.known // self._stride * self._stride
                request.times.started = time.perf_counter()
                request.cached_tokens = cached
            self.running.append(request)

    def _chunk_prompts(self, pending: Sequence[Request]) -> tuple[list[Row], ChunkShape | None]:
        """Return chunks of the pending prompts, and their compiled shape, chosen for most tokens with least padding."""
        if not pending:
            return [], None
        answers = any(request.filled >= request.target for request in self.running)
        left = [self._chunk_end(request, request.filled, request.target) - request.filled for request in pending]
        width = max(shape.width for shape in self.shapes)
        depth = max(min(request.filled + width, request.target) for request in pending) / self.context
        shape = choose_shape(self._compiled(self.shapes_beside(depth) if answers else self.shapes), left)
        rows: list[Row] = []
        for request in pending:
            start = request.filled
            while start < request.target and len(rows) < shape.rows:
                end = self._chunk_end(request, start, shape.width)
                last = end == request.target == len(request.tokens)
                rows.append(Row(request, start, end - start, request.sampled if last else None))
                start = request.target if self._states else end
        return rows, shape

    def _compiled(self, shapes: Sequence[ChunkShape]) -> Sequence[ChunkShape]:
        """Return those of these shapes that steps may have; if there are none, the smallest of all."""
        return [shape for shape in shapes if self.has_compiled(shape, False)] or self.shapes[:1]

    def _chunk_end(self, request: Request, start: int, width: int) -> int:
        """Return the end of a chunk of up to `width` tokens of a prompt, where a snapshot of its states may follow."""
        end = min(start + width, request.target)
        if not self.pool.keeps_snapshots:
            return end
        if start < request.branch < end:
            return request.branch
        if end == request.target:
            return end
        ends = (end // unit * unit for unit in (self._distance, self._stride))
        return next((aligned for aligned in ends if aligned > start), end)

    @property
    def _distance(self) -> int:
        """Tokens between the snapshots of a long prompt: those of the widest chunk, or somewhat more."""
        return -(-max(shape.width for shape in self.shapes) // self._stride) * self._stride

    def _keep_states(self, request: Request) -> list[tuple[int, int]]:
        """Return the rows to copy if a snapshot of a request's states is to be kept after its newest chunk."""
        end = request.filled
        if not self.pool.keeps_snapshots or (end % self._distance and end != request.branch):
            return []
        assert request.slot is not None
        pages = end // self.pool.page_size
        number = self.pool.add_snapshot(request.digests[pages - 1]) if pages <= len(request.digests) else None
        return [] if number is None else [(request.slot, self._slots + number)]

    def _catch_up(self, decoded: Sequence[Row], lag: DraftLag) -> Iterator[tuple[list[Row], ChunkShape]]:
        """Yield batches of chunks of the tokens that a draft model lacks of the rows with drafts, and their shapes."""
        while behind := [row for row in decoded if row.drafts and row.request.drafted < row.start]:
            shape = choose_shape(self._compiled(self.shapes), [row.start - row.request.drafted for row in behind])
            chunks = list[Row]()
            for row in behind[: shape.rows]:
                start = row.request.drafted
                chunks.append(Row(row.request, start, min(shape.width, row.start - start), None))
                lag.advance(row.request, start, start + chunks[-1].count, drafted=True)
            yield chunks, shape

    def _advance_lag(self, decoded: Sequence[Row], chunks: Sequence[Row], lag: DraftLag) -> None:
        """Record which of a step's tokens a draft model runs."""
        for row in decoded:
            lag.advance(row.request, row.start, row.start + row.count, drafted=self._drafting)
        for row in chunks:
            drafted = self._drafting or self.fills_prompts
            lag.advance(row.request, row.start, row.start + row.count, drafted=drafted)

    def _make_plan(self, decoded: list[Row], chunks: list[Row], shape: ChunkShape | None, steps: int) -> StepPlan:
        """Build the plan of steps from its rows, and advance their requests to the state after the step."""
        behind = [] if self._lag is None else [*self._catch_up(decoded, self._lag)]
        if self._lag is not None:
            self._advance_lag(decoded, chunks, self._lag)
        for row in (*decoded, *chunks):
            row.request.filled = row.start + row.count
        for row in decoded:
            row.request.sampled += row.count
            row.request.exact = row.start + 1 if self._drafting else row.request.filled
        kept = list[tuple[int, int]]()
        for row in chunks:
            row.request.exact = row.request.filled
            row.request.sampled += row.index is not None
            self.register_pages(row.request)
            kept += self._keep_states(row.request)
        restored = self._restored
        self._restored = []
        alone = shape is not None and not decoded and not self._drafting and self._runs_alone(shape)
        return StepPlan(decoded, chunks, shape, steps, restored, kept, alone, self._drafting, behind)


def _takes_drafts(request: Request) -> bool:
    """Return False if the choice after each draft depends on those before it in other ways than by the model."""
    return request.constraint is None and not request.sampling.changes_logits


def _order(request: Request) -> tuple[int, int]:
    """Return the key by which requests start, and in reverse are preempted."""
    return request.priority, request.number
