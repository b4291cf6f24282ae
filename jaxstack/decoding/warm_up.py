"""Compiles the programs of an engine while it answers requests."""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Literal, TypeAlias

import jax

from jaxstack.decoding.compilation import cache_events
from jaxstack.decoding.requests import Request
from jaxstack.decoding.runner import Runner
from jaxstack.decoding.schedule import Scheduler
from jaxstack.decoding.step_shapes import ChunkShape, StepKind

WarmUp: TypeAlias = Literal["all", "first", "cached", False]
"""Programs that an engine compiles before it answers."""


def first_kinds(kinds: Sequence[StepKind], shapes: Sequence[ChunkShape]) -> list[StepKind]:
    """Return the kinds of steps that suffice for most requests: the smallest chunks beside all slots, and all slots."""
    return [StepKind(kinds[0].drafts, max(kind.rows for kind in kinds), shape) for shape in (shapes[0], None)]


class GradualWarmUp:
    """Compiles first the programs that suffice for most requests, and the others between steps, in threads.

    The first ones are those of the smallest chunks of prompts and of all batch slots. Others are used as soon as they
    are compiled. Requests with a constraint, scores, changed logits or an adapter start when their own programs are
    compiled, and are overtaken by others. Prompts get the smallest chunks beside decoded rows until all steps have been
    timed. The engine's thread traces programs, and then times steps, one kind at a time, so that a new request waits
    for one at most; while requests run that takes at most half of its time. Where layers have states, steps are timed
    while the last slot is free.

    Args:
      runner: runs the steps.
      scheduler: plans them.
      time_steps: returns an iterator that times a kind of steps at each turn, and at its end sets which chunks the
        scheduler may plan beside decoded rows.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, time_steps: Callable[[], Generator[None]]):
        self._runner = runner
        self._scheduler = scheduler
        self._timing = time_steps()
        self._compiler = runner.programs.compiler
        self._compiling = deque[tuple[StepKind, Sequence[Future[jax.stages.Compiled]]]]()
        self._resume = 0.0
        self.done = False
        self.cached = False
        """True if the first programs were in JAX's persistent compilation cache."""
        kinds = runner.step_kinds(scheduler.shapes, scheduler.shapes_alone)
        smallest = scheduler.shapes[0]
        first = first_kinds(kinds, scheduler.shapes)
        self._slots = first[0].rows
        self._drafts = first[0].drafts
        before = cache_events().copy()
        with self._compiler.compiling(), runner.starting():
            runner.run_padding(first, plain=True)
        found = cache_events() - before
        self.cached = found["cache_hits"] > 0 and not found["cache_misses"]
        runner.compiled = {*first}
        self._changed = {*first}
        """Kinds of steps that requests with constraints and the like need and that are not compiled yet."""
        self._adapted = {kind for kind in kinds if kind.adapted}
        """Kinds of steps that requests with adapters need."""
        scheduler.may_start = self._may_start
        scheduler.has_compiled = self._has_compiled
        scheduler.may_draft = self._drafts
        scheduler.shapes_beside = lambda depth: (smallest,)
        self._left = deque([*first, *(kind for kind in kinds if kind not in first)])

    def advance(self) -> bool:
        """Start to compile further programs, or time some steps, if it is time; return False if nothing was done.

        To be called by the thread that runs the steps, which may wait for the device.
        """
        began = time.perf_counter()
        requests = self._scheduler.running
        self._collect()
        if self._left and self._compiler.has_room and (began > self._resume or not requests):
            self._start(self._left.popleft())
        elif not self._left and not self._compiling and self._may_time(began):
            self._time_or_end()
        else:
            return False
        self._resume = 2 * time.perf_counter() - began
        return True

    def stop(self) -> None:
        """Compile no more."""
        self._compiler.stop()
        self._timing.close()
        self.done = True

    def cancel(self) -> None:
        """Compile no more, and let plans use all programs and draft: the engine compiles what is left."""
        self.stop()
        self._scheduler.may_draft = True
        self._allow_all()

    def _start(self, kind: StepKind) -> None:
        """Trace the programs of a kind of steps, which threads compile."""
        with self._runner.starting() as started:
            self._runner.run_padding([kind])
        self._compiling.append((kind, started))

    def _collect(self) -> None:
        """Let plans use the programs that have been compiled."""
        assert self._runner.compiled is not None
        while self._compiling and all(one.done() for one in self._compiling[0][1]):
            kind = self._compiling.popleft()[0]
            self._runner.compiled.add(kind)
            self._changed.discard(kind)
            self._adapted.discard(kind)
            if not self._left and not self._compiling:
                self._compiler.finish()
                self._scheduler.may_draft = True

    def _may_start(self, request: Request) -> bool:
        lacking = (request.single_steps and self._changed) or (request.adapter is not None and self._adapted)
        return not lacking

    def _has_compiled(self, shape: ChunkShape, alone: bool) -> bool:
        return self._runner.has_compiled(StepKind(self._drafts, 0 if alone else self._slots, shape))

    def _may_time(self, now: float) -> bool:
        return not self._scheduler.running or (now > self._resume and self._scheduler.spares_last_slot)

    def _time_or_end(self) -> None:
        """Time a kind of steps; when all have been timed, plans may have any shapes from now on."""
        try:
            next(self._timing)
        except StopIteration:
            self._allow_all()
            self.done = True

    def _allow_all(self) -> None:
        self._runner.compiled = None
        self._scheduler.has_compiled = lambda shape, alone: True
        self._scheduler.may_start = lambda request: True
