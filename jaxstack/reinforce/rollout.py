"""Rollouts: prompts are answered by the model, the answers are rewarded, and they become a batch of a step.

Dimensions: P prompts, G answers to each, B = P G rows of a batch, T tokens of a row.
"""

import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxstack.data.batch_source import HostBatch
from jaxstack.data.prompts import Prompt, Prompts
from jaxstack.data.token_rows import pack
from jaxstack.data.tokenizer import Tokenizer
from jaxstack.distributed.coordination import all_gather_arrays
from jaxstack.errors import is_full
from jaxstack.files import write_json
from jaxstack.loss import IGNORE
from jaxstack.module_arrays.module import Dict
from jaxstack.observe.report.samples import SAMPLES
from jaxstack.reinforce.ahead import Ahead, SharedDevices
from jaxstack.reinforce.config import RolloutConfig
from jaxstack.reinforce.environment import Environment
from jaxstack.reinforce.episodes import Episode, Episodes
from jaxstack.reinforce.groups import (
    Group,
    Sampled,
    answer_values,
    groups_from_arrays,
    groups_to_arrays,
    means,
    merged,
)
from jaxstack.reinforce.policy import PolicyConfig
from jaxstack.reinforce.rewards import RewardResult, Rewards, Sample
from jaxstack.reinforce.sampler import NOT_BEGUN, Answer, Sampler
from jaxstack.state import TrainState

_EVALUATION = 2**31
"""Offset of the seeds of evaluations, whose answers are then not those of training."""
_CARRIED = "carried"
"""Name in a checkpoint of answers that go on in the next rollout."""
_SPARE = 2**30
"""Offset of the seeds of answers to prompts that replace others."""


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Answers to the prompts of a step as a batch, and values for the metrics.

    Attributes:
      batch: arrays [B, T] of `jaxstack.reinforce.policy.policy_loss`.
      versions: int32 [B, T], at the places of `labels` the number of train steps after which the model had the weights
        that sampled the token; -1 elsewhere.
      metrics: values of the answers, such as `reward`.
    """

    batch: HostBatch
    versions: np.ndarray
    metrics: Mapping[str, float]

    def staleness(self, step: int) -> dict[str, float]:
        """Return by how many train steps the sampler's weights are behind, in the train step after `step` others."""
        behind = step - self.versions[self.versions >= 0]
        return {"staleness": float(behind.mean()), "staleness_largest": float(behind.max())}

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the rollout as arrays, for a checkpoint."""
        return {**self.batch, "versions": self.versions, "metrics": np.array(json.dumps(self.metrics))}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> "Rollout":
        """Return the rollout that `to_arrays` has made into arrays."""
        batch = {name: array for name, array in arrays.items() if name not in ("versions", "metrics")}
        return cls(batch, arrays["versions"], json.loads(arrays["metrics"].item()))


class Rollouts:
    """Makes the batches of a run: each needs the weights after an earlier step, see `Ahead`.

    It is a `BatchSource` whose batches are made when they are asked for, or by its own thread: to be read without
    reading ahead.

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
        self._told = False
        """True once a call of the environment has failed, which was reported."""
        self._sampler: Sampler | None = None
        self._state: Callable[[], TrainState] | None = None
        self.devices = SharedDevices()
        """Devices of the trainer and of the sampler, which is given `devices.borrow`."""
        self._ahead = Ahead[Rollout](
            self._roll_out, self._weights, self.devices, updates=policy.updates, stale_steps=config.stale_steps
        )
        self._known: Sequence[Rollout] = ()
        self._carried: Sequence[Group] = ()
        """The answers that go on in the next rollout. For the thread that samples."""
        self._shards = self._microbatches = 1
        self._process = jax.process_index()
        self._processes = jax.process_count()
        """Each process answers its share of the prompts, and then has the answers of all."""
        self.current: Rollout | None = None
        """The rollout of the newest batch."""

    def attach(
        self, sampler: Sampler, state: Callable[[], TrainState], *, shards: int = 1, microbatches: int = 1
    ) -> None:
        """Set the sampler, and the function that returns the train state with the newest weights.

        Args:
          sampler: the sampler.
          state: returns the train state.
          shards, microbatches: number of devices that the rows of a batch are split over, and of microbatches.
        """
        self._sampler = sampler
        self._state = state
        self._shards = shards
        self._microbatches = microbatches

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
    def asked(self) -> int:
        """Number of answers that this process samples in a rollout, those that are left to the next one included."""
        return (self._config.prompts + self._config.carried_prompts) // self._processes * self._policy.samples

    @property
    def largest(self) -> int:
        """Largest number of answers that are asked for at a time in this process."""
        held_out = min(len(self.prompts.held_out), self._config.eval_prompts)
        return max(self.asked, 2 * -(-held_out // self._processes))

    def batch(self, number: int, *, global_batch_size: int, rows: Sequence[int] | np.ndarray) -> HostBatch:
        """Return a batch without answers: the shapes and dtypes of all batches."""
        del number, rows
        return self._packed(self._empty(global_batch_size), [])

    def batches(self, *, global_batch_size: int, rows: Sequence[int] | np.ndarray, start: int) -> Generator[HostBatch]:
        """Yield a batch for each step from `start` on, with answers sampled by the weights that `Ahead` says."""
        del global_batch_size, rows
        ahead = self._ahead
        ahead.start(start, self._known)
        self._known = ()
        try:
            for step in itertools.count(start):
                ahead.advance(step)
                if step % self._policy.updates == 0 or self.current is None:
                    self.current = ahead.take()
                    times = {}
                else:
                    times = {"rollout_seconds": 0.0, "reward_seconds": 0.0}
                metrics = {**self.current.metrics, **times, **self.current.staleness(step)}
                self.current = dataclasses.replace(self.current, metrics=metrics)
                yield self.current.batch
        finally:
            ahead.close()

    @property
    def saved(self) -> dict[str, np.ndarray]:
        """Rollouts and parts of answers for later steps, as arrays for a checkpoint; {}: there are none.

        Setting it continues with them. Those of other settings, which have other shapes, are not used.
        """
        parts = {str(place): rollout.to_arrays() for place, rollout in enumerate(self._ahead.waiting())}
        if self._carried:
            parts[_CARRIED] = groups_to_arrays(self._carried)
        found = {f"{part}/{name}": x for part, arrays in parts.items() for name, x in arrays.items()}
        return {**found, "settings": np.array(self._settings)} if found else {}

    @saved.setter
    def saved(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._known = self._carried = ()
        if not arrays:
            return
        if arrays["settings"].item() != self._settings:
            self._say("warning: answers in the checkpoint are not used, as the run now samples others")
            return
        parts = {path.partition("/")[0] for path in arrays} - {"settings"}
        if _CARRIED in parts:
            self._carried = groups_from_arrays(_of_part(_CARRIED, arrays))
        numbers = sorted(parts - {_CARRIED}, key=int)
        self._known = [Rollout.from_arrays(_of_part(number, arrays)) for number in numbers]

    @property
    def _settings(self) -> str:
        """The settings that decide the shapes and the number of rollouts, as text."""
        places = [self._shards, self._microbatches] if self._config.packing else []
        settings = (self._policy.model_dump(mode="json"), self._config.model_dump(mode="json"))
        return json.dumps([self._length, *places, *settings])

    def evaluate(self) -> dict[str, float] | None:
        """Answer the held-out prompts once at the temperature and once greedily; None if there are none.

        Returns:
          `eval_reward`, `eval_reward_greedy`, and of the sampled answers `eval_answer_tokens`, `eval_truncated` and,
          with an environment, `eval_turns`, `eval_tool_calls` and `eval_failed_calls`.
        """
        asked = self.prompts.held_out[: self._config.eval_prompts]
        if not asked:
            return None
        self._ahead.waiting()  # the engine is theirs until they are complete
        began = time.perf_counter()
        numbers = range(len(asked))[self._process :: self._processes]
        mine = [asked[number] for number in numbers]
        seeds = [_EVALUATION + number for number in numbers]
        temperatures = [self._config.temperature] * len(mine) + [0.0] * len(mine)
        weights = self._weights()
        with self.devices.lend():
            answers = self._answer(weights, 0, mine * 2, temperatures, seeds * 2)
        results = self._reward(mine * 2, answers)
        totals = np.array([result.total for result in results]).reshape(2, -1)
        values = {"reward": totals[0], "reward_greedy": totals[1], **answer_values(answers[: len(mine)])}
        parts = self._exchange(values)
        names = dict.fromkeys(name for part in parts for name in part)
        whole = {name: np.concatenate([part[name] for part in parts if name in part]) for name in names}
        return {
            **{f"eval_{name}": value for name, value in means(whole).items()},
            "eval_items": float(len(asked)),
            "eval_seconds": time.perf_counter() - began,
        }

    def _weights(self) -> Dict:
        """Return a copy of the newest weights for the sampler."""
        assert self._sampler is not None and self._state is not None, "attach a sampler first"
        return self._sampler.weights(self._state())

    def _roll_out(self, number: int, version: int, weights: Dict) -> Rollout:
        """Sample, reward and arrange the answers of rollout `number`, with the weights after `version` steps."""
        wanted = self._config.prompts
        most = self._config.resample
        sampled, self._carried = self._sample(weights, version, self._groups(number))
        further = 0
        while further < most and self._policy.counts(sampled.rewards).sum() < wanted:
            first = (number * most + further) * wanted
            others = [self._new_group(place) for place in range(first, first + wanted)]
            sampled += self._sample(weights, version, others, spare=True)[0]
            further += 1
        metrics = sampled.metrics(self._rewards.names)
        if most:
            metrics["rollouts"] = 1.0 + further
        if self._config.carried_prompts:
            metrics["carried_answers"] = float(np.mean([len({*answer.versions}) > 1 for answer in sampled.answers]))
        counts = self._policy.counts(sampled.rewards)
        kept = np.sort(np.argsort(~counts, kind="stable")[:wanted])
        if self._folder is not None and self._process == 0:
            try:
                write_json(self._folder / SAMPLES, {"rollout": number, "samples": sampled.shown()})
            except OSError as error:
                if not is_full(error):  # which the metrics report; only a person reads the samples
                    raise
        batch, versions = self._arrange(sampled.groups(kept))
        if "computed" in batch:
            metrics["computed"] = float(batch["computed"].mean())
        return Rollout(batch, versions, metrics)

    def _groups(self, number: int) -> list[Group]:
        """Return the groups of rollout `number`: those that were left to it, and new ones."""
        end = (number + 1) * self._config.prompts + self._config.carried_prompts
        count = self._config.prompts + self._config.carried_prompts - len(self._carried)
        return [*self._carried, *map(self._new_group, range(end - count, end))]

    def _new_group(self, place: int) -> Group:
        return Group(place, [NOT_BEGUN] * self._policy.samples)

    def _sample(
        self, weights: Dict, version: int, groups: Sequence[Group], *, spare: bool = False
    ) -> tuple[Sampled, list[Group]]:
        """Answer and reward as many groups as a rollout has; return them, and the groups that are left.

        Args:
          weights: the model's, after `version` steps.
          version: number of steps.
          groups: the groups.
          spare: their places are those of prompts that may replace others.
        """
        began = time.perf_counter()
        samples = self._policy.samples
        groups = groups[self._process :: self._processes]
        wanted = self._config.prompts // self._processes
        prompts = self.prompts.deal([group.place for group in groups], spare=spare)
        asked = [prompt for prompt in prompts for _ in range(samples)]
        first = self._seed * 7919 + spare * _SPARE
        seeds = [(first + group.place * samples + row) % _EVALUATION for group in groups for row in range(samples)]
        temperatures = [self._config.temperature] * len(asked)

        taken = list[Answer]()

        def enough(ended: Sequence[bool]) -> bool:
            return bool(np.reshape(ended, (-1, samples)).all(1).sum() >= wanted)

        def go_on(
            prompts: list[Sequence[int]], max_tokens: list[int], temperatures: list[float], seeds: list[int]
        ) -> list[Answer]:
            begun = [answer for group in groups for answer in group.answers]
            assert self._sampler is not None
            taken.extend(self._sampler.sample(prompts, max_tokens, temperatures, seeds, begun, enough))
            return taken

        carries = self._config.carried_prompts > 0
        episodes = self._answer(weights, version, asked, temperatures, seeds, go_on if carries else None)
        answered = time.perf_counter()
        if carries:
            groups = [Group(group.place, taken[n * samples :][:samples]) for n, group in enumerate(groups)]
        chosen = [n for n, group in enumerate(groups) if group.complete or not carries][:wanted]
        rows = [n * samples + row for n in chosen for row in range(samples)]
        asked = [asked[row] for row in rows]
        episodes = [episodes[row] for row in rows]
        results = self._reward(asked, episodes)
        seconds = answered - began, time.perf_counter() - answered
        left = [group for n, group in enumerate(groups) if n not in chosen]
        places = [groups[n].place for n in chosen]
        return self._gathered(Sampled(samples, places, asked, episodes, results, *seconds), left, spare=spare)

    def _gathered(self, sampled: Sampled, left: list[Group], *, spare: bool) -> tuple[Sampled, list[Group]]:
        """Return what all processes have sampled, and what they have left, given what this one has."""
        if self._processes == 1:
            return sampled, left
        arrays = {f"sampled/{name}": x for name, x in sampled.to_arrays().items()}
        parts = self._exchange({**arrays, **{f"left/{name}": x for name, x in groups_to_arrays(left).items()}})
        found = [_of_part("sampled", part) for part in parts]
        others = [group for part in parts for group in groups_from_arrays(_of_part("left", part))]
        deal = functools.partial(self.prompts.deal, spare=spare)
        return merged([Sampled.from_arrays(part, deal) for part in found]), sorted(others, key=lambda one: one.place)

    def _exchange(self, arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        """Return the arrays of all processes. All call it in the same order."""
        return all_gather_arrays("answers", arrays)

    def _answer(
        self,
        weights: Dict,
        version: int,
        prompts: Sequence[Prompt],
        temperatures: Sequence[float],
        seeds: Sequence[int],
        sample: Callable[..., list[Answer]] | None = None,
    ) -> list[Episode]:
        """Return an answer to each prompt, sampled with the weights after `version` steps.

        Args:
          weights, version: the weights.
          prompts, temperatures, seeds: of each answer.
          sample: samples the answers of a turn, see `Episodes`; None: the sampler does.
        """
        assert self._sampler is not None, "attach a sampler first"
        self._sampler.load(weights, version)
        try:
            return self._episodes(sample or self._sampler.sample, prompts, temperatures, seeds)
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
        self._warn(errors, prompts, answers, "answers have a reward that failed, which counts as 0")
        if not self._told:  # later ones are in the metrics
            failures = [answer.failures[0] if answer.failures else None for answer in answers]
            self._told = any(failures)
            self._warn(failures, prompts, answers, "answers have calls that failed, which the model was told")
        return found

    def _warn(
        self, errors: Sequence[str | None], prompts: Sequence[Prompt], answers: Sequence[Episode], what: str
    ) -> None:
        """Report the number of answers with an error, and the first of them."""
        failed = [number for number, error in enumerate(errors) if error is not None]
        if failed:
            prompt = prompts[failed[0]]
            answer = answers[failed[0]]
            self._say(
                f"warning: {len(failed):,} of {len(errors):,} {what}; the first: {errors[failed[0]]} "
                f"(prompt {_shown(prompt.text)}, answer {_shown(answer.text)})"
            )

    def _arrange(self, sampled: Sampled) -> tuple[HostBatch, np.ndarray]:
        """Return the answers as a batch, one in each row, and the versions of tokens; only sampled ones have labels."""
        batch = self._empty(len(sampled.answers))
        versions = np.full_like(batch["labels"], -1)
        advantages = self._policy.advantages(sampled.rewards).ravel()
        counts = np.repeat(self._policy.counts(sampled.rewards), self._policy.samples)
        for row, answer in enumerate(sampled.answers):
            ids = [*answer.prompt, *answer.tokens]
            batch["tokens"][row, : len(ids) - 1] = ids[:-1]
            places = np.flatnonzero(answer.sampled) + len(answer.prompt) - 1
            batch["labels"][row, places] = np.array(ids)[places + 1]
            batch["sampler_logprobs"][row, places] = np.array(answer.log_probabilities)[answer.sampled]
            versions[row, places] = answer.versions
            if answer.experts is not None:
                batch["experts"][row, : len(ids) - 1] = answer.experts
            batch["advantages"][row, places] = advantages[row]
            if counts[row] and not (answer.truncated and self._policy.masks_overlong):
                batch["shares"][row, places] = 1 / len(places)
        return self._packed(batch, sampled.answers), versions

    def _packed(self, batch: dict[str, np.ndarray], answers: Sequence[Episode]) -> HostBatch:
        """Return a batch with its answers packed into few rows, if the configuration says so."""
        if not self._config.packing:
            return batch
        lengths = np.array([len(answer.prompt) + len(answer.tokens) - 1 for answer in answers], int)
        order = fill_order(len(batch["labels"]), self._shards, self._microbatches)
        return pack_answers(batch, lengths, order, self._microbatches)

    def _empty(self, rows: int) -> dict[str, np.ndarray]:
        shape = (rows, self._length)
        each = None if self._sampler is None else self._sampler.experts_shape
        return {
            **({} if each is None else {"experts": np.full((*shape, *each), -1, np.int16)}),
            "tokens": np.zeros(shape, np.int32),
            "labels": np.full(shape, IGNORE, np.int32),
            **{name: np.zeros(shape, np.float32) for name in self._policy.arrays},
        }


def _of_part(part: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays whose name begins with `part/`, without that."""
    return {name.removeprefix(f"{part}/"): x for name, x in arrays.items() if name.startswith(f"{part}/")}


def _shown(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 200 else f"{shown[:197]}..."


def fill_order(rows: int, shards: int, microbatches: int) -> np.ndarray:
    """Return the rows of a batch in the order in which they are filled, [B]: microbatch by microbatch.

    Args:
      rows: B.
      shards: number of devices that the rows are split over.
      microbatches: number of microbatches into which the rows of each device are split.
    """
    return np.arange(rows).reshape(shards, microbatches, -1).swapaxes(0, 1).ravel()


def pack_answers(
    batch: Mapping[str, np.ndarray], lengths: np.ndarray, order: np.ndarray, microbatches: int
) -> dict[str, np.ndarray]:
    """Return a batch in which several answers share a row, by best fit.

    Args:
      batch: arrays [B, T, ...] with one answer in each row.
      lengths: number of tokens of each row, [B].
      order: the rows in the order in which they are filled.
      microbatches: number of microbatches of the batch.

    Returns:
      The arrays with the answers in other places; `segment_ids`, 1, 2, ... for the answers of a row, and one more for
      its padding; `positions` in the answer; and `computed` [B] int32, 0 for rows of microbatches without answers.
    """
    padding = {"labels": IGNORE, "experts": -1}
    packed = {name: np.full_like(array, padding.get(name, 0)) for name, array in batch.items()}
    count, length = batch["labels"].shape
    segments = np.ones((count, length), np.int32)
    positions = np.tile(np.arange(length, dtype=np.int32), (count, 1))
    rows = pack(lengths, length)
    for row, members in zip(order.tolist(), rows, strict=False):
        at = 0
        for number, member in enumerate(members, 1):
            place = slice(at, at + int(lengths[member]))
            for name, array in batch.items():
                packed[name][row, place] = array[member, : lengths[member]]
            segments[row, place] = number
            positions[row, place] = np.arange(lengths[member])
            at = place.stop
        segments[row, at:] = len(members) + 1  # its own segment, so that padding attends only to padding
        positions[row, at:] = np.arange(length - at)
    together = count // microbatches
    computed = np.zeros(count, np.int32)
    computed[order[: -(-len(rows) // together) * together]] = 1
    return {**packed, "segment_ids": segments, "positions": positions, "computed": computed}
