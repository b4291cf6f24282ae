"""`jaxstack.train` that kills itself, in the run's first start, at a given moment.

KILL is `MOMENT:N` or `MOMENT:N:RANK`: at the N-th time that the moment comes, in the process of that rank or in all.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from jaxstack.checkpoint import directory
from jaxstack.local_sgd.folder import FolderMean
from jaxstack.train import main
from jaxstack.worker_steps import Workers

_NOW: dict[str, tuple[Any, str]] = {
    "step": (Workers, "step"),
    "commit": (directory, "put_in_place"),  # of a checkpoint whose files are written
    "wait": (FolderMean, "_wait"),  # for the other workers, after the own changes are written
    "read": (FolderMean, "read"),  # of a mean that is settled
}


def killing(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The function, whose call of this number kills the process."""
    calls = 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)

    if hasattr(function, "as_text"):  # a compiled program, whose text the run's report reads
        counted.__dict__["as_text"] = function.as_text
    return counted


def kill_in_exchange(number: int) -> None:
    """Kills as an exchange of parameters between workers of one program begins, which the other process has begun."""
    compile_all = Workers.compile

    def compiled(self: Workers, *arguments: Any, **named: Any) -> None:
        compile_all(self, *arguments, **named)
        self.__dict__["_between"] = {phase: killing(run, number) for phase, run in self._between.items()}

    Workers.compile = compiled


def plan(moment: str, number: int, rank: str | None = None) -> None:
    """Prepares the kill, if it is for this process."""
    if rank not in (None, os.environ.get("JAX_PROCESS_ID", "0")) or os.environ.get("JAXSTACK_ATTEMPT", "1") != "1":
        return
    if moment == "exchange":
        kill_in_exchange(number)
        return
    owner, name = _NOW[moment]
    setattr(owner, name, killing(getattr(owner, name), number))


if __name__ == "__main__":
    if os.environ.get("KILL"):
        moment, number, *rank = os.environ["KILL"].split(":")
        plan(moment, int(number), *rank)
    sys.exit(main())
