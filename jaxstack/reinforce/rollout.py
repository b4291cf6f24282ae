"""Rollouts: prompts are answered by the newest weights, the answers are rewarded, and they become a batch of a step.

Dimensions: P prompts, G answers to each, B = P G rows of a batch, T tokens of a row.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxstack.data.batch_source import HostBatch
from jaxstack.data.prompts import Prompt, Prompts
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.files import write_json
from jaxstack.loss import IGNORE
from jaxstack.observe.report.samples import SAMPLES
from jaxstack.reinforce.config import RolloutConfig
from jaxstack.reinforce.environment import Environment
from jaxstack.reinforce.episodes import Episode, Episodes
from jaxstack.reinforce.policy import PolicyConfig
from jaxstack.reinforce.rewards import RewardResult, Rewards, Sample
from jaxstack.reinforce.sampler import Sampler
from jaxstack.state import TrainState

_EVALUATION = 2**31
"""Offset of the seeds of evaluations, whose answers are then not those of training."""
_SHOWN_GROUPS = 2
"""Number of prompts of which answers are shown in the report."""
_SPARE = 2**30
"""Offset of the seeds of answers to prompts that replace others."""


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Answers to the prompts of a step as a batch, and values for the metrics.

    Attributes:
      batch: arrays [B, T] of `jaxstack.reinforce.policy.policy_loss`.
      metrics: values of the answers, such as `reward`.
    """

    batch: HostBatch
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class _Sampled:
    """Rewarded answers, those to a prompt one after the other.

    Attributes:
      samples: G, the number of answers to a prompt.
      prompts: the prompt of each answer [B].
      answers: [B].
      results: their rewards [B].
      rollout_seconds: time of the sampling.
      reward_seconds: time of the rewards.
    """

    samples: int
    prompts: Sequence[Prompt]
    answers: Sequence[Episode]
    results: Sequence[RewardResult]
    rollout_seconds: float
    reward_seconds: float

    def __add__(self, other: "_Sampled") -> "_Sampled":
        """Return the answers of both."""
        return _Sampled(
            self.samples,
            [*self.prompts, *other.prompts],
            [*self.answers, *other.answers],
            [*self.results, *other.results],
            self.rollout_seconds + other.rollout_seconds,
            self.reward_seconds + other.reward_seconds,
        )

    @property
    def rewards(self) -> np.ndarray:
        """The rewards, float32 [P, G]."""
        return np.array([result.total for result in self.results], np.float32).reshape(-1, self.samples)

    def groups(self, numbers: Sequence[int] | np.ndarray) -> "_Sampled":
        """Return the answers to some of the prompts, of which `numbers` are the places among the P."""
        rows = [number * self.samples + row for number in numbers for row in range(self.samples)]
        lists = (self.prompts, self.answers, self.results)
        prompts, answers, results = ([values[row] for row in rows] for values in lists)
        return dataclasses.replace(self, prompts=prompts, answers=answers, results=results)

    def shown(self) -> list[dict[str, Any]]:
        """Return the best and the worst answer to each of the first prompts as plain JSON, for the report."""
        rewards = self.rewards[:_SHOWN_GROUPS]
        rows = [
            group * self.samples + place
            for group, values in enumerate(rewards)
            for place in dict.fromkeys([int(values.argmax()), int(values.argmin())])
        ]
        return [
            {
                "prompt": self.prompts[row].text,
                "messages": [*self.answers[row].messages],
                "reward": self.results[row].total,
                "rewards": dict(self.results[row].parts),
                "truncated": self.answers[row].truncated,
                "problems": [*filter(None, [self.results[row].error]), *self.answers[row].failures],
            }
            for row in rows
        ]

    def metrics(self, names: Sequence[str]) -> dict[str, float]:
        """Return the values of all answers for the log; `names` are those of the rewards."""
        rewards = self.rewards
        found = {
            "reward": float(rewards.mean()),
            "reward_std": float(rewards.std(1, ddof=min(1, self.samples - 1)).mean()),
            "useful_groups": float(np.mean(np.ptp(rewards, axis=1) > 0)),
            **_lengths(self.answers),
            "rollout_seconds": self.rollout_seconds,
            "reward_seconds": self.reward_seconds,
        }
        if len(names) > 1:
            for name in names:
                found[f"reward_{name}"] = float(np.mean([result.parts[name] for result in self.results]))
        return found


class Rollouts:
    """Makes the batches of a run: each needs the weights after the step before.

    It is a `BatchSource` whose batches are made when they are asked for: to be read without reading ahead.

    Args:
      prompts: the prompts.
      rewards: the rewards.
      policy: number of answers, advantages, updates.
      config: number of prompts, length and temperature of answers.
      length: T.
      seed: of the sampled answers.
      say: reports rewards that fail.
      environment: tools and turns; None: a prompt has one answer.
      folder: where `SAMPLES` is written, with some answers of the newest rollout; None: nowhere.
    """

    def __init__(
        self,
        prompts: Prompts,
        rewards: Rewards,
        policy: PolicyConfig,
        config: RolloutConfig,
        length: int,
        seed: int,
        say: Callable[[str], None],
        environment: Environment | None = None,
        folder: Path | None = None,
    ):
        self.prompts = prompts
        self._episodes = Episodes(prompts, config.max_tokens, length - config.max_tokens, environment)
        self._rewards = rewards
        self._policy = policy
        self._config = config
        self._length = length
        self._seed = seed
        self._say = say
        self._folder = folder
        self._sampler: Sampler | None = None
        self._state: Callable[[], TrainState] | None = None
        self.current: Rollout | None = None
        """The newest rollout."""

    def attach(self, sampler: Sampler, state: Callable[[], TrainState]) -> None:
        """Set the sampler, and the function that returns the train state with the newest weights."""
        self._sampler = sampler
        self._state = state

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.prompts.tokenizer

    @property
    def vocab_size(self) -> int:
        """Vocabulary size that the model needs."""
        return self.prompts.vocab_size

    def describe(self) -> str:
        """Return the numbers of prompts as text."""
        return self.prompts.describe()

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Description of the prompts, which is compared when resuming."""
        return self.prompts.fingerprint

    @property
    def source_listing(self) -> list[dict[str, Any]]:
        """The files of the prompts."""
        return self.prompts.source_listing

    @property
    def largest(self) -> int:
        """Largest number of answers that are sampled at a time."""
        held_out = 2 * min(len(self.prompts.held_out), self._config.eval_prompts)
        return max(self._config.prompts * self._policy.samples, held_out)

    def batch(self, number: int, *, global_batch_size: int, rows: Sequence[int] | np.ndarray) -> HostBatch:
        """Return a batch without answers: the shapes and dtypes of all batches."""
        del number, rows
        return self._empty(global_batch_size)

    def batches(self, *, global_batch_size: int, rows: Sequence[int] | np.ndarray, start: int) -> Iterator[HostBatch]:
        """Yield a batch for each step from `start` on; each is sampled when it is asked for."""
        del global_batch_size, rows
        for step in itertools.count(start):
            number, update = divmod(step, self._policy.updates)
            if update == 0 or self.current is None:
                self.current = self._roll_out(number)
            else:
                no_time = {"rollout_seconds": 0.0, "reward_seconds": 0.0}
                self.current = dataclasses.replace(self.current, metrics={**self.current.metrics, **no_time})
            yield self.current.batch

    def evaluate(self) -> dict[str, float] | None:
        """Answer the held-out prompts once at the temperature and once greedily; None if there are none.

        Returns:
          `eval_reward`, `eval_reward_greedy`, and of the sampled answers `eval_answer_tokens`, `eval_truncated` and,
          with an environment, `eval_turns`, `eval_tool_calls` and `eval_failed_calls`.
        """
        asked = self.prompts.held_out[: self._config.eval_prompts]
        if not asked:
            return None
        began = time.perf_counter()
        seeds = [_EVALUATION + number for number in range(len(asked))]
        temperatures = [self._config.temperature] * len(asked) + [0.0] * len(asked)
        answers = self._answer([*asked, *asked], temperatures, seeds * 2)
        results = self._reward([*asked, *asked], answers)
        totals = np.array([result.total for result in results]).reshape(2, -1)
        sampled = answers[: len(asked)]
        return {
            "eval_reward": float(totals[0].mean()),
            "eval_reward_greedy": float(totals[1].mean()),
            **{f"eval_{name}": value for name, value in _lengths(sampled).items()},
            "eval_items": float(len(asked)),
            "eval_seconds": time.perf_counter() - began,
        }

    def _roll_out(self, number: int) -> Rollout:
        """Sample, reward and arrange the answers of rollout `number`."""
        wanted = self._config.prompts
        most = self._config.resample
        sampled = self._sample(number)
        further = 0
        while further < most and self._policy.counts(sampled.rewards).sum() < wanted:
            sampled += self._sample(number * most + further, spare=True)
            further += 1
        metrics = sampled.metrics(self._rewards.names)
        if most:
            metrics["rollouts"] = 1.0 + further
        counts = self._policy.counts(sampled.rewards)
        kept = np.sort(np.argsort(~counts, kind="stable")[:wanted])
        if self._folder is not None:
            write_json(self._folder / SAMPLES, {"rollout": number, "samples": sampled.shown()})
        return Rollout(self._arrange(sampled.groups(kept)), metrics)

    def _sample(self, number: int, *, spare: bool = False) -> "_Sampled":
        """Answer and reward the prompts of rollout `number`, or such as may replace them."""
        began = time.perf_counter()
        samples = self._policy.samples
        dealt = self.prompts.deal(number, self._config.prompts, spare=spare)
        asked = [prompt for prompt in dealt for _ in range(samples)]
        first = self._seed * 7919 + number * len(asked) + spare * _SPARE
        seeds = [(first + row) % _EVALUATION for row in range(len(asked))]
        answers = self._answer(asked, [self._config.temperature] * len(asked), seeds)
        answered = time.perf_counter()
        results = self._reward(asked, answers)
        return _Sampled(samples, asked, answers, results, answered - began, time.perf_counter() - answered)

    def _answer(self, prompts: Sequence[Prompt], temperatures: Sequence[float], seeds: Sequence[int]) -> list[Episode]:
        assert self._sampler is not None and self._state is not None, "attach a sampler first"
        self._sampler.load(self._state())
        try:
            return self._episodes(self._sampler.sample, prompts, temperatures, seeds)
        finally:
            self._sampler.unload()

    def _reward(self, prompts: Sequence[Prompt], answers: Sequence[Episode]) -> list[RewardResult]:
        found = self._rewards(
            [
                Sample(
                    prompt.text,
                    answer.text,
                    prompt.columns,
                    answer.truncated,
                    answer.count,
                    answer.messages,
                    answer.reward,
                )
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
        )
        errors = [result.error for result in found]
        self._warn(errors, prompts, answers, "answers have no reward, which counts as 0")
        failures = [answer.failures[0] if answer.failures else None for answer in answers]
        self._warn(failures, prompts, answers, "answers have calls that failed, which the model was told")
        return found

    def _warn(
        self, errors: Sequence[str | None], prompts: Sequence[Prompt], answers: Sequence[Episode], what: str
    ) -> None:
        """Report the number of answers with an error, and the first of them."""
        failed = [number for number, error in enumerate(errors) if error is not None]
        if failed:
            prompt, answer = prompts[failed[0]], answers[failed[0]]
            self._say(
                f"warning: {len(failed):,} of {len(errors):,} {what}; the first: {errors[failed[0]]} "
                f"(prompt {_shown(prompt.text)}, answer {_shown(answer.text)})"
            )

    def _arrange(self, sampled: "_Sampled") -> HostBatch:
        """Return the answers as a batch, one in each row; only sampled tokens have labels."""
        batch = self._empty(len(sampled.answers))
        advantages = self._policy.advantages(sampled.rewards).ravel()
        counts = np.repeat(self._policy.counts(sampled.rewards), self._policy.samples)
        for row, answer in enumerate(sampled.answers):
            ids = [*answer.prompt, *answer.tokens]
            batch["tokens"][row, : len(ids) - 1] = ids[:-1]
            places = np.flatnonzero(answer.sampled) + len(answer.prompt) - 1
            batch["labels"][row, places] = np.array(ids)[places + 1]
            batch["sampler_logprobs"][row, places] = np.array(answer.log_probabilities)[answer.sampled]
            batch["advantages"][row, places] = advantages[row]
            if counts[row] and not (answer.truncated and self._policy.masks_overlong):
                batch["shares"][row, places] = 1 / len(places)
        return batch

    def _empty(self, rows: int) -> dict[str, np.ndarray]:
        shape = (rows, self._length)
        return {
            "tokens": np.zeros(shape, np.int32),
            "labels": np.full(shape, IGNORE, np.int32),
            **{name: np.zeros(shape, np.float32) for name in self._policy.arrays},
        }


def _lengths(answers: Sequence[Episode]) -> dict[str, float]:
    """Return the mean length of answers, and of those in an environment the mean number of turns and calls."""
    found = {
        "answer_tokens": float(np.mean([answer.count for answer in answers])),
        "truncated": float(np.mean([answer.truncated for answer in answers])),
    }
    if any(answer.reward is not None for answer in answers):
        found["turns"] = float(np.mean([answer.turns for answer in answers]))
        found["tool_calls"] = float(np.mean([answer.calls for answer in answers]))
        found["failed_calls"] = float(np.mean([len(answer.failures) for answer in answers]))
    return found


def _shown(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 200 else f"{shown[:197]}..."
