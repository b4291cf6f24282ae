"""Coroutines that run at the same time: several until one fails, or one until a reason to give it up."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


async def run_all(*works: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run coroutines as tasks until one fails, whose exception is raised, or until this call is cancelled.

    The others are then cancelled, once each, so that what they do at their end is not interrupted. All tasks have ended
    when the call returns or raises.
    """
    tasks = [asyncio.ensure_future(work()) for work in works]
    done = set[asyncio.Task]()
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    errors = [task.exception() for task in (*done, *tasks) if not task.cancelled()]
    for error in filter(None, errors):
        raise error


async def unless(work: Coroutine[Any, Any, T], *reasons: Coroutine[Any, Any, NoReturn]) -> T:
    """Await `work` and return its result, unless a reason to give it up comes first.

    A reason is a coroutine that waits for an event, such as the end of a connection, and then raises an exception. That
    exception is raised here too, and `work` is cancelled, as it is when this call is cancelled. If `work` returns a
    result all the same, the result's method `close`, where it has one, is called: nobody else would close it.
    """
    task = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(reason) for reason in reasons]
    try:
        done, _ = await asyncio.wait((task, *others), return_when=asyncio.FIRST_COMPLETED)
        return (task if task in done else done.pop()).result()
    except BaseException:
        task.add_done_callback(_discard)
        raise
    finally:
        task.cancel()
        for other in others:
            other.cancel()
            other.add_done_callback(_discard)


def _discard(task: asyncio.Task) -> None:
    """Take note of what has become of a task that nobody awaits any more, so that asyncio does not warn of it."""
    if not task.cancelled() and task.exception() is None:
        getattr(task.result(), "close", lambda: None)()
