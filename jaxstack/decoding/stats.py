"""Statistics of an engine: counters since its start, and its current state."""

import dataclasses
from collections import Counter


@dataclasses.dataclass
class EngineStats:
    """Totals counted since the serving engine was started, such as requests and tokens.

    Attributes:
      prompt_tokens: tokens of the prompts that have started.
      computed_tokens: prompt tokens that were computed, those after a preemption included.
      generated_tokens: tokens of answers.
      steps: steps that were dispatched.
      draft_tokens, accepted_tokens: tokens that were guessed, and those of them that were right.
      finished: answers by the reason of their end.
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
    draft_tokens: int = 0
    accepted_tokens: int = 0
    finished: Counter[str] = dataclasses.field(default_factory=Counter)
    programs: Counter[str] = dataclasses.field(default_factory=Counter)
    nanoseconds: Counter[str] = dataclasses.field(default_factory=Counter)
    waiting: int = 0

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
