"""The work of reinforce.py for all implementations: its files in a folder, its reward, and what is said of its steps.

The folder has `tokenizer.json`, whose ids are words, and which opens a text by the id 0; `prompts.jsonl`, prompts of
random words, all of one length; and `my_rewards.py`, the reward of an answer for jaxstack.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np

from benchmarks.clocks import GpuClocks

TOKENIZER = "tokenizer.json"
PROMPTS = "prompts.jsonl"
REWARDS = "my_rewards.py"
START = "<s>"
"""The token that opens a text."""
WARMUP = 2
"""Steps before the measurement."""
FEWEST = 3
"""Fewest measured steps."""
_WORK = "work.json"
_ROLLOUTS = 16
"""Rollouts until the prompts repeat."""
_REWARD = '''"""The reward of an answer: the share of its words that end with an even digit."""


def even_share(samples):
    words = [sample.answer.split() for sample in samples]
    return [sum(word[-1] in "02468" for word in answer) / max(len(answer), 1) for answer in words]
'''


@dataclass(frozen=True)
class Work:
    """Sizes of a rollout.

    Attributes:
        model: Overrides of jaxstack's configuration that choose the model.
        vocabulary: Number of ids.
        prompts: Prompts of a step.
        samples: Answers to each prompt.
        prompt_tokens: Tokens of a prompt, the first of which opens a text.
        answer_tokens: Tokens of an answer.
        microbatches: Parts in which ours trains on the answers of a step.
    """

    model: tuple[str, ...]
    vocabulary: int
    prompts: int
    samples: int
    prompt_tokens: int
    answer_tokens: int
    microbatches: int

    @property
    def answers(self) -> int:
        """Answers of a step."""
        return self.prompts * self.samples

    @property
    def length(self) -> int:
        """Tokens of a prompt with its answer."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def shape(self) -> str:
        """Sizes of a step as text."""
        return f"{self.prompts} x {self.samples} answers, {self.prompt_tokens} + {self.answer_tokens} tokens"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the sizes that `write` wrote."""
        found = json.loads((folder / _WORK).read_text(encoding="utf-8"))
        return cls(**{**found, "model": tuple(found["model"])})

    def write(self, folder: Path) -> None:
        """Write the files of the work into a folder."""
        (folder / _WORK).write_text(json.dumps(asdict(self)), encoding="utf-8")
        (folder / REWARDS).write_text(_REWARD, encoding="utf-8")
        write_tokenizer(folder / TOKENIZER, self.vocabulary)
        random = np.random.default_rng(0)
        ids = random.integers(1, self.vocabulary, (_ROLLOUTS * self.prompts, self.prompt_tokens - 1))
        lines = (json.dumps({"prompt": " ".join(f"w{i}" for i in row)}) for row in ids.tolist())
        (folder / PROMPTS).write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_tokenizer(path: Path, vocabulary: int) -> None:
    """Write a tokenizer of `vocabulary` ids: the word `w7` is the id 7, and the id 0 opens a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {START: 0, **{f"w{i}": i for i in range(1, vocabulary)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=START))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore
        single=f"{START} $A", special_tokens=[(START, 0)]
    )
    tokenizer.add_special_tokens([START])
    tokenizer.save(str(path))


def even_share(answers: Iterable[str]) -> list[float]:
    """Return the reward of each answer: the share of its words that end with an even digit."""
    words = [answer.split() for answer in answers]
    return [sum(word[-1] in "02468" for word in answer) / max(len(answer), 1) for answer in words]


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step, and of its parts.

    Attributes:
        step: From the end of the step before to its end.
        rollout: Sampling of the answers, with what it needs each step, such as a copy of the weights.
        reward: Decoding of the answers to text, and their rewards; None: not known.
        train: The rest of the step.
    """

    step: float
    rollout: float
    reward: float | None
    train: float


class Measurement:
    """Decides how many steps are measured, and summarises them.

    Args:
        work: The sizes of a step.
        seconds: Length of the measurement after the steps of `WARMUP`.
        longest: Seconds of all steps after which fewer than `FEWEST` will do.
    """

    def __init__(self, work: Work, seconds: float, longest: float):
        self._work = work
        self._seconds = seconds
        self._longest = longest
        self._steps: list[StepSeconds] = []
        self._began = 0.0
        self._clocks = GpuClocks()

    def add(self, step: StepSeconds) -> bool:
        """Add a step that has ended; return False once enough steps were measured."""
        self._steps.append(step)
        count = len(self._steps) - WARMUP
        if count == 0:
            self._began = time.perf_counter()
            self._clocks.__enter__()
        late = sum(step.step for step in self._steps) > self._longest
        enough = count >= FEWEST and time.perf_counter() - self._began >= self._seconds
        if count < 1 or not (enough or late):
            return True
        self._clocks.__exit__(None, None, None)
        return False

    @property
    def row(self) -> dict[str, Any]:
        """The fields of a result that follow from the measured steps; times are medians."""
        measured = self._steps[WARMUP:]
        rewards = [step.reward for step in measured if step.reward is not None]
        seconds = median(step.step for step in measured)
        rollout = median(step.rollout for step in measured)
        work = self._work
        return {
            "step_seconds": seconds,
            "rollout_seconds": rollout,
            "reward_seconds": median(rewards) if rewards else None,
            "train_seconds": median(step.train for step in measured),
            "rollout_share": rollout / seconds,
            "samples_per_second": work.answers / seconds,
            "tokens_per_second_per_device": work.answers * work.length / seconds,
            "sampled_tokens_per_second": work.answers * work.answer_tokens / rollout,
            "warmup_step_seconds": [step.step for step in self._steps[:WARMUP]],
            "measured_steps": len(measured),
            **self._clocks.row,
        }


def check_lengths(lengths: Sequence[int], work: Work) -> None:
    """Check that all answers have the wanted length.

    Raises:
        SystemExit: One has another length, so that the work was less.
    """
    wrong = [length for length in lengths if length != work.answer_tokens]
    if wrong or len(lengths) != work.answers:
        raise SystemExit(
            f"{len(wrong)} of {len(lengths)} answers (of {work.answers} wanted) have another number of tokens than "
            f"{work.answer_tokens}: {sorted(set(wrong))[:5]}"
        )


def timed(function: Callable[..., Any], spent: list[float], wait: Callable[[], object]) -> Callable[..., Any]:
    """Return the function such that each call appends its seconds to `spent`, once `wait` has returned."""

    def call(*arguments: Any, **options: Any) -> Any:
        wait()
        began = time.perf_counter()
        found = function(*arguments, **options)
        wait()
        spent.append(time.perf_counter() - began)
        return found

    return call
