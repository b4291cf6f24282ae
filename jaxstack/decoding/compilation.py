"""Compiles several jitted functions at the same time, in threads: XLA runs without Python's global lock.

compiler = ThreadedCompiler()
double = compiler.jit(lambda x: x * 2)
with compiler.compiling():
    double(np.zeros(8))  # compiles for this shape in a thread, and runs nothing
double(np.ones(8))  # runs what was compiled
"""

import collections
import contextlib
import functools
import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

_THREADS = min(4, os.cpu_count() or 1)
"""Number of programs that are compiled at the same time. For each XLA starts several threads and processes."""


@functools.cache
def cache_events() -> collections.Counter[str]:
    """Return the numbers of `cache_hits` and `cache_misses` of JAX's persistent compilation cache since the first call.

    The counter goes on counting, for all threads of this process. JAX counts as misses what it stores: programs that
    compile quickly are neither, nor are those of processes other than the first.
    """
    events = collections.Counter[str]()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
    return events


class _Compilation(NamedTuple):
    """The result of one call while programs are compiled: a running compilation, and what the call returned."""

    lowered: jax.stages.Lowered
    compiled: Future[jax.stages.Compiled]
    outputs: PyTree


class ThreadedCompiler:
    """Makes jitted functions, which are compiled in threads instead of run in a `with` block of `compiling`."""

    def __init__(self):
        self._pool: ThreadPoolExecutor | None = None
        self._called: list[Future[jax.stages.Compiled]] | None = None
        """Compilations of what has been called in a `with` block of `starting`; None outside of one."""
        self._started = dict[Hashable, _Compilation]()
        self.traced = 0
        """Number of programs that have been traced, each of which is compiled once."""

    def jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return `jax.jit(function, **options)`, as a function that `compiling` knows. Static arguments are hashable.

        Args:
          function: the function; `out_shardings` must place the outputs that other functions get as arguments.
          options: of `jax.jit`.
        """

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.traced += 1  # runs only when the program is traced
            return function(*args, **kwargs)

        counted.__name__ = getattr(function, "func", function).__name__  # XLA's name of the program
        jitted = jax.jit(counted, **options)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._called is not None:
                self._called.append((started := self._compile(jitted, args, kwargs)).compiled)
                return started.outputs
            if self._started:
                self._await(_key(jitted, args, kwargs))
            return jitted(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Compile in threads what is called in this `with` block; wait at its end for all compilations.

        Calls return `jax.ShapeDtypeStruct`s in place of arrays, which later calls in the block take as arguments. They
        neither run anything nor take donated arrays. Repeated calls with the same shapes and dtypes compile once. To be
        entered by one thread at a time. What failed is compiled once more at the end, by itself: several compilations
        at once may have needed more memory or processes than there were.

        Raises:
          Exception: the error of a compilation that failed by itself too.
        """
        try:
            with self.starting():
                yield
        except BaseException:
            self.stop()
            raise
        self.finish()

    @contextlib.contextmanager
    def starting(self) -> Iterator[list[Future[jax.stages.Compiled]]]:
        """Compile in threads what is called in this `with` block, as `compiling` does, without waiting at its end.

        Calls after the block, which the same thread makes, run programs; they wait for one that is being compiled. At
        last `finish` or `stop` is to be called.

        Yields:
          A list of the compilations of what has been called, which is complete at the end of the block.
        """
        self._pool = self._pool or ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxstack compiler")
        called = self._called = []
        try:
            yield called
        finally:
            self._called = None

    @property
    def has_room(self) -> bool:
        """True if one of the threads has nothing to compile."""
        return sum(not started.compiled.done() for started in self._started.values()) < _THREADS

    def finish(self) -> None:
        """Wait for all compilations, and repeat those that failed, as at the end of `compiling`."""
        try:
            wait([started.compiled for started in self._started.values()])
            for started in self._started.values():
                if started.compiled.exception() is not None:
                    started.lowered.compile()
        finally:
            self.stop()

    def stop(self) -> None:
        """Cancel compilations that have not begun, and wait for the others."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pool = None
        self._started.clear()

    def _compile(self, jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Compilation:
        """Trace a call in this thread, and start its compilation in another one."""
        key = _key(jitted, args, kwargs)
        if key not in self._started:
            assert self._pool is not None
            # Models are traced in one thread only, as tracing them in several at once is not known to be safe.
            lowered = jitted.lower(*args, **kwargs)
            outputs = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), lowered.out_info
            )
            self._started[key] = _Compilation(lowered, self._pool.submit(lowered.compile), outputs)
        return self._started[key]

    def _await(self, key: Hashable) -> None:
        """Wait for a compilation if there is one of this key, so that a call does not compile the same once more."""
        if key in self._started:
            wait([self._started[key].compiled])


def _key(jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return what calls that run the same program have in common."""
    leaves, structure = jax.tree.flatten((args, kwargs))
    return (jitted, structure, *((x.shape, x.dtype) if hasattr(x, "shape") else x for x in leaves))
