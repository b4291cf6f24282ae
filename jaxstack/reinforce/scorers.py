"""Computes rewards in this process, or in another one that is ended if it takes too long.

A `Scorer` gives each `Sample` a number, or a `Failure` that says why it has none.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from jaxstack.errors import ConfigError, nearest


@dataclasses.dataclass(frozen=True)
class Failure:
    """Reason for which a sample has no reward."""

    reason: str


Outcome: TypeAlias = float | Failure


@dataclasses.dataclass(frozen=True)
class Sample:
    """An answer to a prompt, as a reward sees it.

    Attributes:
      prompt: a text, or messages with `role` and `content`.
      answer: the decoded answer, without its stop token; of several turns the last one.
      columns: the other keys of the prompt's record.
      truncated: the answer reached the limit of tokens, and has no stop token.
      tokens: number of the answer's tokens, the stop token included; None if it is not known.
      messages: all messages after the prompt, with `role` and `content`: answers, results of tools, observations.
      environment: sum of the rewards of the environment's steps, or why it failed; None: there is no environment.
    """

    prompt: str | Sequence[Mapping[str, Any]]
    answer: str
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    truncated: bool = False
    tokens: int | None = None
    messages: Sequence[Mapping[str, Any]] = ()
    environment: Outcome | None = None

    def column(self, name: str) -> Any:
        """Return the value of a column.

        Raises:
          ValueError: the record does not have it.
        """
        value = self.columns.get(name)
        if value is None:
            raise ValueError(f"the record has no column {name!r}; its columns: {', '.join(self.columns) or 'none'}")
        return value


class Scorer(Protocol):
    """Interface of a reward that is ready: it may hold processes or a model."""

    def __call__(self, samples: Sequence[Sample]) -> Sequence[Outcome]: ...

    def close(self) -> None: ...


class Computation(Protocol):
    """Interface of what computes rewards. Both functions may raise any exception."""

    def score(self, samples: Any) -> Any:
        """Return the reward of each sample."""
        ...

    def prepare(self) -> Any:
        """Do what can fail before there are samples; what it returns is `InAnotherProcess.prepared`."""
        ...


@functools.cache
def imported(path: str) -> Callable[..., Any]:
    """Return the function or class that a path names, `module:name` or `file.py:name`; a file is run once.

    Raises:
      ConfigError: there is no such file, or no such name in it, or it is neither. Importing may raise any exception.
    """
    place, _, name = path.rpartition(":")
    if place.endswith(".py"):
        file = Path(place).expanduser().absolute()
        if not file.is_file():
            files = [other.name for other in file.parent.glob("*.py")]
            hint = nearest(file.name, files) if files else "its folder has no file of Python"
            raise ConfigError(f"there is no file {file}; {hint}")
        module = sys.modules.get(file.stem)
        if module is None or getattr(module, "__file__", None) != str(file):
            spec = importlib.util.spec_from_file_location(file.stem, file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[file.stem] = module
            spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    found = getattr(module, name, None)
    if not callable(found):
        own = [n for n, x in vars(module).items() if getattr(x, "__module__", None) == module.__name__ and callable(x)]
        hint = nearest(name, own) if own else "it has none"
        raise ConfigError(f"{place} has no function or class {name}; {hint}")
    return found


def check_path(path: str) -> str:
    """Return a path that has the form that `imported` takes.

    Raises:
      ValueError: it has another one.
    """
    place, _, function = path.rpartition(":")
    if not place or not function.isidentifier():
        raise ValueError(f"path is module:function or file.py:function; found {path!r}.")
    return path


def describe_error(error: BaseException) -> str:
    """Return the kind and the text of an exception, at most 500 characters."""
    return f"{type(error).__name__}: {error}"[:500] if str(error) else type(error).__name__


def all_outcomes(scorer: Scorer, samples: Sequence[Sample]) -> list[Outcome]:
    """Return a finite number or the reason of a failure for each sample, whatever the reward does."""
    if not samples:
        return []
    try:
        found = list(scorer(samples))
    except Exception as error:
        return [Failure(describe_error(error))] * len(samples)
    return [x if isinstance(x, Failure) or math.isfinite(x) else Failure(f"{x} is no finite number") for x in found]


class InThisProcess:
    """Computes a reward in this process."""

    def __init__(self, reward: Computation):
        self._reward = reward

    def __call__(self, samples: Sequence[Sample]) -> Sequence[Outcome]:
        return self._reward.score(samples)

    def close(self) -> None:
        pass


_MOST_HANGS = 3
"""Samples of a call that may exceed the time limit, each by itself, before the others are given up."""


class InAnotherProcess:
    """Computes a reward in another process, which is ended if it takes too long, and started anew at the next call."""

    def __init__(self, reward: Computation, time_limit: float):
        self._reward = reward
        self._limit = time_limit
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Any = None
        self.prepared: Any = None
        """The result of the reward's own `prepare`; None before `prepare` is called."""

    def prepare(self) -> str | None:
        """Start the process, and return why the reward's function cannot be imported; None if it can."""
        self.prepared = self.request(None, max(self._limit, _START_LIMIT))
        return self.prepared.reason if isinstance(self.prepared, Failure) else None

    def __call__(self, samples: Sequence[Sample]) -> Sequence[Outcome]:
        found = self._ask(samples)
        if not isinstance(found, Failure):
            return found
        if len(samples) == 1:
            return [found]
        outcomes: list[Outcome] = []
        hangs = 0
        for sample in samples:
            if hangs == _MOST_HANGS:
                outcomes.append(Failure(f"not computed: other answers of this step took over {self._limit:g} s each"))
                continue
            found = self._ask([sample])
            outcomes += [found] if isinstance(found, Failure) else found
            hangs += isinstance(found, _TooLong)
        return outcomes

    def _ask(self, samples: Sequence[Sample]) -> list[Outcome] | Failure:
        found = self.request(list(samples), self._limit)
        return found if isinstance(found, Failure) else list(found)

    def request(self, samples: list[Any] | None, limit: float) -> Any:
        """Return what the process answers within `limit` seconds, or a failure; None as samples prepares it."""
        if samples is not None and self._process is None and (problem := self.prepare()) is not None:
            return Failure(problem)
        try:
            if self._process is None:
                self._start()
            self._pipe.send((self._reward, samples))
            if self._pipe.poll(limit):
                return self._pipe.recv()
            failure: Failure = _TooLong(f"took more than {limit:g} s and was ended")
        except (EOFError, OSError) as error:
            failure = Failure(f"its process ended, {describe_error(error)}{self._exit_code()}")
        except Exception as error:  # a column that cannot be pickled
            failure = Failure(describe_error(error))
        self.close()
        return failure

    def _start(self) -> None:
        self._pipe, other = multiprocessing.Pipe()
        # The trainer holds the GPUs, of whose memory a second process would take a part.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
        environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *filter(None, sys.path)])
        code = "from jaxstack.reinforce.scorers import serve; serve()"
        command = [sys.executable, "-c", code, str(other.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[other.fileno()], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
        other.close()

    def _exit_code(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return "" if self._process is None else f", exit code {self._process.wait(1)}"
        return ""

    def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._pipe.close()
        self._process = None


_START_LIMIT = 120.0
"""Seconds for starting a process and importing a function."""


@dataclasses.dataclass(frozen=True)
class _TooLong(Failure):
    """A failure because of the time limit."""


def serve() -> None:
    """Compute rewards for the process that started this one, until that ends."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    with multiprocessing.connection.Connection(int(sys.argv[1])) as pipe, contextlib.suppress(EOFError, OSError):
        while True:
            reward, samples = pipe.recv()
            try:
                answer = reward.prepare() if samples is None else reward.score(samples)
            except ConfigError as error:
                answer = Failure(str(error))
            except BaseException as error:
                answer = Failure(f"{describe_error(error)}{place_of(error)}")
            pipe.send(answer)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def place_of(error: BaseException) -> str:
    """Return the line at which an exception was raised, as ` (file.py:3)`; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
