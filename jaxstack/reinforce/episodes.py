"""Answers over several turns: sampled tokens, and between them those of tools and of an environment.

The tokens of a sample only grow: those of a turn are the tokens before, what was sampled, and the new messages as the
chat template writes them after it. All samples take a turn together, so that the order of the engine's requests, and
with it each rounding, does not depend on how long a tool takes.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxstack.data.prompts import Prompt, Prompts
from jaxstack.data.tool_calls import ToolCall
from jaxstack.errors import JaxstackError
from jaxstack.reinforce.environment import Environment, Reply, Request, Work
from jaxstack.reinforce.sampler import Answer
from jaxstack.reinforce.scorers import Failure, describe_error

_TURN_BITS = 24
"""Bits of a seed that are those of the first turn; further turns change the bits above."""


@dataclasses.dataclass
class Episode:
    """An answer to a prompt, over one or several turns.

    Attributes:
      prompt: ids of the prompt.
      text: the last answer, without its stop token.
      tokens: ids of everything after the prompt, the stop tokens included.
      sampled: of each of these, True if the model has sampled it.
      log_probabilities: of each of these, with which it was sampled; 0 for the others.
      versions: of each sampled token, see `Answer`.
      experts: of all tokens, those of the prompt included, but the last, see `Answer`.
      truncated: it reached the limit of tokens.
      messages: the messages after the prompt, those of the model included.
      reward: sum of the environment's rewards, or why it has none; None without an environment.
      turns: number of answers.
      calls: number of calls of tools.
      failures: reason of each call of a tool or of the environment that failed.
    """

    prompt: tuple[int, ...]
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    sampled: list[bool] = dataclasses.field(default_factory=list)
    log_probabilities: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    experts: np.ndarray | None = None
    truncated: bool = False
    messages: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    reward: float | Failure | None = None
    turns: int = 0
    calls: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    done: bool = False

    def add(self, tokens: Sequence[int], log_probabilities: Sequence[float] | None = None) -> None:
        """Append tokens: sampled ones with their log-probabilities, or such that the model only reads."""
        self.tokens += tokens
        self.sampled += [log_probabilities is not None] * len(tokens)
        self.log_probabilities += [0.0] * len(tokens) if log_probabilities is None else log_probabilities

    def fail(self, failure: Failure) -> None:
        """End it, as the environment has failed."""
        self.reward = failure
        self.failures.append(failure.reason)
        self.done = True

    @property
    def count(self) -> int:
        """Number of sampled tokens."""
        return sum(self.sampled)


class Episodes:
    """Answers prompts, over several turns if there is an environment.

    Args:
      prompts: encodes and reads texts.
      max_tokens: token limit of everything after a prompt.
      longest: token limit of a prompt.
      environment: tools and turns; None: a prompt has one answer.
    """

    def __init__(self, prompts: Prompts, max_tokens: int, longest: int, environment: Environment | None):
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._longest = longest
        self._environment = environment
        self._begun = 0
        """Number of samples so far, which tells their processes apart."""

    def __call__(
        self,
        sample: Callable[[list[Sequence[int]], list[int], list[float], list[int]], Sequence[Answer]],
        prompts: Sequence[Prompt],
        temperatures: Sequence[float],
        seeds: Sequence[int],
    ) -> list[Episode]:
        """Return an answer to each prompt.

        Args:
          sample: samples answers from token ids, limits of tokens, temperatures and seeds.
          prompts: the prompts.
          temperatures, seeds: of each answer.
        """
        episodes = [Episode(prompt.ids) for prompt in prompts]
        if self._environment is not None:
            self._reset(self._environment, episodes, prompts)
        turn = 0
        while going := [row for row, episode in enumerate(episodes) if not episode.done]:
            answers = sample(
                [[*episodes[row].prompt, *episodes[row].tokens] for row in going],
                [self._max_tokens - len(episodes[row].tokens) for row in going],
                [temperatures[row] for row in going],
                [seeds[row] ^ (turn << _TURN_BITS) for row in going],
            )
            turn += 1
            called = {row: self._take(episodes[row], answer) for row, answer in zip(going, answers, strict=True)}
            if self._environment is not None:
                self._go_on(self._environment, episodes, prompts, called, turn)
        if self._environment is not None:
            self._environment([])
            self._begun += len(prompts)
        return episodes

    def _take(self, episode: Episode, answer: Answer) -> list[ToolCall]:
        """Append an answer, and return the tool calls in it."""
        text = answer.tokens[: answer.text_tokens]
        episode.add(answer.tokens, answer.log_probabilities)
        episode.versions += answer.versions
        episode.experts = answer.experts
        episode.text = self._prompts.tokenizer.decode(text)
        content, calls = self._prompts.turns.parse(text)
        episode.messages.append({"role": "assistant", "content": content})
        episode.truncated = answer.truncated
        episode.done = answer.truncated or self._environment is None or isinstance(episode.reward, Failure)
        episode.turns += 1
        episode.calls += len(calls)
        return calls

    def _reset(self, environment: Environment, episodes: Sequence[Episode], prompts: Sequence[Prompt]) -> None:
        for episode in episodes:
            episode.reward = 0.0
        if not environment.description.resets:
            return
        requests = [(row, [Request("reset", dict(prompt.columns))]) for row, prompt in enumerate(prompts)]
        for row, [reply] in self._call(environment, requests, prompts):
            try:
                if isinstance(reply, Failure):
                    raise ValueError(reply.reason)
                if reply.messages:
                    ids = self._prompts.encode(_joined(prompts[row].text, reply.messages), None, "reset")
                    if len(ids) > self._longest:
                        raise ValueError(f"reset makes a prompt of {len(ids)} tokens; {self._longest} are allowed")
                    episodes[row].prompt = ids
            except (JaxstackError, ValueError) as error:
                episodes[row].fail(Failure(str(error)))
                episodes[row].done = False  # it answers the plain prompt once, as each row of a batch has an answer

    def _call(
        self, environment: Environment, requests: Sequence[tuple[int, list[Request]]], prompts: Sequence[Prompt]
    ) -> list[tuple[int, list[Reply | Failure]]]:
        """Return the replies to calls of the environment, given the row and the calls of each sample."""
        work = [Work(self._begun + row, int(prompts[row].score * 2**32), calls) for row, calls in requests]
        return [(row, replies) for (row, _), replies in zip(requests, environment(work), strict=True)]

    def _go_on(
        self,
        environment: Environment,
        episodes: Sequence[Episode],
        prompts: Sequence[Prompt],
        called: Mapping[int, Sequence[ToolCall]],
        turn: int,
    ) -> None:
        """Let the environment answer, and append what it says; `called` are the calls of each row's newest answer."""
        last = turn == environment.config.turns
        requests = []
        for row, calls in called.items():
            episode = episodes[row]
            if episode.done:
                continue
            if calls and not last:
                requests.append((row, [Request(call.name, call.arguments) for call in calls if call.error is None]))
            elif environment.description.steps and not calls:
                requests.append((row, [Request("step", episode.text)]))
            else:
                episode.done = True
        for row, replies in self._call(environment, requests, prompts):
            episode = episodes[row]
            calls = called[row]
            messages = self._results(episode, calls, replies) if calls else self._step(episode, replies[0])
            episode.messages += messages
            episode.done |= last
            if not episode.done:
                self._append(episode, [call.name for call in calls], messages)

    def _results(
        self, episode: Episode, calls: Sequence[ToolCall], replies: Sequence[Reply | Failure]
    ) -> list[Mapping[str, Any]]:
        """Return the results of an answer's tool calls as messages; what went wrong is told to the model."""
        found = iter(replies)
        messages = []
        for number, call in enumerate(calls):
            reply = next(found) if call.error is None else Failure(call.error)
            if isinstance(reply, Failure):
                episode.failures.append(f"{call.name or 'a call'}: {reply.reason}")
            text = f"error: {reply.reason}" if isinstance(reply, Failure) else reply.messages[0]["content"]
            messages.append(call.as_reply(number, text))
        return messages

    def _step(self, episode: Episode, reply: Reply | Failure) -> list[Mapping[str, Any]]:
        if isinstance(reply, Failure):
            episode.fail(reply)
            return []
        assert isinstance(episode.reward, float)
        episode.reward += reply.reward
        episode.done = reply.done
        return [*reply.messages]

    def _append(self, episode: Episode, called: Sequence[str], messages: Sequence[Mapping[str, Any]]) -> None:
        """Append messages as tokens, unless they leave no room for an answer."""
        try:
            ids = self._prompts.turns.follow(called, messages)
        except JaxstackError as error:
            episode.fail(Failure(describe_error(error)))
            return
        if len(episode.tokens) + len(ids) >= self._max_tokens:
            episode.truncated = episode.done = True
        else:
            episode.add(ids)


def _joined(prompt: str | Sequence[Mapping[str, Any]], said: Sequence[Mapping[str, Any]]) -> Any:
    """Return a prompt with what an environment says at its start; a single text continues the prompt's last message."""
    if len(said) == 1 and said[0]["role"] == "user":
        if isinstance(prompt, str):
            return prompt + said[0]["content"]
        if prompt[-1].get("role") == "user":
            return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + said[0]["content"]}]
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*before, *said]
