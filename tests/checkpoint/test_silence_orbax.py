"""What Orbax and TensorStore say of a failed write is left out; what asyncio says of a user's tasks is not."""

import asyncio
import functools
import gc
import logging
import sys
import types
import warnings

import pytest
import tensorstore
from orbax.checkpoint import v1 as ocp

from jaxstack.checkpoint.arrays import silence_orbax

NOWHERE = "/proc/nothing"


@pytest.fixture
def said(monkeypatch, caplog):
    """What is logged, and what reaches the hook for exceptions that nobody can catch."""
    caplog.set_level(logging.ERROR)
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    silence_orbax("state")
    silence_orbax("state")
    yield lambda: [record.getMessage() for record in caplog.records] + [str(u.exc_value) for u in heard]
    for name in ("absl", "asyncio"):
        logger = logging.getLogger(name)
        logger.filters = [known for known in logger.filters if type(known).__name__ != "_WithoutOrbax"]


def leave_alone(*coroutines):
    """Runs them as tasks whose exceptions nobody asks for."""

    async def main():
        tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
        await asyncio.wait(tasks)

    asyncio.run(main())
    gc.collect()


async def users_own():
    raise ValueError("mine")


async def users_own_thread():
    await asyncio.to_thread(lambda: 1 / 0)


async def users_call_of_orbax():
    ocp.load(NOWHERE)


@pytest.mark.parametrize("task", [users_own, users_own_thread, users_call_of_orbax])
def test_a_users_own_task_is_still_told(said, task):
    leave_alone(task())
    assert len(said()) == 1 and "exception was never retrieved" in said()[0] and task.__name__ in said()[0]


def orbax_function(body):
    """A function as if Orbax's code had defined it."""
    return types.FunctionType(body.__code__, {"__name__": "orbax.checkpoint.thing"})


async def fails():
    raise ValueError("full")


def test_orbax_tasks_and_gathered_tasks_are_not_told(said):
    theirs = orbax_function(fails)

    async def gathered():
        return asyncio.gather(theirs(), theirs())

    leave_alone(theirs(), gathered())
    assert said() == []


def test_a_function_of_orbax_in_a_thread_is_not_told(said):
    """A full disk in one of its directories: the future of the thread, with an OSError."""

    def full():
        raise OSError(28, "No space left on device", "/x/arrays/state")

    async def in_thread():
        asyncio.get_running_loop().run_in_executor(None, orbax_function(full))
        await asyncio.sleep(0.05)

    leave_alone(in_thread())
    assert said() == []


@pytest.mark.parametrize("folder, told", [("state", 0), ("mine", 1)])
def test_a_future_of_tensorstore_is_told_only_where_the_file_is_none_of_a_checkpoint(said, tmp_path, folder, told):
    """No Python code raised its exception."""
    (tmp_path / folder / "key.__lock").mkdir(parents=True)

    async def write():
        store = tensorstore.KvStore.open({"driver": "file", "path": f"{tmp_path}/{folder}/"}).result()
        next(store.write("key", b"value").__await__())
        await asyncio.sleep(0.1)

    leave_alone(write())
    assert len(said()) == told and all("Future exception was never retrieved" in text for text in said())


def test_of_closed_loops_only_a_call_from_cpp_is_left_out(said):
    loop = asyncio.new_event_loop()
    loop.close()

    class Mine:
        def __del__(self):
            loop.call_soon_threadsafe(print)

    mine = Mine()
    del mine
    assert said() == ["Event loop is closed"]

    def unraisable(call):
        try:
            call()
        except RuntimeError as error:
            # Without this function's own frame, as where no Python function calls.
            return types.SimpleNamespace(
                exc_type=RuntimeError, exc_value=error, exc_traceback=error.__traceback__.tb_next, object=None
            )

    sys.unraisablehook(unraisable(lambda: loop.call_soon_threadsafe(print)))
    assert len(said()) == 2  # called by a function of this file
    sys.unraisablehook(unraisable(functools.partial(loop.call_soon_threadsafe, print)))
    assert len(said()) == 2


def test_a_coroutine_of_orbax_that_is_never_awaited_is_not_told():
    async def write_fragment(): ...

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        silence_orbax("state")
        write_fragment.__qualname__ = "async_serialize_from_host.<locals>.write_fragment"
        write_fragment()
        assert not told
        write_fragment.__qualname__ = "mine.<locals>.write_fragment"
        write_fragment()
    assert "mine" in str(told[0].message)
