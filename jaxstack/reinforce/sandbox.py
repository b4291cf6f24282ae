"""Sandbox: runs programs that nobody has read, such as generated code, in processes with hard limits.

A `Sandbox` holds a few workers (`sandbox_worker`), small Python processes without JAX. A worker forks for every
program, so that a program starts within milliseconds, and ends it with everything that it started. What is guaranteed
depends on the machine, see `Isolation`. Nothing that a program sends back is evaluated; expected results never enter
its process.
"""

import contextlib
import dataclasses
import json
import numbers
import os
import queue
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from jaxstack.reinforce.sandbox_isolation import Isolation


class SandboxError(RuntimeError):
    """Raised where no sandbox can be made; the message tells why."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of one program.

    Attributes:
      seconds: time, as on a clock, until the program and all that it started is ended.
      memory: address space of each process, in MiB.
      processes: number of processes and threads at a time.
      folder: size of all files in its folder, in MiB.
      output: bytes that are kept of what it writes to its standard output, after which it is ended.
    """

    seconds: float = 4.0
    memory: int = 512
    processes: int = 16
    folder: int = 32
    output: int = 1 << 20


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, and what is wanted of it.

    Attributes:
      code: Python code, executed as a module.
      steps: after it, in the same namespace, pairs of `run` and statements, or of `value` and an expression.
      stdin: text on its standard input; without it there is none, and its output is not kept.
    """

    code: str
    steps: Sequence[tuple[Literal["run", "value"], str]] = ()
    stdin: str | None = None


@dataclasses.dataclass(frozen=True)
class Ran:
    """Result of a program.

    Attributes:
      steps: for each step that was reached either (True, its value) or (False, its exception). Values are None, truth
        values, numbers, texts, bytes, and lists, tuples, sets and dicts of them, of exactly these types; of `run` None.
      output: the beginning of its standard output.
      problem: why the program did not reach its end, such as an exception or its limit of time; None if it did.
    """

    steps: Sequence[tuple[bool, Any]]
    output: str = ""
    problem: str | None = None


class Sandbox:
    """Runs programs on several workers. It holds processes: close it, or use it as a context. Thread-safe.

    Args:
      limits: those of each program.
      isolation: how programs are kept apart; None: namespaces where the machine allows them, or else process.
      workers: programs that run at a time; default: the number of processors.

    Raises:
      SandboxError: the isolation is not available here.
    """

    def __init__(self, limits: Limits | None = None, isolation: Isolation | None = None, workers: int | None = None):
        self._limits = limits or Limits()
        self._workers: list[_Worker] = []
        wanted = isolation
        try:
            for _ in range(workers or len(os.sched_getaffinity(0))):
                self._workers.append(_Worker(self._limits, wanted))
                wanted = self._workers[0].isolation
        except BaseException:
            self.close()
            raise
        self.isolation: Isolation = self._workers[0].isolation
        self._idle = queue.SimpleQueue[_Worker]()
        for worker in self._workers:
            self._idle.put(worker)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers, and with them the programs that run."""
        for worker in self._workers:
            worker.close()

    def __call__(self, programs: Sequence[Program]) -> list[Ran]:
        """Run programs and return what they did, in their order. No program makes it raise an exception."""
        with ThreadPoolExecutor(len(self._workers)) as threads:
            return list(threads.map(self._run, programs))

    def _run(self, program: Program) -> Ran:
        worker = self._idle.get()
        try:
            return worker.run(program)
        finally:
            self._idle.put(worker)


class _Worker:
    """The end of a worker in the process that uses the sandbox."""

    def __init__(self, limits: Limits, isolation: Isolation | None):
        self._limits = limits
        self._wanted = isolation
        self._process: subprocess.Popen[bytes] | None = None
        self._root: str | None = None
        self.isolation: Isolation = self._start()

    def _start(self) -> Isolation:
        self._root = tempfile.mkdtemp(prefix="sandbox-")
        os.chmod(self._root, 0o755)
        settings = json.dumps([_PLACES, self._wanted, self._root, dataclasses.asdict(self._limits)])
        # Without the environment, user site and working directory; of the file descriptors only these three.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-X", "utf8", "-c", _WORKER, settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", **{name: os.environ[name] for name in _KEPT if name in os.environ}},
            cwd="/",
            start_new_session=True,
        )
        reply = self._receive(_START_SECONDS)
        if reply is None or "error" in reply:
            self.close()
            raise SandboxError((reply or {}).get("error", "its worker did not start"))
        return reply["isolation"]

    def run(self, program: Program) -> Ran:
        """Run a program. A worker that does not answer is started anew for the next one."""
        token = secrets.token_hex(8)
        job = {**dataclasses.asdict(program), "token": token}
        try:
            if self._process is None:
                self._start()
            assert self._process is not None and self._process.stdin is not None
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
            reply = self._receive(self._limits.seconds + _GRACE_SECONDS)
        except (OSError, SandboxError) as error:
            reply = {"problem": f"its worker failed: {error}"}
            self.close()
        if reply is None:
            self.close()
            return Ran([], problem="its worker did not answer and was ended")
        return _ran(reply, token, len(program.steps))

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """Return the worker's next line, or None if it ends or does not write one in time."""
        assert self._process is not None and self._process.stdout is not None
        place = self._process.stdout.fileno()
        end = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([place], [], [], max(end - time.monotonic(), 0))
            if not ready or not (part := os.read(place, 1 << 16)):
                return None
            line += part
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
        if self._root is not None:
            with contextlib.suppress(OSError):
                os.rmdir(self._root)
        self._process = None
        self._root = None


_PLACES = [*map(os.path.abspath, sys.path), str(Path(__file__).resolve().parents[2])]
"""Folders in which a worker finds jaxstack and what that imports, as this process does. Programs do not look there."""
_WORKER = """
import json, sys
places, *settings = json.loads(sys.argv[1])
own = sys.path
sys.path = places
from jaxstack.reinforce.sandbox_worker import main
sys.path = own
main(*settings)
"""
_KEPT = ("LD_LIBRARY_PATH",)
"""Variables of the environment without which Python may not start. Programs do not get them."""
_START_SECONDS = 60.0
_GRACE_SECONDS = 20.0
"""Time for starting a program and ending it, with all processors busy."""


def _ran(reply: Mapping[str, Any], token: str, count: int) -> Ran:
    """Return what a worker tells of a program; of its messages only those that begin with the token count."""
    steps: list[tuple[bool, Any]] = []
    problem = reply.get("problem")
    finished = False
    for line in reply.get("messages", "").splitlines():
        mark, _, text = line.partition(" ")
        if mark != token or finished:
            continue
        try:
            kind, value = json.loads(text)
            match kind:
                case "value":
                    steps.append((True, _unpack_value(value)))
                case "error":
                    steps.append((False, str(value)))
                case "failed":
                    problem = problem or str(value)
                case _:
                    finished = True
        except (ValueError, TypeError, RecursionError, KeyError) as error:
            steps.append((False, f"its value cannot be read: {error}"))
    if not finished:
        problem = problem or "it ended before its tests did"
    return Ran(steps[:count], reply.get("output", ""), problem)


def pack_value(value: Any) -> Any:
    """Return a value as JSON. Of subclasses only what they share with the plain types is kept.

    Raises:
      TypeError: it has a part of another type.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return "".join(value)
    if isinstance(value, int):
        return int.__index__(value)
    if isinstance(value, float):
        return ["float", float.__repr__(value)]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        return ["dict", [[pack_value(k), pack_value(x)] for k, x in dict.items(value)]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            parts: Any = getattr(kind, "__iter__")(value)  # noqa: B009 (not that of a subclass)
            return [kind.__name__, [pack_value(x) for x in parts]]
    if hasattr(value, "tolist"):  # arrays and scalars of NumPy
        return pack_value(value.tolist())
    if isinstance(value, numbers.Real):
        return ["float", repr(float(value))]
    raise TypeError(f"{type(value).__name__} is no plain value")


def _unpack_value(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    match kind:
        case "float":
            return float(content)
        case "bytes":
            return bytes.fromhex(content)
        case "dict":
            return {_unpack_value(k): _unpack_value(x) for k, x in content}
    makers: Mapping[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    return makers[kind](_unpack_value(x) for x in content)


# Below is what runs in a worker.
