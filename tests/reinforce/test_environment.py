"""Environments: schemas of tools, calls that fail or hang, and samples of several turns against hand-made histories."""

import textwrap
import time

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxstack.data.chat_template import choose_template
from jaxstack.data.chat_turns import ChatTurns
from jaxstack.data.load_tokenizer import SubwordTokenizer
from jaxstack.data.prompts import Prompt, Prompts, _Encoder
from jaxstack.errors import ConfigError
from jaxstack.loss import IGNORE
from jaxstack.reinforce.config import EnvironmentConfig, RolloutConfig
from jaxstack.reinforce.environment import Environment, Reply, Request, Tool, Work
from jaxstack.reinforce.episodes import Episode
from jaxstack.reinforce.groups import Sampled, answer_values, means
from jaxstack.reinforce.policy import PolicyConfig
from jaxstack.reinforce.rewards import EnvironmentReward, RewardResult, Rewards
from jaxstack.reinforce.rollout import Rollouts
from jaxstack.reinforce.sampler import Answer
from jaxstack.reinforce.scorers import Failure
from tests.data.test_chat_turns import DAY, SPECIAL

CODE = """
    import os, random, time

    def add(x: int, y: float = 0.5) -> float:
        '''Adds two numbers.

        Args:
          x: the first
            number.
          y: the second number.
        '''
        return x + y

    def fails(how: str = "raise"):
        '''Fails.'''
        if how == "hang":
            time.sleep(60)
        if how == "exit":
            os._exit(3)
        raise KeyError(how)

    class Guess:
        '''A game.'''

        def reset(self, columns):
            self.secret = columns["secret"]
            self.tries = 0
            return f" Up to {random.randint(5, 5)}?"

        def step(self, answer):
            self.tries += 1
            right = answer == str(self.secret)
            if answer == "fail":
                return 1
            return ("" if right else f"not {answer}"), right / self.tries, right

        def hint(self) -> str:
            '''Says how many tries there were.'''
            return f"{self.tries} tries"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("environment")
    (place / "code.py").write_text(textwrap.dedent(CODE))
    return place


def opened(folder, *names: str, **limits) -> Environment:
    return Environment(EnvironmentConfig(path=tuple(f"{folder}/code.py:{name}" for name in names), **limits))


def test_the_schema_of_a_tool_follows_from_its_signature():
    def search(query: str, count: int = 3, exact: bool | None = None):
        """Searches
        documents.

        Args:
          query: what is
            looked for.
          count (int): how many.

        Returns:
          texts.
        """

    tool = Tool(search)
    described = tool.schema["function"]
    assert described["name"] == "search" and described["description"] == "Searches documents."
    properties = described["parameters"]["properties"]
    assert properties["query"] == {"type": "string", "description": "what is looked for."}
    assert properties["count"] == {"type": "integer", "default": 3, "description": "how many."}
    assert described["parameters"]["required"] == ["query"]
    assert tool.arguments({"query": "a", "count": "2"}) == {"query": "a", "count": 2, "exact": None}
    for wrong in ({}, {"query": "a", "count": "two"}, {"query": "a", "other": 1}):
        with pytest.raises(ValueError, match="query|count|other"):
            tool.arguments(wrong)
    search.schema = {"name": "search", "parameters": {"type": "object"}}
    assert Tool(search).schema == {"type": "function", "function": search.schema}
    with pytest.raises(TypeError, match="cannot be given by name"):
        Tool(lambda *rest: 0)


@pytest.mark.longer
@pytest.mark.quick
def test_calls_that_fail_cost_one_sample(folder):
    """A tool that raises, hangs or ends its process is a reason, and the other samples have their results."""
    environment = opened(folder, "add", "fails", time_limit=0.3, workers=4)
    calls = [{"x": 2, "y": 3}, {"x": "two"}, {"how": "hang"}, {"how": "exit"}, {"how": "raise"}]
    names = ["add", "add", "fails", "fails", "fails"]
    pairs = list(zip(names, calls, strict=True))
    work = [Work(i, 0, [Request(*pair), Request("add", {"x": i})]) for i, pair in enumerate(pairs)]
    began = time.monotonic()
    replies = environment([*work, Work(5, 0, [Request("none", {})])])
    assert time.monotonic() - began < 5
    assert replies[0][0] == Reply(({"role": "tool", "name": "add", "content": "5.0"},))
    reasons = [reply.reason if isinstance(reply, Failure) else "" for reply, *_ in replies[1:]]
    expected = ["valid integer", "took more than 0.3 s and was ended", "its process ended", "KeyError: 'raise'"]
    assert all(part in reason for part, reason in zip(expected, reasons, strict=False))
    assert "code.py" in reasons[3] and "no tool 'none'; the tools: add, fails" in reasons[4]
    later = [reply[1] for reply in replies[:5]]
    assert [reply.messages[0]["content"] for reply in later] == [f"{i + 0.5}" for i in range(5)], "tools go on"
    environment.close()
    for wrong, message in (
        ("missing", "cannot be used: .* has no function or class missing"),
        ("os", "class os; choose"),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(folder, wrong)


@pytest.fixture(scope="module")
def tokenizer() -> SubwordTokenizer:
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = Tokenizer(models.BPE({character: i for i, character in enumerate(bytes_)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    model.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    model.add_special_tokens(SPECIAL)
    return SubwordTokenizer(model, "file", len(bytes_))


def rollouts_of(tokenizer, environment: Environment, columns: list[dict], **config) -> Rollouts:
    """Rollouts of prompts `go`, without a model."""
    template = choose_template("chatml", None, DAY)
    known = environment.description
    stops = frozenset({tokenizer.special_tokens["<|im_end|>"]})
    encode = _Encoder(tokenizer, template, known.tools)
    turns = ChatTurns(tokenizer, template, stops, known.tools, texts=known.steps)
    made = [Prompt("go", encode("go", None, ""), entry, 0.25) for entry in columns]
    prompts = Prompts(encode, turns, stops, made, [], 0, [])
    policy = PolicyConfig(loss="grpo", samples=len(columns), advantage="group_mean")
    rewards = Rewards([EnvironmentReward()] if known.steps else [])
    say = SAID.append
    return Rollouts(prompts, rewards, policy, RolloutConfig(**config), 1200, 0, say, environment)


SAID: list[str] = []


class Scripted:
    """Samples given texts, one for each turn of each row, with the log-probabilities -1, -2, ..."""

    def __init__(self, tokenizer, texts: list[list[str]]):
        self.tokenizer = tokenizer
        self.left = [list(turns) for turns in texts]
        self.asked: list[list] = []

    def __call__(self, prompts, limits, temperatures, seeds) -> list[Answer]:
        self.asked.append([prompts, limits, temperatures, seeds])
        answers = []
        going = [turns for turns in self.left if turns]
        for turns, most in zip(going, limits, strict=True):
            ids = self.tokenizer.encode_marked([turns.pop(0) + "<|im_end|>"])[0][0].tolist()
            text = min(len(ids) - 1, most)
            ids = ids[: min(len(ids), most)]
            scores = tuple(-1.0 - i for i in range(len(ids)))
            answers.append(Answer(tuple(ids), scores, text, (len(self.asked),) * len(ids)))
        return answers


def add_call(x: int) -> str:
    return f'<tool_call>{{"x": 1}}</tool_call><tool_call>{{"name": "add", "arguments": {{"x": {x}}}}}</tool_call>'


@pytest.mark.quick
def test_a_history_is_what_was_sampled_and_what_the_template_appends(tokenizer, folder):
    """Ids, mask, log-probabilities and batch of two samples, one of which calls a tool, equal those made by hand."""
    environment = opened(folder, "add")
    rollouts = rollouts_of(tokenizer, environment, [{}, {}], max_tokens=400)
    script = Scripted(tokenizer, [[add_call(2), "it is 2.5"], ["no tool"]])
    episodes = rollouts._episodes(script, rollouts.prompts.train, [1.0, 1.0], [5, 6])

    def ids_of(text: str) -> list[int]:
        return tokenizer.encode_marked([text])[0][0].tolist()

    told = "error: a call is a JSON object with name, a text, and arguments, an object"
    results = f"\n<|im_start|>tool\n{told}<|im_end|>\n<|im_start|>tool\n2.5<|im_end|>\n<|im_start|>assistant\n"
    pieces = [ids_of(add_call(2) + "<|im_end|>"), ids_of(results), ids_of("it is 2.5<|im_end|>")]
    called, other = episodes
    assert called.tokens == sum(pieces, []) and other.tokens == ids_of("no tool<|im_end|>")
    mask = [number != 1 for number, piece in enumerate(pieces) for _ in piece]
    scores = [-1.0 - i if number != 1 else 0.0 for number, piece in enumerate(pieces) for i in range(len(piece))]
    assert called.sampled == mask and called.log_probabilities == scores
    assert script.asked[1][0] == [[*called.prompt, *pieces[0], *pieces[1]]], "the next turn goes on from these ids"
    assert script.asked[1][1] == [400 - len(pieces[0]) - len(pieces[1])]
    assert script.asked[0][3] == [5, 6] and script.asked[1][3][0] not in (5, 6)
    assert (called.turns, called.calls, called.text) == (2, 2, "it is 2.5") and not called.truncated
    assert len(called.failures) == 1 and told.removeprefix("error: ") in called.failures[0]
    assert [message["role"] for message in called.messages] == ["assistant", "tool", "tool", "assistant"]

    rewards = [RewardResult(reward, {}) for reward in (1.0, 0.0)]
    sampled = Sampled(2, [0], rollouts.prompts.train, episodes, rewards, 0.0, 0.0)
    batch, versions = rollouts._arrange(sampled)
    ids = [*called.prompt, *called.tokens]
    begin = len(called.prompt) - 1
    row = slice(begin, begin + len(mask))
    assert batch["tokens"][0, : len(ids) - 1].tolist() == ids[:-1]
    assert batch["labels"][0, row].tolist() == [i if on else IGNORE for i, on in zip(called.tokens, mask, strict=True)]
    assert (np.delete(batch["labels"][0], np.r_[row]) == IGNORE).all()
    assert batch["sampler_logprobs"][0, row].tolist() == scores
    turns = [-1 if number == 1 else 1 + number // 2 for number, piece in enumerate(pieces) for _ in piece]
    assert versions[0, row].tolist() == turns, "of the weights that sampled each token"
    assert batch["advantages"][0, row].tolist() == [0.5 if on else 0.0 for on in mask]
    np.testing.assert_allclose(batch["shares"][0, row], np.array(mask) / sum(mask), rtol=1e-6)
    environment.close()


@pytest.mark.quick
def test_an_environment_answers_and_rewards(tokenizer, folder):
    """Observations follow answers as messages of the user, rewards add up, and its failure ends a sample alone."""
    environment = opened(folder, "Guess", turns=3)
    rollouts = rollouts_of(tokenizer, environment, [{"secret": 7}] * 4 + [{}], max_tokens=300)
    hint = '<tool_call>{"name": "hint", "arguments": {}}</tool_call>'
    texts = [["7"], ["1", hint, "7"], ["1", "2", "3"], ["fail"], ["7"]]
    script = Scripted(tokenizer, texts)
    episodes = rollouts._episodes(script, rollouts.prompts.train, [1.0] * 5, [0] * 5)
    assert tokenizer.decode_marked(episodes[0].prompt).endswith("user\ngo Up to 5?<|im_end|>\n<|im_start|>assistant\n")
    said = [message["content"] for message in episodes[1].messages]
    assert said == ["1", "not 1", hint, "1 tries", "7", ""]
    assert [episode.turns for episode in episodes] == [1, 3, 3, 1, 1]
    assert [episode.reward for episode in episodes[:3]] == [1.0, 0.5, 0.0]
    results = rollouts._reward(rollouts.prompts.train, episodes)
    assert [result.total for result in results] == [1.0, 0.5, 0.0, 0.0, 0.0]
    assert "step returns an observation, a reward and if it is done" in str(results[3].error)
    assert "KeyError: 'secret'" in str(results[4].error)
    assert "2 of 5 answers have a reward that failed" in SAID[-2] and "2 of 5 answers have calls" in SAID[-1]
    environment.close()


@pytest.mark.quick
def test_limits_of_tokens_and_turns(tokenizer, folder):
    environment = opened(folder, "add", turns=2)
    call = add_call(2)
    long = len(tokenizer.encode(call)) + 1
    rollouts = rollouts_of(tokenizer, environment, [{}, {}], max_tokens=long + 40)
    script = Scripted(tokenizer, [[call], ["word"]])
    cut, whole = rollouts._episodes(script, rollouts.prompts.train, [1.0] * 2, [0] * 2)
    assert cut.truncated and len(cut.tokens) == long, "results that leave no room are not appended"
    assert not whole.truncated and whole.count == 5
    rollouts = rollouts_of(tokenizer, environment, [{}, {}], max_tokens=900)
    script = Scripted(tokenizer, [[call, call], ["word"]])
    ended, _ = rollouts._episodes(script, rollouts.prompts.train, [1.0] * 2, [0] * 2)
    assert (ended.turns, ended.calls, ended.truncated) == (2, 4, False) and ended.sampled[-1]
    environment.close()


def test_the_metrics_of_turns():
    one = Episode((1,), tokens=[2, 3], sampled=[True, False], reward=0.0, turns=3, calls=2, failures=["x"])
    found = means(answer_values([one, Episode((1,), tokens=[2], sampled=[True], reward=1.0, turns=1)]))
    assert found == {"answer_tokens": 1.0, "truncated": 0.0, "turns": 2.0, "tool_calls": 1.0, "failed_calls": 0.5}
    assert "turns" not in answer_values([Episode((1,), sampled=[True])])
