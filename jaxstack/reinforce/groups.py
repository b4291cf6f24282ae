"""Groups of answers, each to one prompt: sampled, rewarded, and as arrays for checkpoints and for other processes.

Dimensions: P prompts, G answers to each, B = P G answers.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxstack.data.prompts import Prompt
from jaxstack.reinforce.episodes import Episode
from jaxstack.reinforce.rewards import RewardResult
from jaxstack.reinforce.sampler import Answer
from jaxstack.reinforce.scorers import Failure

_SHOWN_GROUPS = 2
"""Number of prompts of which answers are shown in the report."""
_PLAIN_FIELDS = ("text", "truncated", "messages", "turns", "calls", "failures")
"""Fields of an `Episode` that are plain JSON."""


@dataclasses.dataclass(frozen=True)
class Group:
    """The answers to a prompt, complete or not.

    Attributes:
      place: of the prompt in the order of `Prompts.deal`.
      answers: [G].
    """

    place: int
    answers: Sequence[Answer]

    @property
    def complete(self) -> bool:
        """True if all answers have ended."""
        return all(answer.ended for answer in self.answers)


def groups_to_arrays(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """Return groups as arrays: of all answers together, and the tokens of all together."""
    answers = [answer for group in groups for answer in group.answers]
    return {
        "places": np.array([group.place for group in groups], int),
        "text_tokens": np.array([answer.text_tokens for answer in answers], int),
        "ended": np.array([answer.ended for answer in answers], bool),
        **_joined("tokens", [answer.tokens for answer in answers], np.int32),
        **_joined("log_probabilities", [answer.log_probabilities for answer in answers], np.float32),
        **_joined("versions", [answer.versions for answer in answers], np.int32),
        **_experts([answer.experts for answer in answers]),
    }


def groups_from_arrays(arrays: Mapping[str, np.ndarray]) -> list[Group]:
    """Return the groups that `groups_to_arrays` has made into arrays."""
    if not len(arrays["places"]):
        return []
    parts = [_divided(name, arrays) for name in ("tokens", "log_probabilities", "versions")]
    rows = zip(*parts, arrays["text_tokens"], arrays["ended"], strict=True)
    answers = [
        Answer(
            tuple(tokens),
            tuple(log_probabilities),
            int(text_tokens),
            tuple(versions),
            bool(ended),
            arrays.get(f"experts_{row}"),
        )
        for row, (tokens, log_probabilities, versions, text_tokens, ended) in enumerate(rows)
    ]
    samples = len(answers) // len(arrays["places"])
    return [
        Group(int(place), answers[number * samples : (number + 1) * samples])
        for number, place in enumerate(arrays["places"])
    ]


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Rewarded answers, those to a prompt one after the other.

    Attributes:
      samples: G, the number of answers to a prompt.
      places: of the prompts in the order of `Prompts.deal` [P].
      prompts: the prompt of each answer [B].
      answers: [B].
      results: their rewards [B].
      rollout_seconds: time of the sampling.
      reward_seconds: time of the rewards.
    """

    samples: int
    places: Sequence[int]
    prompts: Sequence[Prompt]
    answers: Sequence[Episode]
    results: Sequence[RewardResult]
    rollout_seconds: float
    reward_seconds: float

    def __add__(self, other: "Sampled") -> "Sampled":
        """Return the answers of both, the others after these."""
        return Sampled(
            self.samples,
            [*self.places, *other.places],
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

    def groups(self, numbers: Sequence[int] | np.ndarray) -> "Sampled":
        """Return the answers to some of the prompts, of which `numbers` are the places among the P."""
        rows = [number * self.samples + row for number in numbers for row in range(self.samples)]
        lists = (self.prompts, self.answers, self.results)
        prompts, answers, results = ([values[row] for row in rows] for values in lists)
        places = [self.places[number] for number in numbers]
        return dataclasses.replace(self, places=places, prompts=prompts, answers=answers, results=results)

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
            "failed_rewards": float(np.mean([result.error is not None for result in self.results])),
            **means(answer_values(self.answers)),
            "rollout_seconds": self.rollout_seconds,
            "reward_seconds": self.reward_seconds,
        }
        if len(names) > 1:
            for name in names:
                found[f"reward_{name}"] = float(np.mean([result.parts[name] for result in self.results]))
        return found

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the answers and rewards as arrays. Of the prompts these have the places."""
        answers = self.answers
        plain = [{name: getattr(answer, name) for name in _PLAIN_FIELDS} for answer in answers]
        rewards = [
            {"failure": answer.reward.reason} if isinstance(answer.reward, Failure) else {"value": answer.reward}
            for answer in answers
        ]
        others = [self.samples, plain, rewards, [dataclasses.asdict(result) for result in self.results]]
        return {
            "places": np.array(self.places, int),
            "seconds": np.array([self.rollout_seconds, self.reward_seconds]),
            "others": np.array(json.dumps(others)),
            **_joined("prompt", [answer.prompt for answer in answers], np.int32),
            **_joined("tokens", [answer.tokens for answer in answers], np.int32),
            **_joined("sampled", [answer.sampled for answer in answers], bool),
            **_joined("log_probabilities", [answer.log_probabilities for answer in answers], np.float32),
            **_joined("versions", [answer.versions for answer in answers], np.int32),
            **_experts([answer.experts for answer in answers]),
        }

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, np.ndarray], deal: Callable[[Sequence[int]], Sequence[Prompt]]
    ) -> "Sampled":
        """Return the answers that `to_arrays` has made into arrays; `deal` returns the prompts at places."""
        samples, plain, rewards, results = json.loads(arrays["others"].item())
        names = ("prompt", "tokens", "sampled", "log_probabilities", "versions")
        parts = {name: _divided(name, arrays) for name in names}
        answers = [
            Episode(
                tuple(parts["prompt"][row]),
                tokens=parts["tokens"][row],
                sampled=parts["sampled"][row],
                log_probabilities=parts["log_probabilities"][row],
                versions=parts["versions"][row],
                experts=arrays.get(f"experts_{row}"),
                reward=Failure(reward["failure"]) if "failure" in reward else reward["value"],
                done=True,
                **fields,
            )
            for row, (fields, reward) in enumerate(zip(plain, rewards, strict=True))
        ]
        places = arrays["places"].tolist()
        prompts = [prompt for prompt in deal(places) for _ in range(samples)]
        return cls(samples, places, prompts, answers, [RewardResult(**one) for one in results], *arrays["seconds"])


def merged(parts: Sequence[Sampled]) -> Sampled:
    """Return the answers that several processes sampled at the same time, in the order of their prompts' places."""
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    return dataclasses.replace(
        whole.groups(np.argsort(whole.places, kind="stable")),
        rollout_seconds=max(part.rollout_seconds for part in parts),
        reward_seconds=max(part.reward_seconds for part in parts),
    )


def answer_values(answers: Sequence[Episode]) -> dict[str, np.ndarray]:
    """Return values of each answer, [B]: its length, and in an environment the numbers of turns and calls."""
    found = {
        "answer_tokens": [answer.count for answer in answers],
        "truncated": [answer.truncated for answer in answers],
    }
    if any(answer.reward is not None for answer in answers):
        found["turns"] = [answer.turns for answer in answers]
        found["tool_calls"] = [answer.calls for answer in answers]
        found["failed_calls"] = [len(answer.failures) for answer in answers]
    return {name: np.array(values, float) for name, values in found.items()}


def means(values: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return the mean of each array."""
    return {name: float(array.mean()) for name, array in values.items()}


def _joined(name: str, parts: Sequence[Sequence[Any]], dtype: Any) -> dict[str, np.ndarray]:
    """Return sequences as one array, and their lengths."""
    whole = [value for part in parts for value in part]
    return {name: np.array(whole, dtype), f"{name}_lengths": np.array([len(part) for part in parts], int)}


def _divided(name: str, arrays: Mapping[str, np.ndarray]) -> list[list[Any]]:
    """Return the sequences that `_joined` has made into one array."""
    ends = np.cumsum(arrays[f"{name}_lengths"])
    return [part.tolist() for part in np.split(arrays[name], ends[:-1])] if len(ends) else []


def _experts(experts: Sequence[np.ndarray | None]) -> dict[str, np.ndarray]:
    return {f"experts_{row}": found for row, found in enumerate(experts) if found is not None}
