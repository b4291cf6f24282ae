"""Compiles several jitted functions at the same time, in threads: XLA runs without Python's global lock.

compiler = ThreadedCompiler()
double = compiler.jit(lambda x: x * 2)
with compiler.compiling():
    double(np.zeros(8))  # compiles for this shape in a thread, and runs nothing
double(np.ones(8))  # runs what was compiled
"""

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

_THREADS = min(4, os.cpu_count() or 1)
"""Number of programs that are compiled at the same time. For each XLA starts several threads and processes."""


class _Compilation(NamedTuple):
    """The result of one call while programs are compiled: a running compilation, and what the call returned."""

    lowered: jax.stages.Lowered
    compiled: Future[jax.stages.Compiled]
    outputs: PyTree


class ThreadedCompiler:
    """Makes jitted functions, which are compiled in threads instead of run in a `with` block of `compiling`."""

    def __init__(self):
        self._pool: ThreadPoolExecutor | None = None
        self._started = dict[Hashable, _Compilation]()

    def jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Return `jax.jit(function, **options)`, as a function that `compiling` knows. Static arguments are hashable.

        Args:
          function: the function; `out_shardings` must place the outputs that other functions get as arguments.
          options: of `jax.jit`.
        """
        jitted = jax.jit(function, **options)

        def call(*args: Any, **kwargs: Any) -> Any:
            return jitted(*args, **kwargs) if self._pool is None else self._compile(self._pool, jitted, args, kwargs)

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
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxstack compiler")
        try:
            yield
            wait([started.compiled for started in self._started.values()])
            for started in self._started.values():
                if started.compiled.exception() is not None:
                    started.lowered.compile()
        finally:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
            self._started.clear()

    def _compile(self, pool: ThreadPoolExecutor, jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PyTree:
        """Trace a call in this thread, start its compilation in another, and return the shapes of its outputs."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        key = (jitted, structure, *((x.shape, x.dtype) if hasattr(x, "shape") else x for x in leaves))
        if key not in self._started:
            # Models are traced in one thread only, as tracing them in several at once is not known to be safe.
            lowered = jitted.lower(*args, **kwargs)
            outputs = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), lowered.out_info
            )
            self._started[key] = _Compilation(lowered, pool.submit(lowered.compile), outputs)
        return self._started[key].outputs
