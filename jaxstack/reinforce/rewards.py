"""Rewards: give each sampled answer a number, from the data's columns, a test, a model or a user's function.

`Rewards` are made from a configuration's section `reward`, a list whose entries are chosen by `name`:

    rewards = Rewards([Exact(), Python(path="my_rewards.py:no_repeats", weight=0.2)])
    results = rewards([Sample("2 + 3?", "5", {"answer": "5"})])
    results[0].total, results[0].parts

A reward never ends a run. One that raises an exception, returns no finite number, or takes too long counts as zero for
that sample, and the sample's result tells it.
"""

import dataclasses
import functools
import json
import operator
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self, TypeAlias

from pydantic import ConfigDict, Field, field_validator, model_validator

from jaxstack.config.base import Component
from jaxstack.errors import ConfigError
from jaxstack.reinforce import sandbox, verifiers
from jaxstack.reinforce.scorers import (
    Failure,
    InAnotherProcess,
    InThisProcess,
    Outcome,
    Sample,
    Scorer,
    all_outcomes,
    check_path,
    describe_error,
    imported,
)


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """Rewards of a sample.

    Attributes:
      total: the sum of all rewards, each times its weight.
      parts: each reward before its weight, by name; the second of a name is `NAME_2`.
      error: which rewards counted as zero because they failed, and why; None if none did.
    """

    total: float
    parts: Mapping[str, float]
    error: str | None = None


class RewardModel(Protocol):
    """Interface of a loaded reward model; see `jaxstack.run.load.load_reward_model`."""

    def encode(self, prompt: str | Sequence[Mapping[str, Any]], answer: str) -> list[int]: ...

    def __call__(self, sequences: Sequence[Sequence[int]]) -> Any: ...


LoadModel: TypeAlias = Callable[[str], RewardModel]
"""Loads the reward model of a run directory."""


class Reward(Component):
    """Base class of the rewards that a configuration can choose by `name`."""

    weight: float = 1.0
    """Factor of the reward in the sum of all rewards."""

    @property
    def kind(self) -> str:
        """The `name` by which a configuration chooses it."""
        return type(self).model_fields["name"].default

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the data that it needs."""
        return ()

    @abstractmethod
    def score(self, samples: Sequence[Sample]) -> Sequence[Outcome]:
        """Return the reward of each sample, before its weight. It may raise any exception."""

    def prepare(self) -> None:
        """Do what can fail before there are samples. It may raise any exception."""
        return

    def open(self, load_model: LoadModel | None) -> Scorer:
        """Return the reward ready for use.

        Args:
          load_model: loads reward models.

        Raises:
          ConfigError: it cannot be computed here.
        """
        del load_model
        return InThisProcess(self)


class SampleReward(Reward):
    """Base class of rewards that look at one sample at a time."""

    def score(self, samples: Sequence[Sample]) -> Sequence[Outcome]:
        """Return the reward of each sample."""
        return [_attempt(self.judge, sample) for sample in samples]

    @abstractmethod
    def judge(self, sample: Sample) -> float:
        """Return the reward of a sample, before its weight."""


class ColumnReward(SampleReward):
    """Base class of rewards that compare an answer with a column."""

    column: str = "answer"
    """Column of the data that holds what is expected."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)


def _attempt(function: Callable[[Sample], float], sample: Sample) -> Outcome:
    try:
        return float(function(sample))
    except Exception as error:
        return Failure(describe_error(error))


def _texts(expected: Any) -> list[str]:
    """Return the accepted texts of a column, which holds one or a list of them."""
    values = expected if isinstance(expected, list | tuple) else [expected]
    return [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]


class Exact(ColumnReward):
    """1 if the answer equals the column, or one of its texts if that is a list; white space around it is ignored."""

    name: Literal["exact"] = "exact"
    ignore_case: bool = False
    """Compare without regard to case."""

    def judge(self, sample: Sample) -> float:
        return float(any(self._plain(sample.answer) == self._plain(x) for x in _texts(sample.column(self.column))))

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()


class Contains(ColumnReward):
    """Share of the column's texts that the answer contains: of one text 0 or 1."""

    name: Literal["contains"] = "contains"
    ignore_case: bool = False
    """Compare without regard to case."""

    def judge(self, sample: Sample) -> float:
        wanted = _texts(sample.column(self.column))
        fold = str.casefold if self.ignore_case else str
        found = [fold(text.strip()) in fold(sample.answer) for text in wanted]
        return sum(found) / len(found)


class SeparateReward(SampleReward):
    """Base class of rewards that may take forever, and are computed in a process that can be ended."""

    time_limit: float = Field(default=10.0, gt=0, le=3600)
    """Seconds for all answers of a step, and again for each alone if one of them failed."""

    def open(self, load_model: LoadModel | None) -> Scorer:
        del load_model
        return InAnotherProcess(self, self.time_limit)


class Regex(SeparateReward):
    """1 if the answer matches a regular expression of Python."""

    name: Literal["regex"] = "regex"
    pattern: str | None = None
    """The expression; null: it is in `column`."""
    column: str | None = None
    """Column that holds the expression of each record."""
    full: bool = False
    """The whole answer must match, white space around it aside; otherwise any part."""

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.column is None else (self.column,)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.pattern is None) == (self.column is None):
            raise ValueError("regex has either a pattern or the column that holds one; give one of them.")
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {error}.") from None
        return self

    def judge(self, sample: Sample) -> float:
        pattern = self.pattern if self.column is None else str(sample.column(self.column))
        assert pattern is not None
        find = re.fullmatch if self.full else re.search
        return float(find(pattern, sample.answer.strip(), re.DOTALL) is not None)


class JsonSchema(SeparateReward):
    """1 if the answer, or the block in its Markdown fence, is JSON that fits a schema."""

    # Loaded under either name, as a stored configuration has the field's.
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)
    name: Literal["json_schema"] = "json_schema"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """The schema; null: it is in `column`. Keywords that are not supported are refused."""
    column: str | None = None
    """Column that holds the schema of each record."""

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.column is None else (self.column,)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.schema_ is None) == (self.column is None):
            raise ValueError("json_schema has either a schema or the column that holds one; give one of them.")
        if self.schema_ is not None:
            verifiers.check_schema(self.schema_)
        return self

    def judge(self, sample: Sample) -> float:
        schema = self.schema_ if self.column is None else sample.column(self.column)
        schema = json.loads(schema) if isinstance(schema, str) else schema
        verifiers.check_schema(schema)
        try:
            value = json.loads(verifiers.code_of(sample.answer))
        except (ValueError, RecursionError):
            return 0.0
        return float(verifiers.fits_schema(value, schema))


class Number(ColumnReward):
    """1 if the answer's number equals the column's: that in its last box, after `####`, or the last one in the text."""

    name: Literal["number"] = "number"
    tolerance: float = Field(default=1e-6, ge=0)
    """Difference that is allowed, relative to the number that is expected, or to 1 if that is smaller."""

    def judge(self, sample: Sample) -> float:
        wanted = verifiers.final_number(str(sample.column(self.column)))
        try:
            found = verifiers.final_number(sample.answer)
        except verifiers.NoValueError:
            return 0.0
        return float(verifiers.equal_numbers(found, wanted, self.tolerance))


class Expression(ColumnReward):
    """1 if the answer's arithmetic expression has the value of the column's.

    It is that of the answer's last box, or of its last line with a digit. Of an equation any side may have the value;
    with `numbers` it is the first side that counts.
    """

    name: Literal["expression"] = "expression"
    numbers: str | None = None
    """Column with a list of numbers, each of which the expression must use exactly once, as in the game Countdown."""
    tolerance: float = Field(default=1e-6, ge=0)
    """Difference that is allowed, relative to the value that is expected, or to 1 if that is smaller."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,) if self.numbers is None else (self.column, self.numbers)

    def judge(self, sample: Sample) -> float:
        wanted, _ = verifiers.evaluate(str(sample.column(self.column)))
        allowed = None
        if self.numbers is not None:
            allowed = Counter(verifiers.evaluate(str(x))[0] for x in sample.column(self.numbers))
        try:
            sides = verifiers.final_expression(sample.answer)
        except verifiers.NoValueError:
            return 0.0
        return float(any(self._equals(side, wanted, allowed) for side in (sides[:1] if allowed else sides)))

    def _equals(self, side: str, wanted: Fraction, allowed: Counter[Fraction] | None) -> bool:
        try:
            value, used = verifiers.evaluate(side)
        except verifiers.NoValueError:
            return False
        return (allowed is None or used == allowed) and verifiers.equal_numbers(value, wanted, self.tolerance)


class Length(SampleReward):
    """0 for answers of up to `limit - buffer` tokens, falling to -1 at `limit` and beyond (DAPO, arXiv:2503.14476)."""

    name: Literal["length"] = "length"
    limit: int = Field(ge=1)
    """Number of tokens from which on the reward is -1."""
    buffer: int = Field(ge=1)
    """Number of tokens before the limit over which the reward falls."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.buffer > self.limit:
            raise ValueError(f"buffer ({self.buffer}) must not exceed limit ({self.limit}); lower it.")
        return self

    def judge(self, sample: Sample) -> float:
        if sample.tokens is None:
            raise ValueError("the number of the answer's tokens is not known")
        return max(-1.0, min(0.0, (self.limit - self.buffer - sample.tokens) / self.buffer))


class EnvironmentReward(Reward):
    """Sum of the rewards that the environment's `step` has returned; see `jaxstack.reinforce.environment`."""

    name: Literal["environment"] = "environment"

    def score(self, samples: Sequence[Sample]) -> Sequence[Outcome]:
        missing = Failure("there is no environment")
        return [missing if sample.environment is None else sample.environment for sample in samples]


class Python(Reward):
    """A user's function, from a list of samples (see `Sample`) to a list with the reward of each.

    It runs in a process of its own, which sees no GPU. If a call for all samples of a step fails, each sample is tried
    alone, so that one of them does not cost the others their rewards.
    """

    name: Literal["python"] = "python"
    path: str
    """`module:function` or `file.py:function`. Modules are also looked for in the working directory."""
    needs: tuple[str, ...] = ()
    """Columns of the data that the function needs; they are looked for before the run."""
    time_limit: float = Field(default=60.0, gt=0, le=3600)
    """Seconds for all answers of a step, and again for each alone if one of them failed."""

    @field_validator("path")
    @classmethod
    def _names_a_function(cls, path: str) -> str:
        return check_path(path)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.needs

    def score(self, samples: Sequence[Sample]) -> Sequence[float]:
        found = list(imported(self.path)(list(samples)))
        if len(found) != len(samples):
            raise ValueError(f"{self.path} returns one number per sample; it returned {len(found)} for {len(samples)}")
        return [float(x) for x in found]

    def prepare(self) -> None:
        imported(self.path)

    def open(self, load_model: LoadModel | None) -> Scorer:
        del load_model
        scorer = InAnotherProcess(self, self.time_limit)
        problem = scorer.prepare()
        if problem is not None:
            scorer.close()
            raise ConfigError(f"the reward function {self.path} cannot be imported: {problem}")
        return scorer


class UnitTests(ColumnReward):
    """1 if the answer's code passes its tests, in a sandbox; see `jaxstack.reinforce.sandbox`.

    The code is that of the answer's last Markdown fence, or the whole answer. The tests are a text of Python with
    assertions, a list of such texts, or a list of `{"input": TEXT, "output": TEXT}` for programs that read and write.
    Of `assert CALL == LITERAL` only the call is sent into the sandbox, and its value compared outside of it.
    """

    name: Literal["unit_tests"] = "unit_tests"
    column: str = "tests"
    """Column with the tests."""
    prefix: str | None = None
    """Column with code that is put before the answer's, such as the head of the function."""
    partial: bool = False
    """Reward the share of the tests that pass; otherwise 1 only if all pass."""
    time_limit: float = Field(default=4.0, gt=0, le=600)
    """Seconds for the code with all its tests; for programs that read and write, of each test."""
    memory: int = Field(default=512, ge=32)
    """Address space of each process, in MiB."""
    processes: int = Field(default=16, ge=1, le=1000)
    """Processes and threads that an answer may have at a time."""
    folder: int = Field(default=32, ge=1)
    """Files that an answer may write in its own temporary folder, in MiB."""
    isolation: sandbox.Isolation | None = None
    """Isolation of answers: namespaces; or process, which keeps them from changing files, not from reading them.
    null: namespaces where the machine allows them."""
    workers: int | None = Field(default=None, ge=1)
    """Answers that are tested at a time; null: the number of processors."""

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,) if self.prefix is None else (self.column, self.prefix)

    def judge(self, sample: Sample) -> float:
        raise NotImplementedError  # `open` returns what tests many answers at a time

    def open(self, load_model: LoadModel | None) -> Scorer:
        del load_model
        limits = sandbox.Limits(self.time_limit, self.memory, self.processes, self.folder)
        try:
            return _Tested(self, sandbox.Sandbox(limits, self.isolation, self.workers))
        except sandbox.SandboxError as error:
            raise ConfigError(f"reward unit_tests has no sandbox on this machine: {error}.") from None


class _Tested:
    """Tests the code of answers in a sandbox."""

    def __init__(self, config: UnitTests, box: sandbox.Sandbox):
        self._config = config
        self._box = box

    def __call__(self, samples: Sequence[Sample]) -> Sequence[Outcome]:
        suites = [self._suite(sample) for sample in samples]
        programs = [program for suite in suites if not isinstance(suite, Failure) for program in suite.programs]
        ran = iter(self._box(programs))
        outcomes: list[Outcome] = []
        for suite in suites:
            if isinstance(suite, Failure):
                outcomes.append(suite)
                continue
            passed = suite.passed([next(ran) for _ in suite.programs])
            outcomes.append(sum(passed) / len(passed) if self._config.partial else float(all(passed)))
        return outcomes

    def _suite(self, sample: Sample) -> "verifiers.Suite | Failure":
        try:
            prefix = "" if self._config.prefix is None else f"{sample.column(self._config.prefix)}\n"
            return verifiers.suite(prefix + verifiers.code_of(sample.answer), sample.column(self._config.column))
        except Exception as error:
            return Failure(describe_error(error))

    def close(self) -> None:
        self._box.close()


class Model(SampleReward):
    """The reward that a reward model gives, which `jaxstack.train` made with `preference.loss: reward_model`.

    Prompt and answer are written with the reward model's own chat template. It is computed in the trainer's process.
    """

    name: Literal["model"] = "model"
    path: str
    """Its run directory."""
    batch_tokens: int = Field(default=16384, ge=1)
    """Tokens, with padding, that are computed at a time."""

    def judge(self, sample: Sample) -> float:
        raise NotImplementedError  # `open` returns what computes many answers at a time

    def open(self, load_model: LoadModel | None) -> Scorer:
        if load_model is None:
            raise ValueError("rewards with a reward model need load_model, such as jaxstack.run.load.load_reward_model")
        return _Modelled(load_model(self.path), self.batch_tokens)


class _Modelled:
    """Computes the rewards of a reward model, answers of like length together."""

    def __init__(self, model: RewardModel, batch_tokens: int):
        self._model = model
        self._batch_tokens = batch_tokens

    def __call__(self, samples: Sequence[Sample]) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        encoded: dict[int, list[int]] = {}
        for row, sample in enumerate(samples):
            try:
                encoded[row] = self._model.encode(sample.prompt, sample.answer)
                outcomes.append(0.0)
            except Exception as error:
                outcomes.append(Failure(describe_error(error)))
        left = sorted(encoded, key=lambda row: len(encoded[row]))
        while left:
            rows = left[-max(1, self._batch_tokens // len(encoded[left[-1]])) :]
            for row, reward in zip(rows, self._model([encoded[row] for row in rows]), strict=True):
                outcomes[row] = float(reward)
            del left[-len(rows) :]
        return outcomes

    def close(self) -> None:
        pass


REWARDS = (Exact, Contains, Regex, JsonSchema, Number, Expression, Length, UnitTests, EnvironmentReward, Model, Python)
"""Every reward that the section `reward` can choose by `name`. A new one is added here."""

if TYPE_CHECKING:
    AnyReward: TypeAlias = Reward
else:
    AnyReward = Annotated[functools.reduce(operator.or_, REWARDS), Field(discriminator="name")]


class Rewards:
    """Rewards of a run, ready for use. They may hold processes: close them, or use them as a context.

    Args:
      config: the rewards; none: every sample's reward is 0.
      load_model: loads reward models, for `name: model`; `jaxstack.run.load.load_reward_model`.

    Raises:
      ConfigError: a function cannot be imported, or there is no sandbox for generated code.
    """

    def __init__(self, config: Sequence[Reward], load_model: LoadModel | None = None):
        self.config = tuple(config)
        seen = Counter[str]()
        self._scorers: dict[str, tuple[float, Scorer]] = {}
        """Name -> weight, and the reward ready for use."""
        try:
            for reward in config:
                seen[reward.kind] += 1
                number = seen[reward.kind]
                self._scorers[f"{reward.kind}_{number}" if number > 1 else reward.kind] = (
                    reward.weight,
                    reward.open(load_model),
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the processes of the rewards."""
        for _, scorer in self._scorers.values():
            scorer.close()

    @property
    def names(self) -> list[str]:
        """Names of the rewards, the keys of `RewardResult.parts`."""
        return list(self._scorers)

    def __call__(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Return the rewards of each sample."""
        samples = list(samples)
        outcomes = {name: all_outcomes(scorer, samples) for name, (_, scorer) in self._scorers.items()}
        results = []
        for row in range(len(samples)):
            found = {name: outcome[row] for name, outcome in outcomes.items()}
            parts = {name: 0.0 if isinstance(x, Failure) else x for name, x in found.items()}
            errors = [f"{name}: {x.reason}" for name, x in found.items() if isinstance(x, Failure)]
            total = sum((self._scorers[name][0] * x for name, x in parts.items()), 0.0)
            results.append(RewardResult(total, parts, "; ".join(errors) or None))
        return results


def check_columns(config: Sequence[Reward], columns: Iterable[str], where: str) -> None:
    """Check that data have the columns that rewards need.

    Args:
      config: the rewards.
      columns: names of the columns.
      where: the data, such as a file, for the message.

    Raises:
      ConfigError: a column is missing.
    """
    columns = list(columns)
    for reward in config:
        missing = [name for name in reward.columns if name not in columns]
        if missing:
            raise ConfigError(
                f"reward {reward.kind} needs the column {', '.join(map(repr, missing))} in {where}, which has "
                f"{', '.join(map(repr, columns)) or 'no columns'}; add it to each record, or name another one."
            )
