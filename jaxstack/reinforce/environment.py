"""Environments: a user's functions, which the model calls as tools, and classes, which answer it turn by turn.

The code runs in processes of its own, which see no GPU: one imports it, and each sample has a copy of that process, so
that a call that hangs or ends its process costs that sample alone.
"""

import contextlib
import dataclasses
import inspect
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import re
import signal
import sys
import time
import typing
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import pydantic

from jaxstack.errors import ConfigError
from jaxstack.reinforce.config import EnvironmentConfig
from jaxstack.reinforce.scorers import Failure, InAnotherProcess, describe_error, imported, place_of

Messages: TypeAlias = tuple[Mapping[str, Any], ...]
_TURN_METHODS = ("reset", "step")


@dataclasses.dataclass(frozen=True)
class Reply:
    """Result of a call of the environment: messages for the model, the reward of the step, and whether it ends."""

    messages: Messages = ()
    reward: float = 0.0
    done: bool = False


@dataclasses.dataclass(frozen=True)
class Request:
    """A call of the environment: of `reset`, of `step`, or of the tool `name`, with its argument."""

    name: str
    argument: Any


@dataclasses.dataclass(frozen=True)
class Work:
    """Calls for one sample, one after the other.

    Attributes:
      sample: number of the sample, which no other has.
      seed: of Python's and NumPy's random numbers, when its process starts.
      requests: the calls.
    """

    sample: int
    seed: int
    requests: Sequence[Request]


@dataclasses.dataclass(frozen=True)
class Description:
    """The tools and the methods of an environment, as the main process knows them.

    Attributes:
      tools: JSON schema of each tool.
      resets, steps: it has this method.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    resets: bool = False
    steps: bool = False


class Environment:
    """The environment of a run, whose code runs in other processes.

    Args:
      config: the functions and the class, and the limits.

    Raises:
      ConfigError: they cannot be imported, or used.
    """

    def __init__(self, config: EnvironmentConfig):
        self.config = config
        self._workers = config.workers or os.cpu_count() or 1
        self._process = InAnotherProcess(_Samples(config), config.time_limit)
        if (problem := self._process.prepare()) is not None:
            self._process.close()
            raise ConfigError(f"the environment {', '.join(config.path)} cannot be used: {problem}")
        self.description: Description = self._process.prepared

    def __call__(self, work: Sequence[Work]) -> list[list[Reply | Failure]]:
        """Return the replies to all calls; samples without work are ended."""
        rounds = sum(len(x.requests) for x in work) / self._workers + max((len(x.requests) for x in work), default=0)
        limit = (rounds + 1) * (self.config.time_limit + _SPARE)
        found = self._process.request(list(work), limit)
        if isinstance(found, Failure):
            return [[found] * len(x.requests) for x in work]
        return found

    def close(self) -> None:
        """End the processes."""
        self._process.close()


_SPARE = 5.0
"""Seconds for starting and ending a process, within which a call has its own limit."""


class Tool:
    """A function that the model may call, with its JSON schema.

    The schema follows from the signature and from a docstring in Google's style, or is the attribute `schema` of the
    function. Arguments are validated, and converted, by the types of the signature.

    Raises:
      TypeError: the function takes no named arguments.
    """

    def __init__(self, function: Callable[..., Any]):
        self.name = function.__name__
        given = getattr(function, "schema", None)
        self._model: type[pydantic.BaseModel] | None = None
        if given is None:
            self._model = _arguments_model(function)
            given = _describe(function, self._model)
        self.schema = given if "function" in given else {"type": "function", "function": given}

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call.

        Raises:
          ValueError: one is missing, unknown, or of another type.
        """
        if self._model is None:
            return dict(values)
        try:
            checked = self._model.model_validate(values)
        except pydantic.ValidationError as error:
            problems = (f"{'.'.join(map(str, x['loc']))}: {x['msg']}" for x in error.errors())
            raise ValueError("; ".join(problems)) from None
        fields = type(checked).model_fields
        return {str(field.alias): getattr(checked, name) for name, field in fields.items()}


def _arguments_model(function: Callable[..., Any]) -> type[pydantic.BaseModel]:
    hints = typing.get_type_hints(function, include_extras=True)
    described = _described_arguments(inspect.getdoc(function) or "")
    fields: dict[str, Any] = {}
    for number, (name, parameter) in enumerate(inspect.signature(function).parameters.items()):
        if name == "self":
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"the tool {function.__name__} has the argument {name}, which cannot be given by name")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = pydantic.Field(default, alias=name, description=described.get(name))
        fields[f"argument_{number}"] = (hints.get(name, Any), field)
    options = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    return pydantic.create_model(function.__name__, __config__=options, **fields)


def _describe(function: Callable[..., Any], model: type[pydantic.BaseModel]) -> dict[str, Any]:
    parameters = model.model_json_schema()
    for unused in ("title", "additionalProperties"):
        parameters.pop(unused, None)
    for value in parameters.get("properties", {}).values():
        value.pop("title", None)
    text = re.split(r"\n\s*(?:Args|Arguments|Returns|Raises):", inspect.getdoc(function) or "")[0]
    return {"name": function.__name__, "description": " ".join(text.split()), "parameters": parameters}


def _described_arguments(documentation: str) -> dict[str, str]:
    """Return the description of each argument in a docstring of Google's style."""
    section = re.search(r"^Arg(?:ument)?s:\n((?:[ \t]+.*\n?|\n)*)", documentation, re.MULTILINE)
    found: dict[str, str] = {}
    name = ""
    for line in (section[1] if section else "").splitlines():
        if begun := re.match(r"\s+(\w+)(?:\s*\(.*?\))?:\s*(.*)", line):
            name = begun[1]
            found[name] = begun[2].strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found


class _Samples:
    """The samples' environments, in the process that imports the user's code. It is sent there with each request."""

    def __init__(self, config: EnvironmentConfig):
        self._config = config

    def prepare(self) -> Description:
        """Import the code, and describe it."""
        return _Code(self._config.path).description

    def score(self, samples: Sequence[Work]) -> list[list[Reply | Failure]]:
        """Make the calls of each sample, those of different samples at the same time."""
        code = _Code(self._config.path)
        wanted = {work.sample for work in samples}
        for number in [number for number in _PROCESSES if number not in wanted]:
            _PROCESSES.pop(number).end()
        replies: list[list[Reply | Failure]] = [[] for _ in samples]
        waiting = deque(range(len(samples)))
        running: dict[Any, tuple[int, float]] = {}
        most = self._config.workers or os.cpu_count() or 1
        while waiting or running:
            while waiting and len(running) < most:
                place = waiting.popleft()
                work = samples[place]
                if len(replies[place]) == len(work.requests):
                    continue
                process = _PROCESSES.get(work.sample)
                if process is None:
                    process = _PROCESSES[work.sample] = _Process(code, work.seed)
                if process.problem is not None:
                    replies[place].append(process.problem)
                    waiting.appendleft(place)
                    continue
                process.send(work.requests[len(replies[place])])
                running[process.pipe] = (place, time.monotonic() + self._config.time_limit)
            if not running:
                break
            left = min(limit for _, limit in running.values()) - time.monotonic()
            ready = multiprocessing.connection.wait(list(running), max(left, 0))
            late = [pipe for pipe, (_, limit) in running.items() if limit <= time.monotonic() and pipe not in ready]
            for pipe in [*ready, *late]:
                place, _ = running.pop(pipe)
                number = samples[place].sample
                reply = _PROCESSES[number].receive(pipe in late, self._config.time_limit)
                replies[place].append(reply)
                if _PROCESSES[number].pipe is None and not code.keeps_state:
                    del _PROCESSES[number]  # another one may do the next call
                waiting.appendleft(place)
        return replies


class _Code:
    """The user's code: tools by name, and a class of which each sample has an object.

    Raises:
      TypeError: there are several classes, or a class that has nothing to call.
    """

    def __init__(self, paths: Sequence[str]):
        found = [imported(path) for path in paths]
        classes = [x for x in found if inspect.isclass(x)]
        if len(classes) > 1:
            raise TypeError(f"an environment has one class; found {', '.join(x.__name__ for x in classes)}")
        self.make = classes[0] if classes else None
        self.functions = {x.__name__: x for x in found if not inspect.isclass(x)}
        methods = {} if self.make is None else dict(inspect.getmembers(self.make, inspect.isroutine))
        public = {name: method for name, method in methods.items() if not name.startswith("_")}
        self._turns = [name for name in _TURN_METHODS if public.pop(name, None) is not None]
        if both := public.keys() & self.functions.keys():
            raise TypeError(f"two tools have the name {min(both)}")
        self.tools = {name: Tool(function) for name, function in {**self.functions, **public}.items()}
        if not self.tools and "step" not in self._turns:
            raise TypeError("an environment has tools or a method step; found neither")

    @property
    def description(self) -> Description:
        return Description(
            tuple(tool.schema for tool in self.tools.values()), "reset" in self._turns, "step" in self._turns
        )

    @property
    def keeps_state(self) -> bool:
        """True if the object of a sample is lost with its process."""
        return self.make is not None


_PROCESSES: "dict[int, _Process]" = {}
"""Number of a sample -> its process."""


class _Process:
    """A copy of this process that makes the calls of one sample."""

    def __init__(self, code: _Code, seed: int):
        self.problem: Failure | None = None
        """Reason why the process has ended, and its environment with it; None while it runs."""
        pipe, other = multiprocessing.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside a thread that only waits
            self._pid = os.fork()
        if self._pid == 0:
            pipe.close()
            _serve_sample(other, code, seed)
        other.close()
        self.pipe: Any = pipe

    def send(self, request: Request) -> None:
        with contextlib.suppress(OSError):  # `receive` reports a process that has ended
            self.pipe.send(request)

    def receive(self, late: bool, limit: float) -> Reply | Failure:
        """Return the reply to the newest request; the process is ended if it is late."""
        if late:
            self.problem = Failure(f"took more than {limit:g} s and was ended")
        else:
            try:
                return self.pipe.recv()
            except (EOFError, OSError) as error:
                self.problem = Failure(f"its process ended, {describe_error(error)}")
        self.end()
        return self.problem

    def end(self) -> None:
        if self.pipe is None:
            return
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self.pipe.close()
        self.pipe = None


def _serve_sample(pipe: Any, code: _Code, seed: int) -> None:
    """Make calls until the pipe is closed, in the process of a sample; does not return."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    made: Any = None
    try:
        while True:
            request = pipe.recv()
            try:
                if made is None and code.make is not None:
                    made = code.make()
                reply: Reply | Failure = _call(code, made, request)
            except BaseException as error:
                reply = Failure(f"{describe_error(error)}{place_of(error)}")
            pipe.send(reply)
    finally:
        os._exit(0)


def _call(code: _Code, made: Any, request: Request) -> Reply:
    if request.name == "reset":
        return Reply(_messages(made.reset(request.argument)))
    if request.name == "step":
        found = made.step(request.argument)
        if not isinstance(found, tuple) or len(found) != 3:
            raise TypeError(f"step returns an observation, a reward and if it is done; found {found!r:.100}")
        observation, reward, done = found
        if not math.isfinite(reward):
            raise ValueError(f"step returns a finite reward; found {reward}")
        return Reply(_messages(observation), float(reward), bool(done))
    name = request.name
    tool = code.tools.get(name)
    if tool is None:
        raise ValueError(f"there is no tool {name!r}; the tools: {', '.join(code.tools)}")
    result = (code.functions[name] if name in code.functions else getattr(made, name))(
        **tool.arguments(request.argument)
    )
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    return Reply(({"role": "tool", "name": name, "content": text},))


def _messages(observation: Any) -> Messages:
    """Return what the environment says as messages: a text is one of the user."""
    if observation is None:
        return ()
    if isinstance(observation, str):
        return ({"role": "user", "content": observation},)
    found = [observation] if isinstance(observation, Mapping) else list(observation)
    for message in found:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str) or "role" not in message:
            raise TypeError(f"an observation is a text, or messages with role and content; found {message!r:.100}")
    return tuple({"role": str(x["role"]), "content": x["content"]} for x in found)
