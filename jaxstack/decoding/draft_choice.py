"""The choice between decoding steps with drafts and without, by their measured speed.

A step with drafts gives a row several tokens, but takes longer, and its tokens have to be read before the next step can
be planned, where steps without drafts run ahead of the host. What is faster depends on the number of rows, on the
models and on the text. How many tokens n-gram drafts give can be counted without a step that has them
(`jaxstack.decoding.ngram_draft.Foreseen`), so that only durations have to be measured; other drafts have to be tried.
"""

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable

_TRIAL = 32
"""Measured steps of a whole trial: they decide between the two kinds, so that chance must not."""
_FEW = 8
_HOPELESS = 2.0
"""Measured steps after which a trial ends if a token takes this many times as long."""
_LONGEST = 4 * _TRIAL
"""Steps after which a trial ends though fewer than these could be measured."""
_MEMORY = 128
"""Newest steps of a kind whose measurements count: texts differ, and contexts grow."""
_SHARE = 0.01
"""Share of the time that may be lost by trials."""
_LEAST = 0.2
"""Share of its time that a trial costs at least, which limits how often equally fast kinds are tried."""
_ASSUMED = 1.25
"""Duration of a step with drafts beside one without, until both are measured."""
_MARGIN = 1.05
"""Times as fast that foreseen drafts have to be, as each change waits for the device."""


class DraftChoice:
    """Chooses for each number of decoded rows, in powers of two, whether steps have drafts.

    The kind that takes fewer seconds for a token of a row is used: the median duration of its newest steps, divided by
    the mean number of tokens that they gave a row. At first that is steps without drafts. The other kind is tried for
    some steps whenever the time that trials have lost so far is less than a hundredth of all time. If the number of
    tokens is foreseen there are no trials: steps have drafts while their foreseen tokens make up for their duration.
    The first step of a kind after another is not measured, as its time includes waiting for the steps before it; nor
    are steps with chunks of prompts.

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
        """Take into account a step whose tokens have just been read.

        Args:
          rows: number of decoded rows; 0 for a step that also computed prompts.
          drafts: the step had drafts.
          steps: number of steps, if several ran as one program.
          tokens: number of tokens that all rows got.
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

    @property
    def wants(self) -> bool:
        """True if steps are to have drafts: those of the best kind, or of the other one during a trial."""
        return self._best if self._trial is None else not self._best

    def gains(self, foreseen: float) -> bool:
        """Return True if steps with drafts that give a row so many tokens are faster, by their measured durations."""
        plain, drafted = self._kinds[False], self._kinds[True]
        slower = drafted.step_seconds / plain.step_seconds if plain.known and drafted.known else _ASSUMED
        return plain.known and foreseen > _MARGIN * slower

    def measure(self, drafts: bool, seconds: float, steps: int, tokens: float) -> None:
        """Add the duration of a step of either kind, or of several as one program; see `add`."""
        self._kinds[drafts].add(seconds / steps, steps, tokens)

    def add(self, seconds: float, steps: int, tokens: float, *, steady: bool) -> None:
        """Add a step of the wanted kind, or several as one program.

        Args:
          seconds: time since the step before.
          steps: number of steps.
          tokens: tokens of a row.
          steady: the step before was of the same kind and size.
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
            if self._lost <= _SHARE * self._seconds:
                self._trial = _Trial()

    @property
    def _drafts_are_faster(self) -> bool:
        kinds = self._kinds
        return kinds[True].known and kinds[True].seconds < kinds[False].seconds

    def _end_trial(self, trial: "_Trial") -> None:
        """Count what a trial lost, and choose anew."""
        self._lost += max(trial.seconds - trial.tokens * self._kinds[self._best].seconds, _LEAST * trial.seconds)
        self._trials += 1
        self._trial = None
        self._best = self._drafts_are_faster


class _Kind:
    """Newest measurements of steps of one kind.

    Attributes:
      step_seconds: median duration of a step.
      seconds: seconds for a token of a row.
    """

    def __init__(self):
        self.step_seconds = 0.0
        self.seconds = 0.0
        self._measured = deque[tuple[float, int, float]]()
        self._steps = 0
        self._tokens = 0.0

    def add(self, seconds: float, steps: int, tokens: float) -> None:
        """Add the seconds of a step, the number of such steps, and the tokens that all of them gave a row."""
        self._measured.append((seconds, steps, tokens))
        self._steps += steps
        self._tokens += tokens
        while self._steps - self._measured[0][1] >= _MEMORY:
            _, steps, tokens = self._measured.popleft()
            self._steps -= steps
            self._tokens -= tokens
        self.step_seconds = statistics.median(seconds for seconds, _, _ in self._measured)
        self.seconds = self.step_seconds * self._steps / self._tokens

    @property
    def known(self) -> bool:
        """True if enough steps have been measured to judge by them."""
        return self._steps >= _TRIAL


class _Trial:
    """Steps of the kind that is not used otherwise, to measure it.

    Attributes:
      seconds, tokens: duration, and tokens of a row.
      measured: number of measured steps.
    """

    def __init__(self):
        self.seconds = 0.0
        self.tokens = 0.0
        self._steps = 0
        self.measured = 0

    def add(self, seconds: float, steps: int, tokens: float, *, steady: bool) -> None:
        """Add a step, see `_Size.add`."""
        self.seconds += seconds
        self.tokens += tokens
        self._steps += steps
        self.measured += steps * steady

    @property
    def ended(self) -> bool:
        """True if enough steps were measured, or too few of them can be."""
        return self.measured >= _TRIAL or self._steps >= _LONGEST


def _size(rows: int) -> int:
    """Return the number of a power of two that is at least `rows`, and less than twice as large."""
    return (rows - 1).bit_length()
