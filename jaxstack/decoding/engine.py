"""The serving engine: generates answers to many requests at once by continuous batching over one model.

`Engine.submit` returns a `Request` at once; a thread runs steps as long as there are requests. All programs are
compiled at the start, so that no request waits for a compilation.
"""

import contextlib
import logging
import operator
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from functools import partial

import numpy as np
from jaxtyping import Int

from jaxstack.decoding.adapter_places import AdapterPlaces
from jaxstack.decoding.cache_room import choose_room, shares_pages
from jaxstack.decoding.config import EngineConfig
from jaxstack.decoding.decode import ModelOnMesh
from jaxstack.decoding.draft_choice import DraftChoice
from jaxstack.decoding.draft_model import DraftPrograms
from jaxstack.decoding.draft_runner import DraftRunner
from jaxstack.decoding.mtp_draft import PredictionPrograms, draft_cache_bytes, predicts_tokens
from jaxstack.decoding.pages import ROOT, PagePool, salted_root
from jaxstack.decoding.request_limits import RequestLimits
from jaxstack.decoding.requests import Constraint, FinishReason, Request, until_end, until_end_of_constraint
from jaxstack.decoding.runner import EngineState, EngineStats, Runner
from jaxstack.decoding.sampling import Sampling
from jaxstack.decoding.schedule import Scheduler
from jaxstack.decoding.step import Programs
from jaxstack.decoding.step_shapes import StepShapes, chunk_shapes, decode_batch_sizes
from jaxstack.decoding.warm_up import GradualWarmUp, WarmUp, first_kinds
from jaxstack.errors import ConfigError, JaxstackError, memory_shortage
from jaxstack.models.adapter_stack import AdapterMatrices

_WARM_UP_SECONDS = 0.02
"""Seconds after which an idle engine that compiles programs in threads looks whether they are ready."""


class EngineBusy(JaxstackError):
    """Raised when a request is refused because the engine's waiting queue is full; the client may retry later."""


class EngineClosed(JaxstackError):
    """Raised when the engine refuses a request because it is shutting down or has failed."""


class Engine:
    """Generates answers to many requests at once, in a thread. Use it as a context manager, or call `close`.

    Args:
      model: the model on its mesh, such as `jaxstack.run.load.load(directory).decoder`.
      config: sizes.
      vocab_size: number of ids that may be generated, if the model has more rows than the tokenizer has ids.
      stop_tokens: ids that end an answer, and are not part of it.
      draft: a smaller model on the same mesh with the same tokenizer, which guesses `config.draft_tokens` tokens per
        step; None: the model guesses them if it has layers for multi-token prediction, or else they are taken from
        earlier text.
      shapes: shapes of its steps, whose numbers of tokens `model.batch_unit` divides; None: chosen by `config`.
      make_programs: class of its compiled programs; None: `Programs`. `ScoredPrograms` gives log-probabilities, and
        takes no drafts.
      warm_up: "all": compile all programs now; "first": those that suffice for most requests, and the others while
        requests are answered, see `GradualWarmUp`, which needs `start`; "cached": as "first" if those are in JAX's
        persistent compilation cache, otherwise as "all", for GPUs, on which XLA measures kernels while it compiles
        (what an earlier start was ended before, or what new settings need, is then compiled beside requests);
        False: each when it is first needed.
      start: start the thread; otherwise the caller calls `step`.

    Raises:
      ConfigError: the attention of a model has no cache, the memory is too small, the mesh splits batches over devices
        and no `shapes` are given, there are no draft tokens for the draft model, or `half_batches_from` is set for a
        model with `scan_layers`.
    """

    def __init__(
        self,
        model: ModelOnMesh,
        config: EngineConfig | None = None,
        *,
        vocab_size: int | None = None,
        stop_tokens: Collection[int] = (),
        draft: ModelOnMesh | None = None,
        shapes: StepShapes | None = None,
        make_programs: type[Programs] | None = None,
        warm_up: WarmUp = "all",
        start: bool = True,
    ):
        self.model = model
        self.config = config or EngineConfig()
        self.stop_tokens = frozenset(stop_tokens)
        self.vocab_size = vocab_size or model.config.vocab_size or 0
        if make_programs is None:
            model.check_whole("serving")
        _check_models(model, draft, shapes, self.config)
        self.adapters = AdapterPlaces(model, self.config.adapters, self.config.adapter_rank)
        # The engine of a model in parts has its own programs, which do not guess.
        predicts = draft is None and make_programs is None and predicts_tokens(model, self.config)
        by_ngram = draft is None and not predicts
        models = [model] if draft is None else [model, draft]
        room = choose_room(models, self.config, partial(draft_cache_bytes, model) if predicts else lambda room: 0)
        self.slots = room.slots
        self.context = room.length
        states = not all(map(shares_pages, models))
        self.pool = PagePool(
            room.pages,
            room.page_size,
            cache_prefixes=self.config.prefix_cache,
            snapshots=room.snapshots if states else None,
        )
        steps = shapes or _choose_shapes(self.config, room.slots)
        self.scheduler = Scheduler(
            room.slots,
            self.context,
            steps.chunks,
            self.pool,
            self.config.draft_tokens,
            draft_model=draft is not None or predicts,
            choice=DraftChoice(foresees=by_ngram) if _chooses_drafts(self.config, steps) else None,
            states=states or predicts,
        )
        self.programs = (make_programs or Programs)(
            model,
            room,
            vocab_size=vocab_size,
            halves_from=_halves_from(model, self.config),
            constant_steps=steps.constant_steps,
        )
        self.programs.replays = self.config.draft_tokens > 0 and not shares_pages(model)
        # Steps with shapes of their own compute so many prompt tokens that their states would take much memory.
        self.programs.keeps_states = shapes is None
        self.programs.adapts = self.config.adapters > 0
        self.limits = RequestLimits(model, self.programs, self.context, self.vocab_size)
        self.stats = EngineStats()
        self.failure = None
        self._runner = self._make_runner(steps, draft, predicts=predicts)
        self._requests = set[Request]()
        self._adapted = weakref.WeakSet[Request]()
        """Requests with adapters, whose places are free again when they have ended."""
        self._new: deque[Request] = deque()
        self._cancelled: deque[Request] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._blocks = 0
        """Number of `with` blocks of `together` that have not ended."""
        self._count = 0
        self._warming = self._begin_warm_up(warm_up)
        self._thread = threading.Thread(target=self._run, name="jaxstack engine", daemon=True) if start else None
        if self._thread is not None:
            self._thread.start()

    def _make_runner(self, steps: StepShapes, draft: ModelOnMesh | None, *, predicts: bool) -> Runner:
        """Return what runs the steps: with a draft model, with the model's own predictions, or without either.

        Tells the scheduler whether what the caches have of accepted drafts is approximate.
        """
        width = 1 + self.config.draft_tokens
        self.scheduler.approximate = self.programs.replays
        chooses = self.scheduler.choice is not None
        kinds = (False, True) if chooses else (self.config.draft_tokens > 0,)
        if draft is not None:
            config = self.config
            drafts = DraftPrograms(self.programs, draft, width, config.draft_layers_together, config.draft_steps)
        elif predicts:
            drafts = PredictionPrograms(self.programs, width, self.config.draft_steps)
        else:
            return Runner(self.programs, self.config, self.stats, steps.decode, kinds)
        self.scheduler.approximate |= drafts.approximate
        self.scheduler.catches_up = drafts.catches_up
        self.scheduler.fills_prompts = drafts.fills_prompts
        return DraftRunner(self.programs, self.config, self.stats, steps.decode, kinds, drafts)

    def _begin_warm_up(self, warm_up: WarmUp) -> GradualWarmUp | None:
        """Compile the programs that `warm_up` names; return what compiles the others, if any are left."""
        if warm_up in ("first", "cached"):
            gradual = GradualWarmUp(self._runner, self.scheduler, self._time_steps)
            if warm_up == "first" or gradual.cached:
                return gradual
            gradual.cancel()
        if warm_up:
            self.warm_up()
        return None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Sampling | None = None,
        *,
        seed: int = 0,
        stop_tokens: Collection[int] | None = None,
        constraint: Constraint | None = None,
        answer: Sequence[int] = (),
        priority: int = 0,
        adapter: str | None = None,
        cache_salt: str | None = None,
    ) -> Request:
        """Submit a prompt for generation; return the request, which yields the answer's tokens as they are generated.

        Args:
          prompt: token ids.
          max_tokens: token limit of the answer.
          sampling: temperature and limits; default: `Sampling()`.
          seed: the answer depends on it and on the prompt alone (up to rounding: XLA may choose another matmul for
            another number of rows).
          stop_tokens: ids that end the answer; default: those of the engine.
          constraint: which tokens are allowed, for this request alone; default: all.
          answer: first tokens of the answer, which count for `max_tokens`: it goes on as if they had been sampled.
          priority: requests with a lower number start first.
          adapter: name of the adapter to generate it with; None: none.
          cache_salt: share cached prefixes only with requests that have the same; None: with those that have none.

        Raises:
          ConfigError: there is no such adapter; the prompt is empty, has unknown ids, or is too long with its answer;
            too many tokens are to be scored, or this engine cannot score them.
          EngineBusy: too many requests wait.
          EngineClosed: the engine is shutting down, or has failed.
        """
        self.limits.check_prompt(prompt, max_tokens)
        self.limits.check_sampling(sampling, max_tokens)
        with self._changed:
            placed = None if adapter is None else self.adapters.find(adapter)
            request = Request(
                list(map(operator.index, prompt)),
                max_tokens,
                sampling,
                seed=seed % 2**32,
                stop_tokens=self.stop_tokens if stop_tokens is None else stop_tokens,
                constraint=constraint,
                cancel=self._cancel,
                answer=answer,
                priority=priority,
            )
            request.root = salted_root(ROOT if placed is None else placed.root, cache_salt)
            if placed is not None:
                request.adapter = placed
                self._adapted.add(request)
            return self._enqueue(request)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Submit the requests of this `with` block together: an idle engine starts none of them before its end.

        Their prompts then share steps from the first one on. An engine that is running takes them as they come. Other
        threads may submit requests meanwhile, too. Wait for the answers after the block: in it there may be none.
        """
        with self._changed:
            self._blocks += 1
        try:
            yield
        finally:
            with self._changed:
                self._blocks -= 1
                self._changed.notify_all()

    def load_adapter(self, name: str, matrices: AdapterMatrices) -> None:
        """Load an adapter, while requests run.

        Raises:
          ConfigError: it does not fit the model, its name is taken, or no place of `engine.adapters` is free.
        """
        self.adapters.load(name, matrices, self._used_adapters)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; unfinished requests go on with it.

        Raises:
          ConfigError: there is none of this name.
        """
        self.adapters.unload(name)

    @property
    def adapter_names(self) -> Sequence[str]:
        """Names of the loaded adapters."""
        return self.adapters.names

    def _used_adapters(self) -> set[int]:
        with self._changed:
            running = [request.adapter for request in self._adapted if request.finish_reason is None]
        return {adapter.number for adapter in running if adapter is not None}

    def embed(self, prompt: Sequence[int], *, priority: int = 0, cache_salt: str | None = None) -> Request:
        """Submit a prompt whose hidden states are summed up; return a request that ends after one token.

        Raises:
          ConfigError, EngineBusy, EngineClosed: as `submit`.
        """
        self.limits.check_prompt(prompt, 1)
        self.limits.check_states("embeddings need")
        request = Request(list(map(operator.index, prompt)), 1, Sampling(0), cancel=self._cancel, priority=priority)
        request.pools = True
        request.root = salted_root(ROOT, cache_salt)
        return self._enqueue(request)

    def _enqueue(self, request: Request) -> Request:
        with self._changed:
            self._check_open()
            if self.waiting + self.running >= self.most_requests:
                raise EngineBusy(f"{self.waiting} requests wait already (engine.queue: {self.config.queue}).")
            self._new.append(request)
            self._changed.notify_all()
        return request

    @property
    def running(self) -> int:
        """Number of requests that are being computed, each of which has a slot of the engine's batch."""
        return len(self.scheduler.running)

    @property
    def waiting(self) -> int:
        """Number of requests in the queue, which wait for a slot of the engine's batch."""
        return len(self.scheduler.waiting) + len(self._new)

    @property
    def most_requests(self) -> int:
        """Limit on the number of requests that run or wait at the same time."""
        return self.config.queue + self.slots

    @property
    def state(self) -> EngineState:
        """Current numbers of running and waiting requests, KV-cache pages and tokens."""
        scheduler = self.scheduler
        pool = self.pool
        return EngineState(
            self.running,
            self.waiting,
            pool.used,
            pool.count,
            scheduler.preemptions,
            scheduler.prefix_queries,
            scheduler.prefix_hits,
            self.stats,
        )

    def step(self) -> bool:
        """Run one iteration: start waiting requests, dispatch a step to the device, read tokens of an earlier step.

        Returns:
          False if there was nothing to do.
        """
        self._take_messages()
        runner = self._runner
        self.scheduler.decode_steps = runner.most_steps
        self.scheduler.draft_steps = runner.most_draft_steps
        plan = self.scheduler.plan(runner.busy)
        if plan is not None:
            runner.dispatch(plan)
            self.stats.computed_tokens += sum(row.count for row in plan.chunks)
        worked = self._warm_up_further()
        if not runner.busy:
            return worked
        if plan is None or runner.queued_steps >= self.config.steps_ahead:
            self._read()
        return True

    def warm_up(self) -> None:
        """Compile and time all programs of the engine now, so that no request has to wait for a compilation."""
        kinds = self._runner.step_kinds(self.scheduler.shapes, self.scheduler.shapes_alone)
        # Those that `GradualWarmUp` looks for in the cache come last, when the others have been stored.
        first = first_kinds(kinds, self.scheduler.shapes)
        self._runner.warm_up([*(kind for kind in kinds if kind not in first), *first])
        for _ in self._time_steps():
            pass

    @property
    def warmed_up(self) -> bool:
        """True if no program is left to compile of a gradual warm-up."""
        return self._warming is None

    def _time_steps(self) -> Generator[None]:
        """Time steps, a kind at a time, which decides how many prompt tokens may be computed beside running answers."""
        while (page := self.pool.allocate(1)) is None:
            yield
        slowdown = self.config.chunk_slowdown
        try:
            seconds = yield from self._runner.time_steps(self.scheduler.shapes, page[0], slowdown)
        finally:
            self.pool.release(page)
        self.scheduler.shapes_beside = partial(seconds.shapes_within, slowdown)

    def _warm_up_further(self) -> bool:
        """Compile further programs of a gradual warm-up; return False if there was nothing to do."""
        if self._warming is None or (self._closed and not self._requests):
            return False
        worked = self._warming.advance()
        if self._warming.done:
            self._warming = None
        return worked

    def drain(self, seconds: float) -> bool:
        """Stop accepting requests, and wait up to `seconds` for running ones to end; return False if some did not."""
        with self._changed:
            self._closed = True
        until = time.monotonic() + seconds
        while self._requests or self._new:
            if time.monotonic() > until or self.failure is not None:
                return False
            time.sleep(0.01)
        return True

    def close(self) -> None:
        """Cancel all requests and stop the engine's thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for request in [*self._requests, *self._new]:
            request.cancel()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._warming is not None:
            self._warming.stop()
            self._warming = None

    def _check_open(self) -> None:
        if self.failure is not None:
            raise EngineClosed(f"the engine has failed: {self.failure}")
        if self._closed:
            raise EngineClosed("the engine is shutting down.")

    def _run(self) -> None:
        """Main loop of the engine's thread: run steps until the engine is closed and idle."""
        try:
            while True:
                if self.step():
                    continue
                with self._changed:
                    self._changed.wait_for(self._may_go_on, None if self._warming is None else _WARM_UP_SECONDS)
                    if self._closed and not (self._new or self._cancelled or self._requests):
                        return
        except Exception as error:  # after any error, callers must not wait forever
            shortage = memory_shortage(error)
            self._fail(f"{type(error).__name__}: {error}" if shortage is None else shortage)
            if shortage is None:
                raise
            logging.getLogger(__name__).error("the engine has failed: %s; lower engine.slots.", shortage)

    def _may_go_on(self) -> bool:
        """Return True if an idle engine has something to do, or is to end."""
        told = bool(self._new or self._cancelled)
        return (told and not self._blocks) or (self._closed and (told or not self._requests))

    def _fail(self, message: str) -> None:
        with self._changed:
            self.failure = message
            requests = [*self._requests, *self._new]
            self._new.clear()
        self._requests.clear()
        for request in requests:
            request.notify("error", JaxstackError(f"the engine has failed: {message}"))

    def _cancel(self, request: Request) -> None:
        with self._changed:
            self._cancelled.append(request)
            self._changed.notify_all()

    def _take_messages(self) -> None:
        """Receive what other threads sent: queue newly submitted requests and end cancelled ones."""
        if self._blocks and not self._requests and not self._closed:
            return  # an idle engine that warms up looks for messages before the end of a block of `together`
        while self._new:
            request = self._new[0]
            self._count = self._count + 1
            request.number = self._count
            self._requests.add(request)
            self.scheduler.add(request)
            self._new.popleft()
        while self._cancelled:
            request = self._cancelled.popleft()
            if request in self._requests:
                self._finish(request, "cancelled")

    def _read(self) -> None:
        """Wait for the tokens of the oldest step on the device and append them to their answers."""
        plan, found = self._runner.read()
        given = 0
        rows = 0
        answered = 0
        for row, tokens, scores in found:
            given += len(tokens)
            if row.request.finish_reason is None:
                row.set_accepted(len(tokens))
                rows += 1
                answered += self._receive(row.request, tokens, scores)
                if plan.drafts:
                    self.scheduler.release_unused(row.request)
        self.stats.count_tokens(given + sum(row.count for row in plan.chunks), plan.steps)
        if self.scheduler.choice is not None:
            # Nobody gets what follows the end of an answer, of which programs without drafts compute more.
            self.scheduler.choice.observe(rows if plan.shape is None else 0, plan.drafts, plan.steps, answered)

    def _receive(
        self, request: Request, tokens: Sequence[int], scores: Int[np.ndarray, "tokens columns"] | None
    ) -> int:
        """Append new tokens with their scores to the answer; finish it at a stop token or at its token limit.

        Returns:
          Number of tokens up to the end, a stop token included.
        """
        if not request.count:
            self.stats.prompt_tokens += len(request.prompt)
        if request.constraint is None:
            added, reason = until_end(request, tokens)
            error = None
        else:
            added, reason, error = until_end_of_constraint(request, request.constraint, tokens)
        request.append(added, scores)
        used = len(added) + (request.stop_token is not None)
        self.stats.generated_tokens += used
        if reason is not None:
            self._finish(request, reason, error)
        else:
            self.scheduler.register_pages(request)
            request.notify()
        return used

    def _finish(self, request: Request, reason: FinishReason, error: JaxstackError | None = None) -> None:
        if request.slot is not None:
            self.programs.finish(request)
        self.scheduler.finish(request)
        if not any(other.sampling.extended for other in self.scheduler.running):
            self.programs.changes = None
        self._requests.discard(request)
        self.stats.finished[reason] += 1
        request.notify(reason, error)


def _check_models(
    model: ModelOnMesh, draft: ModelOnMesh | None, shapes: StepShapes | None, config: EngineConfig
) -> None:
    """Check that the engine's settings suit its models.

    Raises:
      ConfigError: there are no draft tokens for the draft model, or the mesh splits batches and no shapes are given.
    """
    if draft is not None and not config.draft_tokens:
        raise ConfigError("a draft model guesses engine.draft_tokens tokens per step; set it to 4, for example.")
    if shapes is None and model.batch_unit > 1:
        raise ConfigError(
            "an engine splits no batch: its mesh may have only the axis tensor, and that of `open_engine` data. "
            "`jaxstack.run.load.load(..., serving=True)` joins fsdp and expert to tensor."
        )


def _choose_shapes(config: EngineConfig, slots: int) -> StepShapes:
    """Return the shapes of the steps of an engine of this configuration, for `slots` requests at a time."""
    return StepShapes(decode_batch_sizes(slots), chunk_shapes(config.chunk, slots, config.step_tokens))


def _chooses_drafts(config: EngineConfig, steps: StepShapes) -> bool:
    """Return True if measurements decide which steps have drafts.

    They do not where the steps must be the same in several processes, whose measurements differ.
    """
    return config.draft_tokens > 0 and config.drafts == "auto" and not steps.constant_steps


def _halves_from(model: ModelOnMesh, config: EngineConfig) -> int | None:
    """Return the number of tokens from which a step runs on two half-batches; None without tensor parallelism.

    Raises:
      ConfigError: the model's layers are stacked, so that a scan would run all of them on one half first.
    """
    if config.half_batches_from is None or model.rules.mesh.shape["tensor"] == 1:
        return None
    if model.config.scan_layers and model.config.num_layers > 1:
        raise ConfigError(
            "engine.half_batches_from needs unrolled layers: a scan would run all layers on one half before the other "
            "starts. Set model.scan_layers=false."
        )
    return config.half_batches_from
