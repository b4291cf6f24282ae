"""Runs the scheduler's planned steps on the device: prepares the programs' arguments and reads back the tokens."""

import contextlib
import dataclasses
import functools
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.ngram_draft import accept
from jaxstack.decoding.ngram_steps import NGramSteps
from jaxstack.decoding.rows import Column, RecentTokens, choose_mode, pad_chunks
from jaxstack.decoding.sampling import Mode
from jaxstack.decoding.schedule import Row, StepPlan
from jaxstack.decoding.scores import unpack_scores
from jaxstack.decoding.step import Programs
from jaxstack.decoding.step_shapes import ChunkShape, StepKind, StepSeconds, timed_depths

_LONG_CALL = 0.02
"""Seconds of a step from which its launch by the host does not matter."""
_FURTHER_CALLS = 4
"""Calls of a shorter step that are timed, after a first one."""


@dataclasses.dataclass
class EngineStats:
    """Totals counted since the serving engine was started, such as requests and tokens.

    Attributes:
      prompt_tokens: tokens of the prompts that have started.
      computed_tokens: prompt tokens that were computed, those after a preemption included.
      generated_tokens: tokens of answers.
      steps: steps whose tokens were read.
      draft_steps: those of them in which tokens were guessed.
      draft_tokens, accepted_tokens: tokens that were guessed, and those of them that were right.
      finished: answers by the reason of their end.
      step_tokens: number of steps, by the number of tokens of prompts and answers that one computed.
      programs: number of programs whose tokens were read, by kind: `decode`, or `chunks 1x512` (rows x width).
      nanoseconds: total duration of these programs by kind, each from the arrival of the tokens of the program before
        it, or from its own dispatch if that was later, to the arrival of its own tokens.
      waiting: nanoseconds of these in which the engine's thread waited for tokens. In the rest of the time the host
        works, while the device computes what was dispatched ahead.
    """

    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    draft_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    finished: Counter[str] = dataclasses.field(default_factory=Counter)
    step_tokens: Counter[int] = dataclasses.field(default_factory=Counter)
    programs: Counter[str] = dataclasses.field(default_factory=Counter)
    nanoseconds: Counter[str] = dataclasses.field(default_factory=Counter)
    waiting: int = 0

    def count_tokens(self, tokens: int, steps: int) -> None:
        """Count steps that computed so many tokens together, about as many each."""
        each, more = divmod(tokens, steps)
        self.step_tokens[each] += steps - more
        self.step_tokens[each + 1] += more

    def __add__(self, other: "EngineStats") -> "EngineStats":
        names = [field.name for field in dataclasses.fields(self)]
        return EngineStats(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclasses.dataclass
class EngineState:
    """Current load of one serving engine, or the sum over several: requests, pages and tokens.

    Attributes:
      running, waiting: requests that have a slot, and that wait for one.
      used_pages, pages: pages in use, and all.
      preemptions: requests that were stopped and recomputed.
      prefix_queries, prefix_hits: prompt tokens looked up in the prefix cache, and found.
      stats: further counters since the start.
    """

    running: int
    waiting: int
    used_pages: int
    pages: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    stats: EngineStats

    def __add__(self, other: "EngineState") -> "EngineState":
        names = [field.name for field in dataclasses.fields(self)]
        return EngineState(*(getattr(self, name) + getattr(other, name) for name in names))


_LONGEST = 0.03
"""Seconds that a program of several decode steps should take at most, so that tokens keep coming and prompts start."""


RowTokensRead: TypeAlias = tuple[Row, list[int], slice | tuple[slice, int]]
"""A row, its new tokens, and their place among the samples of the step."""


class StepArguments(NamedTuple):
    """Arguments of the compiled programs for one step of the engine; see `Programs.run`."""

    rows: Int[np.ndarray, "R columns"]
    chunks: Int[np.ndarray, "Q columns"] | None
    tokens: Int[np.ndarray, "Q C"] | None
    mode: Mode
    mask: Int[np.ndarray, "all words"] | None


class _Dispatched(NamedTuple):
    """A step that runs on the device, or waits there, and its results."""

    plan: StepPlan
    samples: Int[Array, "..."]
    prompt_scores: Int[Array, "Q C columns"] | None
    pooled: Float[Array, "Q 2 D"] | None
    nanoseconds: int
    """When it was dispatched."""


class Runner:
    """Dispatches the steps planned by the scheduler to the device, and reads their tokens back in the same order.

    Args:
      programs: the compiled programs, with the cache.
      config: sizes.
      stats: the engine's statistics, to which the durations of the programs are added.
      row_counts: numbers of decoded rows to which batches are padded, smallest first; the last is the slots' number.
      kinds: kinds of steps: without drafts (False), with drafts, or both.
    """

    def __init__(
        self,
        programs: Programs,
        config: EngineConfig,
        stats: EngineStats,
        row_counts: Sequence[int],
        kinds: Sequence[bool],
    ):
        self.programs = programs
        self._row_counts = row_counts
        self._stats = stats
        self._kinds = kinds
        self.compiled: set[StepKind] | None = None
        """Kinds of steps without adapters whose programs are compiled, to which plans are restricted; None: all are."""
        self._width = 1 + config.draft_tokens  # tokens per decoded row: the newest token and its draft tokens
        self._steps = config.decode_steps
        self._draft_steps = config.draft_steps
        self._drafted = False  # the newest step was one with drafts
        self._in_flight = deque[_Dispatched]()
        self._step_seconds = {False: 0.0, True: 0.0}
        """Seconds of recent decode steps without drafts, and with them."""
        self._read_at = 0

    @property
    def busy(self) -> bool:
        """True while the tokens of a dispatched step have not been read yet."""
        return bool(self._in_flight)

    @property
    def queued_steps(self) -> int:
        """Number of decode steps that wait on the device behind the oldest dispatched program."""
        return sum(sent.plan.steps for sent in self._in_flight) - self._in_flight[0].plan.steps if self.busy else 0

    @property
    def most_steps(self) -> int:
        """Maximum number of decode steps to run as one program, given how long recent steps took.

        Where their number is a constant of the program it does not depend on times, which differ between processes.
        """
        return self._steps if self.programs.constant_steps else self._limit_steps(self._steps, drafts=False)

    @property
    def most_draft_steps(self) -> int:
        """Maximum number of steps with drafts to run as one program."""
        return self._limit_steps(self._draft_steps, drafts=True) if self._loops_drafts else 1

    def _limit_steps(self, most: int, *, drafts: bool) -> int:
        return max(1, min(most, int(_LONGEST / max(self._step_seconds[drafts], 1e-6))))

    @property
    def _loops_drafts(self) -> bool:
        """True if there are programs of several steps with drafts."""
        return any(self._kinds) and self._steps > 1 and not self.programs.constant_steps

    def has_compiled(self, kind: StepKind) -> bool:
        """Return True if the programs of a kind of steps are compiled."""
        return self.compiled is None or kind in self.compiled

    @functools.cached_property
    def _ngrams(self) -> NGramSteps:
        return NGramSteps(self.programs, self._width, self._draft_steps)

    def step_kinds(self, shapes: Sequence[ChunkShape], alone: Sequence[ChunkShape] = ()) -> list[StepKind]:
        """Return the kinds of steps that there are.

        Args:
          shapes: shapes of prompt chunks.
          alone: those of the shapes that also run without decoded rows.
        """
        found = list[StepKind]()
        for drafts in self._kinds:
            for adapted in (False, True)[: 1 + self.programs.adapts]:
                found += [StepKind(drafts, count, None, adapted) for count in self._row_counts]
                found += [StepKind(drafts, self.programs.slots, shape, adapted) for shape in shapes]
                found += [StepKind(drafts, 0, shape, adapted) for shape in alone if not drafts]
        return found

    def warm_up(self, kinds: Sequence[StepKind]) -> None:
        """Compile the programs of these kinds of steps, and run them once."""
        with self.programs.compiler.compiling(), self.starting():
            self.run_padding(kinds)
        # The first run of a program may still allocate and initialize, which no request should wait for.
        self.run_padding(kinds)

    def starting(self) -> contextlib.AbstractContextManager[list[Future[jax.stages.Compiled]]]:
        """Return a context in which programs are compiled in threads instead of run, see `Programs.starting`."""
        return self.programs.starting()

    def time_steps(
        self, shapes: Sequence[ChunkShape], page: int, slowdown: float
    ) -> Generator[None, None, StepSeconds]:
        """Return the seconds that steps take, as a generator: it yields before each kind of steps with chunks.

        Chunks that slow a step too much are not timed with more tokens, nor deeper in a prompt, where they take longer.

        Args:
          shapes: shapes of prompt chunks, smallest first.
          page: number of an allocated KV-cache page; timing overwrites it, and the states of the last slot.
          slowdown: duration of a step with chunks, relative to one without, above which it is too slow.
        """
        rows = self.programs.table.describe([], self.programs.slots)
        decode = seconds_of(lambda: self._run_empty(rows, None, None, drafts=self._kinds[0]))
        chunks = dict[float, dict[ChunkShape, float]]()
        for depth in timed_depths(self.programs.room.length):
            timed = chunks[depth] = dict[ChunkShape, float]()
            for shape in shapes:
                if any(took > slowdown * decode and smaller.tokens < shape.tokens for smaller, took in timed.items()):
                    break
                yield
                timed[shape] = self._time_chunks(shape, self.programs.table.describe_at(shape, page, depth))
            shapes = StepSeconds(decode, chunks).shapes_within(slowdown, depth)
        return StepSeconds(decode, chunks)

    def run_padding(self, kinds: Iterable[StepKind], *, plain: bool = False) -> None:
        """Run each program of these kinds of steps once, on padding only, in all ways of sampling.

        Args:
          kinds: the kinds of steps.
          plain: leave out the programs for constraints, scores and changed logits.
        """
        for kind in kinds:
            self._run_kind(kind, plain=plain)
        if self.programs.room.snapshots:
            self._copy_states([(0, 0)])
        self.programs.changes = None

    def _run_kind(self, kind: StepKind, *, plain: bool) -> None:
        """Run the programs of one kind of steps, as `run_padding` does."""
        drafts = kind.drafts
        rows = self._padding(kind.rows, kind.adapted)
        if kind.shape is not None:
            chunks = self._padding(kind.shape.rows, kind.adapted)
            self._run_each(rows, chunks, pad_chunks([], kind.shape), drafts=drafts, plain=plain)
        elif self._run_loop(rows, drafts=drafts) and plain and not drafts:
            return  # without drafts a step by itself is for what is left out
        else:
            self._run_each(rows, None, None, drafts=drafts, plain=plain)
        total = kind.rows * self._width_of(drafts) + (0 if kind.shape is None else kind.shape.rows)
        self._sample_padding(total, drafts=drafts, plain=plain)

    def _run_loop(self, rows: Int[np.ndarray, "R columns"], *, drafts: bool) -> bool:
        """Run the program of several steps on padding; return False if there is none."""
        if drafts and self._loops_drafts:
            self._run_draft_steps([], rows, 0, "greedy")
        elif self._steps > 1 and not drafts:
            self.programs.run_steps(rows, 0, self._steps, "greedy")
        else:
            return False
        return True

    def _padding(self, count: int, adapted: bool) -> Int[np.ndarray, "R columns"]:
        """Return the description of rows of padding, which are computed with the first adapter if `adapted`."""
        rows = self.programs.table.describe([], count)
        rows[:, Column.ADAPTER] = adapted
        return rows

    def _time_chunks(self, shape: ChunkShape, chunks: Int[np.ndarray, "Q columns"]) -> float:
        """Return the seconds of a step of all batch slots and these rows of prompt chunks."""
        rows = self.programs.table.describe([], self.programs.slots)
        tokens = pad_chunks([], shape)
        return seconds_of(lambda: self._run_empty(rows, chunks, tokens, drafts=self._kinds[0]))

    def _sample_padding(self, total: int, *, drafts: bool, plain: bool) -> None:
        """Sample for a batch of so many rows of padding, in each mode."""
        self.programs.sample_padding(total, plain=plain)

    def _run_each(
        self,
        rows: Int[np.ndarray, "R columns"],
        chunks: Int[np.ndarray, "Q columns"] | None,
        tokens: Int[np.ndarray, "Q C"] | None,
        *,
        drafts: bool,
        plain: bool,
    ) -> None:
        """Run each program of a step on padding only, but for those that sample by themselves."""
        self._run_empty(rows, chunks, tokens, drafts=drafts)

    def _run_empty(
        self,
        rows: Int[np.ndarray, "R columns"],
        chunks: Int[np.ndarray, "Q columns"] | None,
        tokens: Int[np.ndarray, "Q C"] | None,
        *,
        drafts: bool,
    ) -> Int[Array, " samples"]:
        """Run a step on padding only, to compile or time its programs; return its samples."""
        newest, recent = (self._newest([], len(rows)), self._recent([], len(rows))) if drafts else (None, None)
        return self.programs.run(rows, chunks, tokens, "greedy", drafted=newest, recent=recent)

    def dispatch(self, plan: StepPlan) -> None:
        """Start a planned step on the device without waiting for its result."""
        if self._drafted and not plan.drafts:
            self._put_newest(plan.decoded)
        self._drafted = plan.drafts
        self._copy_states(plan.restored)
        self._catch_up(plan)
        sampled = self._run_steps(plan) if self._loops(plan) else self._run_one(plan)
        self._copy_states(plan.kept)
        sampled.copy_to_host_async()
        scores = None
        if plan.shape is not None and any(row.request.sampling.prompt_logprobs is not None for row in plan.chunks):
            scores = self.programs.score_prompts(pad_chunks(plan.chunks, plan.shape, ahead=1))
            scores.copy_to_host_async()
        pooled = None
        if plan.shape is not None and any(row.request.pools for row in plan.chunks):
            pooled = self.programs.pool_prompts(self.programs.table.describe(plan.chunks, plan.shape.rows))
            pooled.copy_to_host_async()
        self._in_flight.append(_Dispatched(plan, sampled, scores, pooled, time.perf_counter_ns()))

    def _put_newest(self, rows: Sequence[Row]) -> None:
        """Tell the programs the newest token of each row: after drafts only the host knows which were accepted."""
        tokens = np.zeros(self.programs.slots, np.int32)
        for row in rows:
            tokens[row.request.slot] = row.request.tokens[-1]
        self.programs.put_newest(tokens)

    def read(self) -> tuple[StepPlan, Iterator[tuple[Row, list[int], Int[np.ndarray, "tokens columns"] | None]]]:
        """Wait for the oldest dispatched step; return it, and an iterator of (row, its new tokens, scores) of its rows.

        Scores are rows of `pack_scores`, or their first two columns from `ScoredPrograms`; None: the step has none.
        What it tells of prompts is handed to their requests.
        """
        plan, sampled, prompt_scores, pooled, dispatched = self._in_flight.popleft()
        began = max(dispatched, self._read_at)
        asked = time.perf_counter_ns()
        tokens = np.asarray(sampled)
        self._read_at = time.perf_counter_ns()
        loops = self._loops(plan)
        if loops and plan.drafts:
            plan.steps = max(1, int(tokens[..., -2].any(axis=1).sum()))  # the others did not run
        self._stats.steps += plan.steps
        self._stats.draft_steps += _count_guessing(plan, tokens, loops=loops)
        kind = "decode" if plan.shape is None else f"chunks {plan.shape.rows}x{plan.shape.width}"
        self._stats.programs[kind] += 1
        self._stats.nanoseconds[kind] += self._read_at - began
        self._stats.waiting += self._read_at - asked
        if plan.shape is None:
            before = self._step_seconds[plan.drafts]
            self._step_seconds[plan.drafts] = (before + 1e-9 * (self._read_at - began) / plan.steps) / 2
        if prompt_scores is not None:
            _give_scores(plan, np.asarray(prompt_scores))
        if pooled is not None:
            for row, states in zip(plan.chunks, np.asarray(pooled), strict=False):
                if row.request.pools:
                    row.request.add_states(row.start, states)
        if loops and plan.drafts:
            return plan, ((row, new, None) for row, new in self._read_draft_steps(plan, tokens))
        read = self._read_steps if loops else self._read_one
        if tokens.ndim == (2 if loops else 1):
            return plan, ((row, new, None) for row, new, _ in read(plan, tokens))
        return plan, ((row, new, tokens[place]) for row, new, place in read(plan, tokens[..., 0]))

    def _copy_states(self, copies: Sequence[tuple[int, int]]) -> None:
        """Dispatch copies of rows of the caches of fixed size, each (from, to)."""
        self.programs.copy_states(copies)

    def _catch_up(self, plan: StepPlan) -> None:
        """Dispatch what a draft model has to run before it guesses, see `StepPlan.behind`: here nothing."""

    def _loops(self, plan: StepPlan) -> bool:
        """Return True if a plan runs as a program of several decode steps, as single steps without drafts do too."""
        if plan.shape is not None or self._steps == 1:
            return False
        if plan.drafts:
            return plan.steps > 1
        return not any(row.request.single_steps for row in plan.decoded)

    def _width_of(self, drafts: bool) -> int:
        """Return the tokens of a decoded row in steps with drafts or without."""
        return self._width if drafts else 1

    def _row_count(self, plan: StepPlan) -> int:
        """Return the compiled batch size to which the decoded sequences of a step are padded."""
        if plan.shape is not None:
            return 0 if plan.alone else self.programs.slots
        counts = (count for count in self._row_counts if count >= len(plan.decoded))
        return next((count for count in counts if self.has_compiled(StepKind(plan.drafts, count))), self.programs.slots)

    def _run_steps(self, plan: StepPlan) -> Int[Array, "steps rows ..."]:
        rows = self.programs.table.describe(plan.decoded, self._row_count(plan))
        mode = choose_mode(plan.decoded)
        if plan.drafts:
            return self._run_draft_steps(plan.decoded, rows, plan.steps, mode)
        return self.programs.run_steps(rows, plan.steps, self._steps, mode)

    def _run_draft_steps(
        self, decoded: Sequence[Row], rows: Int[np.ndarray, "R columns"], steps: int, mode: Mode
    ) -> Int[Array, "steps R found"]:
        """Dispatch a program of several steps with drafts; `rows` are the descriptions of `decoded`, and padding."""
        return self._ngrams.run(decoded, rows, self._recent(decoded, len(rows)), steps, mode)

    def _run_one(self, plan: StepPlan) -> Int[Array, " samples"]:
        return self._run(plan, self._arguments(plan))

    def _run(self, plan: StepPlan, arguments: StepArguments) -> Int[Array, " samples"]:
        count = len(arguments.rows)
        newest = self._newest(plan.decoded, count) if plan.drafts else None
        recent = self._recent(plan.decoded, count) if plan.drafts else None
        return self.programs.run(*arguments, newest, recent, extended=is_extended(plan))

    def _arguments(self, plan: StepPlan) -> StepArguments:
        programs = self.programs
        count = self._row_count(plan)
        rows = programs.table.describe(plan.decoded, count)
        chunks = None
        tokens = None
        if plan.shape is not None:
            chunks = programs.table.describe(plan.chunks, plan.shape.rows)
            tokens = pad_chunks(plan.chunks, plan.shape)
        mask = self._mask(plan, count * self._width_of(plan.drafts))
        return StepArguments(rows, chunks, tokens, choose_mode(plan.rows) if mask is None else "limited", mask)

    def _newest(self, rows: Sequence[Row], count: int) -> Int[np.ndarray, "rows D"]:
        """Return each row's newest token and its draft tokens, int32 [rows, D]."""
        tokens = np.zeros((count, self._width), np.int32)
        for line, row in zip(tokens, rows, strict=False):
            line[-row.count :] = (row.request.tokens[-1], *row.drafts)
        return tokens

    @property
    def _runs_again(self) -> bool:
        """True if the tokens that a step accepted are run again by the next one."""
        return self.programs.replays

    def _recent(self, rows: Sequence[Row], count: int) -> RecentTokens | None:
        """Return each row's newest tokens, those that its last step accepted; None if no model runs them again."""
        if not self._runs_again:
            return None
        tokens = np.zeros((count, self._width), np.int32)
        counts = np.zeros(count, np.int32)
        for number, row in enumerate(rows):
            tokens[number, -row.again :] = row.request.tokens[-row.again :]
            counts[number] = row.again
        return RecentTokens(tokens, counts)

    def _mask(self, plan: StepPlan, decoded: int) -> Int[np.ndarray, "samples words"] | None:
        """Return the bitmask of tokens that grammars allow for each sample; None if it is not needed."""
        width = self._width_of(plan.drafts)
        places = [*range(width - 1, width * len(plan.decoded), width), *range(decoded, decoded + len(plan.chunks))]
        constraints = [
            (place, row.request.constraint)
            for place, row in zip(places, plan.rows, strict=True)
            if row.index is not None
        ]
        if not is_extended(plan) and all(constraint is None for _, constraint in constraints):
            return None
        total = decoded + (0 if plan.shape is None else plan.shape.rows)
        mask = np.full((total, self.programs.words), -1, np.int32)
        for place, constraint in constraints:
            if constraint is not None:
                constraint.fill_mask(mask[place])
        return mask

    def _read_steps(self, plan: StepPlan, sampled: Int[np.ndarray, "steps rows"]) -> Iterator[RowTokensRead]:
        for place, (row, tokens) in enumerate(zip(plan.decoded, sampled.T.tolist(), strict=False)):
            yield row, tokens[: row.count], (slice(row.count), place)

    def _read_draft_steps(
        self, plan: StepPlan, found: Int[np.ndarray, "steps rows found"]
    ) -> Iterator[tuple[Row, list[int]]]:
        """Yield the tokens that several steps with drafts gave each row, from the results of `DraftLoop.run`."""
        for place, row in enumerate(plan.decoded):
            new = list[int]()
            for *tokens, given, guessed in found[: plan.steps, place].tolist():
                if not given:
                    break
                new += tokens[:given]
                row.last = given
                self._count_drafts(row, guessed, given - 1)
                if not row.request.stop_tokens.isdisjoint(tokens[:given]):
                    break  # what follows is not part of the answer
            yield row, new

    def _count_drafts(self, row: Row, guessed: int, accepted: int) -> None:
        """Add a row's tokens that were guessed, and those of them that were right, to the statistics."""
        if row.request.finish_reason is None:
            self._stats.draft_tokens += guessed
            self._stats.accepted_tokens += accepted

    def _read_one(self, plan: StepPlan, sampled: Int[np.ndarray, " samples"]) -> Iterator[RowTokensRead]:
        tokens = sampled.tolist()
        width = self._width_of(plan.drafts)
        for place, row in enumerate(plan.decoded, 1):
            first = place * width - row.count
            accepted = accept(row.drafts, tokens[first : place * width])
            self._count_drafts(row, len(row.drafts), len(accepted) - 1)
            yield row, accepted, slice(first, first + len(accepted))
        first = len(tokens) - (0 if plan.shape is None else plan.shape.rows)
        for place, row in enumerate(plan.chunks, first):
            if row.index is not None:
                yield row, [tokens[place]], slice(place, place + 1)


def _count_guessing(plan: StepPlan, tokens: np.ndarray, *, loops: bool) -> int:
    """Return the number of a plan's steps in which tokens were guessed, given what it sampled."""
    if loops and plan.drafts:
        return int(tokens[..., -1].any(axis=1).sum())
    return any(row.drafts for row in plan.decoded)


def is_extended(plan: StepPlan) -> bool:
    """Return True if a request that gets a token has scores or changed logits."""
    return any(row.request.sampling.extended and row.index is not None for row in plan.rows)


def _give_scores(plan: StepPlan, packed: Int[np.ndarray, "Q C columns"]) -> None:
    """Hand the scores of the tokens of prompts to the requests that ask for them."""
    for row, scores in zip(plan.chunks, packed, strict=False):
        request = row.request
        count = request.sampling.prompt_logprobs
        if count is not None:
            found = unpack_scores(scores[len(scores) - row.count :], count)
            known = max(0, len(request.prompt) - 1 - row.start)
            request.prompt_scores[row.start : row.start + row.count] = found[:known]


def seconds_of(run: Callable[[], Array]) -> float:
    """Time a compiled program as the engine runs it, one call after another; return the seconds of a call.

    The host launches the next call while the device computes one, so that only the calls after the first count. Those
    of a program of more than `_LONG_CALL` seconds are timed one by one, as launching it takes little of that.
    """

    def shortest(calls: int) -> float:
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            [run() for _ in range(calls)][-1].block_until_ready()
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    run().block_until_ready()
    alone = shortest(1)
    return alone if alone > _LONG_CALL else (shortest(1 + _FURTHER_CALLS) - alone) / _FURTHER_CALLS
