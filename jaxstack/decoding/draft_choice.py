"""The choice between decoding steps with drafts and without, by their measured speed.

A step with drafts gives a row several tokens, but takes longer, and its tokens have to be read before the next step can
be planned, where steps without drafts run ahead of the host. What is faster depends on the number of rows, on the
models and on the text. How many tokens n-gram drafts give can be counted without a step that has them
(`jaxstack.decoding.ngram_draft.Foreseen`), so that only durations have to be measured; other drafts have to be tried.
"""

import bisect
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

_TRIAL = 32
_PROGRAMS = 4
"""Measured steps, and programs, of a whole trial: they decide between the two kinds, so that chance must not."""
_FEW = 8
_HOPELESS = 2.0
"""Measured steps after which a trial ends if a token takes this many times as long."""
_LONGEST = 4
"""Times as many steps, and programs, after which a trial ends though fewer than these could be measured."""
_MEMORY = 512
"""Newest steps of a kind, in four programs at least, whose measurements count: texts differ, and contexts grow.

With 128 the tokens that drafts gave varied so much by chance that drafts which saved an eighth were given up.
"""
_SHARE = 0.01
"""Share of the time that may be lost by trials."""
_LEAST = 0.2
"""Share of its time that a trial costs at least, which limits how often equally fast kinds are tried."""
_GAIN = 0.03
"""Share of the time that drafts must save to be begun with after a trial: what they seem to save may be chance."""
_OUTLIERS = 1 / 32
"""Share of the programs, but at least one, that is left out: those of the slowest steps."""
_ASSUMED = 1.25
"""Duration of a step with drafts beside one without, until both are measured."""
_MARGIN = 1.05
"""Times as fast that foreseen drafts have to be, as each change waits for the device."""


class DraftChoice:
    """Chooses for each number of decoded rows, in powers of two, whether steps have drafts.

    The kind that takes fewer seconds for a token of a row is used. These are the seconds between the arrivals of the
    results of its newest programs, divided by the tokens that these gave a row. A program has one step or several; all
    of its time counts, such as that in which the device waits for the host to read drafts, which steps without drafts
    do not need. The slowest program of up to 32, in seconds for a step, is left out, which may have waited for a
    compilation or another process.

    At first steps have no drafts. The other kind is tried whenever the time that trials have lost, with that which the
    next one is expected to lose, is less than a hundredth of all time. A trial ends after 32 measured steps in four
    programs at least, or after eight steps that are hopeless. Drafts are begun with if they save three hundredths of
    the time, and given up as soon as they save none. If the number of tokens is foreseen there are no trials: steps
    have drafts while their foreseen tokens make up for their duration. The first program of a kind after another is not
    measured, as its time includes waiting for those before it; nor are programs with chunks of prompts.

    Args:
      clock: returns the time in seconds.
      foresees: the number of tokens that drafts give is known before they are tried, and given to `wants`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, foresees: bool = False):
        self._clock = clock
        self.foresees = foresees
        self._sizes = defaultdict[int, _Size](_Size)
        self._time = clock()
        self._before: tuple[int, bool] | None = None

    def wants(self, rows: int, foreseen: float = 1.0) -> bool:
        """Return True if the next step is to have drafts.

        Args:
          rows: number of decoded rows.
          foreseen: tokens that a step with drafts would give a row, in the mean; used if the choice `foresees`.
        """
        size = self._sizes[_size(rows)]
        return size.gains(foreseen) if self.foresees else size.wants

    def observe(self, rows: int, drafts: bool, steps: int, tokens: int) -> None:
        """Take into account a program whose tokens have just been read.

        Args:
          rows: number of decoded rows whose answers had not ended; 0 for a program that also computed prompts.
          drafts: its steps had drafts.
          steps: number of steps.
          tokens: number of tokens that all these rows got, up to the ends of their answers.
        """
        now = self._clock()
        seconds = now - self._time
        self._time = now
        before = self._before
        self._before = None
        kind = (_size(rows), drafts)
        size = self._sizes[kind[0]]
        if rows and self.foresees:
            self._before = kind
            if before == kind:
                size.measure(drafts, seconds, steps, tokens / rows)
        # After a change of its mind, steps of the other kind may still arrive.
        elif rows and size.wants == drafts:
            self._before = kind
            size.add(seconds, steps, tokens / rows, steady=before == kind)


class _Size:
    """Measurements of steps of about the same number of rows, and the kind of steps that is used for them."""

    def __init__(self):
        self._kinds = {False: _Kind(), True: _Kind()}
        self._best = False
        self._trial: _Trial | None = None
        self._trials = 0
        self._seconds = 0.0
        self._lost = 0.0
        """Seconds that trials have lost."""
        self._newest_loss = 0.0
        """Seconds that the newest trial has lost; the next one is expected to lose as many."""

    @property
    def wants(self) -> bool:
        """True if steps are to have drafts: those of the best kind, or of the other one during a trial."""
        return self._best if self._trial is None else not self._best

    def gains(self, foreseen: float) -> bool:
        """Return True if steps with drafts that give a row so many tokens are faster, by their measured durations."""
        plain = self._kinds[False]
        drafted = self._kinds[True]
        slower = drafted.step_seconds / plain.step_seconds if plain.known and drafted.known else _ASSUMED
        return plain.known and foreseen > _MARGIN * slower

    def measure(self, drafts: bool, seconds: float, steps: int, tokens: float) -> None:
        """Add the duration of a program of either kind; see `add`."""
        self._kinds[drafts].add(seconds, steps, tokens)

    def add(self, seconds: float, steps: int, tokens: float, *, steady: bool) -> None:
        """Add a program of the wanted kind.

        Args:
          seconds: time since the program before.
          steps: number of steps.
          tokens: tokens of a row.
          steady: the program before was of the same kind and size.
        """
        kind = self._kinds[self.wants]
        if steady:
            self.measure(self.wants, seconds, steps, tokens)
        if self._trial is not None:
            # Of what is not measured all time counts, such as that of tokens that a draft model had to catch up with;
            # but not in the first trial, where programs may be compiled.
            counted = tokens * kind.seconds if steady else seconds * (self._trials > 0)
            self._trial.add(counted, steps, tokens, steady=steady)
            hopeless = self._trial.measured >= _FEW and kind.seconds > _HOPELESS * self._kinds[self._best].seconds
            if hopeless or self._trial.ended:
                self._end_trial(self._trial)
        elif self._kinds[False].known:
            self._best = self._drafts_are_faster
            self._seconds += tokens * self._kinds[self._best].seconds
            if self._lost + self._newest_loss <= _SHARE * self._seconds:
                self._trial = _Trial()

    @property
    def _drafts_are_faster(self) -> bool:
        kinds = self._kinds
        needed = 1.0 if self._best else 1 - _GAIN
        return kinds[True].known and kinds[True].seconds < needed * kinds[False].seconds

    def _end_trial(self, trial: "_Trial") -> None:
        """Count what a trial lost, and choose anew."""
        lost = trial.seconds - trial.tokens * self._kinds[self._best].seconds
        self._newest_loss = max(lost, _LEAST * trial.seconds)
        self._lost += self._newest_loss
        self._trials += 1
        self._trial = None
        self._best = self._drafts_are_faster


class _Program(NamedTuple):
    """Duration of a program, and the tokens that it gave a row; programs are ordered by the seconds of a step."""

    step_seconds: float
    seconds: float
    steps: int
    tokens: float


class _Kind:
    """Newest measurements of programs of one kind.

    Attributes:
      step_seconds: duration of a step.
      seconds: seconds for a token of a row.
    """

    def __init__(self):
        self.step_seconds = 0.0
        self.seconds = 0.0
        self._measured = deque[_Program]()
        self._slowest_last: list[_Program] = []
        self._steps = 0

    def add(self, seconds: float, steps: int, tokens: float) -> None:
        """Add the seconds of a program, the number of its steps, and the tokens that they gave a row."""
        program = _Program(seconds / steps, seconds, steps, tokens)
        self._measured.append(program)
        bisect.insort(self._slowest_last, program)
        self._steps += steps
        while len(self._measured) > _PROGRAMS and self._steps - self._measured[0].steps >= _MEMORY:
            oldest = self._measured.popleft()
            self._steps -= oldest.steps
            del self._slowest_last[bisect.bisect_left(self._slowest_last, oldest)]
        count = len(self._slowest_last)
        kept = self._slowest_last[: count - max(1, int(count * _OUTLIERS))] or self._slowest_last
        _, all_seconds, all_steps, all_tokens = map(sum, zip(*kept, strict=True))
        self.step_seconds = all_seconds / all_steps
        self.seconds = all_seconds / all_tokens

    @property
    def known(self) -> bool:
        """True if enough programs have been measured to judge by them."""
        return self._steps >= _TRIAL and len(self._measured) >= _PROGRAMS


class _Trial:
    """Programs of the kind that is not used otherwise, to measure it.

    Attributes:
      seconds, tokens: duration, and tokens of a row.
      measured: number of measured steps.
    """

    def __init__(self):
        self.seconds = 0.0
        self.tokens = 0.0
        self.measured = 0
        self._steps = 0
        self._programs = 0
        self._measured_programs = 0

    def add(self, seconds: float, steps: int, tokens: float, *, steady: bool) -> None:
        """Add a program, see `_Size.add`."""
        self.seconds += seconds
        self.tokens += tokens
        self._steps += steps
        self._programs += 1
        self.measured += steps * steady
        self._measured_programs += steady

    @property
    def ended(self) -> bool:
        """True if enough programs were measured, or too few of them can be."""
        if self.measured >= _TRIAL and self._measured_programs >= _PROGRAMS:
            return True
        return self._steps >= _LONGEST * _TRIAL and self._programs >= _LONGEST * _PROGRAMS


def _size(rows: int) -> int:
    """Return the number of a power of two that is at least `rows`, and less than twice as large."""
    return (rows - 1).bit_length()
