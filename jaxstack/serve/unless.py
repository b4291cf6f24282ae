"""Work that is given up when something else happens first, without losing what it holds."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Ended(Exception):
    """Raised instead of a result when something else has happened first.

    Attributes:
      number: number of what has happened, in the order of the arguments.
    """

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


async def unless(work: Coroutine[Any, Any, T], *ends: Coroutine[Any, Any, Any]) -> T:
    """Return the result of `work`, which is cancelled when one of `ends` returns first, or this call is cancelled.

    A result that comes too late is closed if it has a method `close`.

    Raises:
      Ended: one of `ends` has returned first.
    """
    task = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(end) for end in ends]
    try:
        await asyncio.wait((task, *others), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Ended(next(number for number, other in enumerate(others) if other.done()))
        return task.result()
    except BaseException:
        task.add_done_callback(_discard)
        raise
    finally:
        for one in (task, *others):
            one.cancel()


def _discard(task: asyncio.Task) -> None:
    if not task.cancelled() and task.exception() is None:
        getattr(task.result(), "close", lambda: None)()
