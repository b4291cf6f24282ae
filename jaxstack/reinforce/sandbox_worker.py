"""The worker of a sandbox, a process that runs one program after the other and ends each with all that it started."""

import contextlib
import gc
import json
import math
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxstack.reinforce.sandbox import Limits, SandboxError, pack_value
from jaxstack.reinforce.sandbox_isolation import (
    Isolation,
    become,
    drop_capabilities,
    end_with_parent,
    enter_namespaces,
    fork_apart,
    install_filter,
    isolation_problem,
    make_root,
    mount_folder,
    readable_by_all,
)


class _Host:
    """A worker: forks for one program after the other.

    Args:
      wanted: the isolation; None: the best that there is.
      root: an empty folder, in which it mounts the file system of the programs.
      limits: those of each program.
    """

    def __init__(self, wanted: Isolation | None, root: str, limits: Limits):
        self._limits = limits
        # Each worker's programs have a user of their own, whose processes the kernel counts.
        self._user = 60_000 + os.getpid() % 5_000
        if problem := isolation_problem():
            raise SandboxError(problem)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        self.isolation: Isolation = "process"
        if wanted != "process":
            # A try leaves its traces, so that it is made in another process first.
            problem = self._try_namespaces(root)
            if problem is None:
                enter_namespaces(self._user)
                make_root(root)
                self.isolation = "namespaces"
            elif wanted == "namespaces":
                raise SandboxError(f"namespaces are not available here ({problem})")
        self._privileged = os.geteuid() == 0 and (self.isolation == "namespaces" or readable_by_all())
        ran = self.run({"code": "", "steps": [["value", "1"]], "stdin": None, "token": "try"})
        if "try [" not in ran["messages"] or ran["problem"] is not None:
            raise SandboxError(f"a program cannot be run: {ran['problem'] or ran['messages']}")

    def _try_namespaces(self, root: str) -> str | None:
        """Return why namespaces cannot be used; None if they can."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                enter_namespaces(self._user)
                make_root(root)
                child = fork_apart()
                if child == 0:
                    os._exit(0)
                os.waitpid(child, 0)
                readable = os.path.exists(os.__file__)
                os.write(writing, b"usable" if readable else f"{self._user} cannot read {os.__file__}".encode())
            except BaseException as error:
                os.write(writing, str(error).encode()[:500])
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read().decode()
        os.waitpid(pid, 0)
        return None if told == "usable" else told or "no answer"

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run a program, end it with all that it started, and return what it wrote."""
        keeps_output = job["stdin"] is not None
        pipes = [os.pipe(), os.pipe(), os.pipe()]  # messages, output, input
        pid = self._fork(job, pipes)
        (messages, messages_in), (output, output_in), (stdin_out, stdin) = pipes
        for place in (messages_in, output_in, stdin_out):
            os.close(place)
        text = (job["stdin"] or "").encode() if keeps_output else b""
        kept, problem = self._exchange(pid, {messages: b"", output: b""}, stdin, text)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if problem is None and code != 0:
            problem = (
                f"it was ended by {_signal_name(code)}" if code < 0 or code > 128 else f"it left with exit code {code}"
            )
        return {
            "messages": kept[messages].decode(errors="replace"),
            "output": kept[output].decode(errors="replace"),
            "problem": problem,
        }

    def _exchange(
        self, pid: int, kept: dict[int, bytes], stdin: int, text: bytes
    ) -> tuple[dict[int, bytes], str | None]:
        """Feed a program and read what it writes until it ends; return that, and the limit that it exceeded."""
        end = time.monotonic() + self._limits.seconds
        poll = select.poll()
        process = os.pidfd_open(pid)
        open_places = {*kept, process}
        for place in open_places:
            poll.register(place, select.POLLIN)
        poll.register(0, 0)  # tells when the process that uses the sandbox ends
        os.set_blocking(stdin, False)
        if text:
            poll.register(stdin, select.POLLOUT)
        else:
            os.close(stdin)
        problem = None
        while open_places and problem is None:
            left = end - time.monotonic()
            if left <= 0:
                problem = f"it took more than {self._limits.seconds:g} s"
                break
            for place, event in poll.poll(left * 1000):
                if place == 0:
                    os._exit(1)  # the kernel ends the program with its parent
                elif place == stdin and text:
                    text = _fed(stdin, text) if event & select.POLLOUT else b""
                    if not text:
                        poll.unregister(stdin)
                        os.close(stdin)
                elif place != process and (part := os.read(place, 1 << 16)):
                    kept[place] += part
                    if len(kept[place]) > self._limits.output:
                        problem = f"it wrote more than {self._limits.output:,} bytes"
                else:
                    poll.unregister(place)
                    open_places.discard(place)
        if text:
            os.close(stdin)
        for place in (*kept, process):
            os.close(place)
        return kept, problem

    def _fork(self, job: dict[str, Any], pipes: Sequence[tuple[int, int]]) -> int:
        """Return the process whose end is the end of the program and of all that it started."""
        if self.isolation == "process":
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._become_program(job, pipes, parent)
            return pid
        pid = fork_apart()
        if pid == 0:
            self._become_first_process(job, pipes)
        return pid

    def _become_first_process(self, job: dict[str, Any], pipes: Sequence[tuple[int, int]]) -> None:
        """Be process 1 of the program: with it the kernel ends all others, whatever they did to get away."""
        code = 1
        try:
            end_with_parent()
            if os.getppid() != 0:  # of a parent outside
                os._exit(1)
            mount_folder(self._limits.folder, self._user if self._privileged else None)
            program = os.fork()
            if program == 0:
                self._become_program(job, pipes, None)
            for pair in pipes:
                for place in pair:
                    os.close(place)
            ended = 0
            status = 0
            while ended != program:
                ended, status = os.wait()
            code = os.waitstatus_to_exitcode(status)
            code = 128 - code if code < 0 else code
        finally:
            os._exit(code)

    def _become_program(self, job: dict[str, Any], pipes: Sequence[tuple[int, int]], parent: int | None) -> None:
        code = 70
        try:
            if parent is not None:
                end_with_parent()
                if os.getppid() != parent:
                    os._exit(1)
            self._restrict(job, pipes)
            code = _execute(job)
        except BaseException:
            os.write(_MESSAGES, f"{job['token']} {json.dumps(['failed', traceback.format_exc()[-500:]])}\n".encode())
        finally:
            os._exit(code)

    def _restrict(self, job: dict[str, Any], pipes: Sequence[tuple[int, int]]) -> None:
        """Give up everything that a program shall not have."""
        (_, messages), (_, output), (stdin, _) = pipes
        null = os.open("/dev/null", os.O_RDWR)
        keeps = job["stdin"] is not None
        sources = [stdin if keeps else null, output if keeps else null, null, messages]
        high = [os.dup2(place, 100 + number) for number, place in enumerate(sources)]
        for number, place in enumerate(high):
            os.dup2(place, number, inheritable=number < 3)
        os.closerange(4, 1 << 16)
        os.setsid()
        limits = self._limits
        mebibyte = 1 << 20
        wanted = {
            resource.RLIMIT_AS: limits.memory * mebibyte,
            resource.RLIMIT_CPU: math.ceil(limits.seconds) + 1,
            resource.RLIMIT_FSIZE: limits.folder * mebibyte,
            resource.RLIMIT_NOFILE: 64,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
        if self.isolation == "namespaces":
            wanted[resource.RLIMIT_NPROC] = limits.processes + (0 if self._privileged else 2)
        for kind, value in wanted.items():
            resource.setrlimit(kind, (value, value))
        os.umask(0o077)
        os.environ.clear()
        folder = "/tmp" if self.isolation == "namespaces" else "/"
        os.environ.update(PATH="/usr/bin:/bin", HOME=folder, TMPDIR=folder, LANG="C.UTF-8", OMP_NUM_THREADS="1")
        os.chdir(folder)
        if self._privileged:
            become(self._user)
        drop_capabilities()
        install_filter(self.isolation)


_MESSAGES = 3
"""File descriptor of a program's messages to its worker."""


def _fed(place: int, text: bytes) -> bytes:
    """Write the beginning of a text to a pipe and return the rest; b"" if nobody reads it."""
    try:
        return text[os.write(place, text[: 1 << 16]) :]
    except BrokenPipeError:
        return b""


def _signal_name(code: int) -> str:
    number = -code if code < 0 else code - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _execute(job: dict[str, Any]) -> int:
    """Execute a program and its steps, and send the results to the worker; return the exit code of the process."""
    # The program may replace what modules hold, so that functions are looked up before it.
    write = os.write
    pack = pack_value
    dump = json.dumps
    leave = os._exit
    token = job["token"]

    def send(kind: str, value: Any) -> None:
        line = f"{token} {dump([kind, value])}\n".encode()
        while line:
            line = line[write(_MESSAGES, line) :]

    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.argv = ["program.py"]
    steps = job["steps"]
    plain = job["stdin"] is not None
    namespace: dict[str, Any] = {"__name__": "__main__" if plain else "program"}
    code = job.pop("code")
    try:
        exec(compile(code, "program.py", "exec"), namespace)
    except SystemExit as error:
        if not plain or error.code not in (None, 0):
            send("failed", f"it left with SystemExit: {error.code!r:.100}")
            return 0
    except BaseException as error:
        send("failed", _error_text(error))
        return 0
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    for kind, source in steps:
        try:
            if kind == "run":
                exec(compile(source, "tests.py", "exec"), namespace)
                send("value", None)
            else:
                send("value", pack(eval(compile(source, "tests.py", "eval"), namespace)))
        except BaseException as error:
            send("error", _error_text(error))
    send("end", None)
    leave(0)
    return 0


def _error_text(error: BaseException) -> str:
    """Return an exception as one line, with the line of the program that raised it."""
    try:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "program.py"]
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        return text[:300] + (f" (line {lines[-1]})" if lines else "")
    except BaseException:
        return "an exception without a text"


_WARM = (
    "bisect collections copy dataclasses datetime decimal enum fractions functools heapq itertools json math operator "
    "random re statistics string typing"
)
"""Modules that workers import once, so that programs find them in memory."""


def main(wanted: Isolation | None, root: str, limits: dict[str, Any]) -> None:
    """Run the programs that standard input has as lines of JSON; write what each did as a line to standard output.

    Args:
      wanted: the isolation; None: the best that there is.
      root: an empty folder, in which the file system of the programs is mounted.
      limits: the fields of `Limits`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        host = _Host(wanted, root, Limits(**limits))
    except (SandboxError, OSError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    for name in _WARM.split():
        __import__(name)
    gc.freeze()
    os.write(1, json.dumps({"isolation": host.isolation}).encode() + b"\n")
    pending = b""
    while part := os.read(0, 1 << 16):
        *lines, pending = (pending + part).split(b"\n")
        for line in lines:
            os.write(1, json.dumps(host.run(json.loads(line))).encode() + b"\n")
