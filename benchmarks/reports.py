"""Processes that print events as JSON lines, so that those before a hang or a crash are not lost."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from jaxstack.distributed.parent_death import die_with_parent


def report(**event: Any) -> None:
    """Prints an event for the parent process."""
    print(json.dumps(event), flush=True)


def events(command: list[str], patience: float, environment: Mapping[str, str] | None = None) -> Iterator[dict]:
    """Yield the events that a process reports; the last one is `{"failed": reason}` if it failed.

    Args:
        command: starts a process that calls `report`.
        patience: seconds without a report after which it is killed; the stacks of its threads are printed.
        environment: variables that are set for the process.
    """
    variables = {"PYTHONFAULTHANDLER": "1", **os.environ, **(environment or {})}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables,
        preexec_fn=die_with_parent,  # else it would hold the GPU's memory after a benchmark that was stopped
    )  # fmt: skip
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put(None)

    def read_errors() -> None:
        errors.extend(process.stderr or ())

    readers = [threading.Thread(target=target, daemon=True) for target in (read, read_errors)]
    for reader in readers:
        reader.start()
    try:
        while (line := lines.get(timeout=patience)) is not None:
            if line.startswith("{"):
                yield json.loads(line)
        if process.wait():
            readers[1].join(timeout=5)
            said = "".join(errors)
            if "Traceback" in said:  # else the last lines are the message
                sys.stderr.write(said[-4000:])
            yield {"failed": f"exit {process.returncode}: {' | '.join(said.strip().splitlines()[-3:])[-500:]}"}
    except queue.Empty:
        process.send_signal(signal.SIGABRT)  # at which Python's fault handler says where it is
        readers[1].join(timeout=5)
        sys.stderr.write("".join(errors)[-4000:])
        yield {"failed": f"hangs: not a word for {patience:.0f} s"}
    finally:
        process.kill()
        process.wait(timeout=60)
