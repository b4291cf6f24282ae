"""Chooses the backend (implementation) that computes a call, from an ordered table for each operation.

A row is a `Backend`. The first row that supports the call, and does not say that a later one is faster, is used.
`unsupported_reason` returns why a row cannot compute a call, `lower_priority_reason` why another row computes it
faster. Only the automatic choice asks for the latter. An `implementation` that the caller named is called or raises
`NotSupported`; it never falls back.

`record_choices` reports what was chosen at each call site:

    with record_choices() as choices:
        lowered = jax.jit(step).lower(state, batch)
    for choice in choices:
        print(choice)
"""

import contextlib
import contextvars
import difflib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax

from pallas_kernels.target import automatic_axes

_PACKAGE_DIRECTORY = str(Path(__file__).parent)
_JAX_DIRECTORY = str(Path(str(jax.__file__)).parent)
_recorders: contextvars.ContextVar[tuple[list["Choice"], ...]] = contextvars.ContextVar("recorders", default=())


RequestT = TypeVar("RequestT")


class NotSupported(ValueError):
    """Raised if the backend named by the caller, or every backend of the operation, cannot compute the call."""


@dataclass(frozen=True)
class Backend(Generic[RequestT]):
    """An implementation of an operation: a row of the operation's table of backends.

    Every callable takes the operation's request, the object that holds the checked arguments of one call.

    Attributes:
        name: the value of `implementation` that selects this backend.
        why: why the row stands at its place in the table.
        unsupported_reason: returns the rule that the request breaks, with the values and the way out, or None if the
            backend can compute the request.
        call: computes the request.
        lower_priority_reason: returns why the automatic choice should prefer a later row, or None.
        opaque: True if the backend is a custom call, which XLA cannot partition. It is unavailable under a mesh with
            axes that XLA partitions over.
        gradients: attention only: the gradients dQ, dK and dV if the request's keys are one of several parts that share
            a softmax. Takes the request, d_out [B, T, N, H], and two float32 arrays [B, N, T] over all parts: the
            log-sum-exp and `scores.row_delta`. None if the backend cannot compute them.
    """

    name: str
    why: str
    unsupported_reason: Callable[[RequestT], str | None]
    call: Callable[[RequestT], Any]
    lower_priority_reason: Callable[[RequestT], str | None] = lambda request: None
    opaque: bool = False
    gradients: Callable[..., Any] | None = None

    def unavailable_reason(self, request: RequestT) -> str | None:
        """Return why this backend cannot compute the call on the target device and mesh, or None if it can.

        The backend's own rules are asked first, then whether XLA would have to partition the call.
        """
        return self.unsupported_reason(request) or (_unsupported_partitioning() if self.opaque else None)


@dataclass(frozen=True)
class Choice:
    """Record of the backend chosen at a call site, and why those before it in the table were passed over.

    Attributes:
        operation: name of the operation, e.g. "flash_attention".
        site: file:line of the caller, the nearest frame outside this package and jax.
        call: the call's shapes and options in words.
        backend: name of the chosen backend.
        refused: (name, reason) of each backend passed over, in the order of the table.
        explicit: True if the caller named the backend.
        fallback: True if a backend that goes before the chosen one cannot compute the call. A backend that could, but
            is slower here (`lower_priority_reason`), makes no fallback.
    """

    operation: str
    site: str
    call: str
    backend: str
    refused: tuple[tuple[str, str], ...] = ()
    explicit: bool = False
    fallback: bool = False

    def __str__(self) -> str:
        passed_over = "; ".join(f"not {name}: {reason}" for name, reason in self.refused)
        return f"{self.operation} at {self.site}: {self.backend} for {self.call}" + (
            f" ({passed_over})" if passed_over else ""
        )


@contextlib.contextmanager
def record_choices() -> Iterator[list[Choice]]:
    """Record the backends chosen while tracing in this context: yield a list that receives each distinct `Choice`.

    A `jax.jit` function that is already traced is not traced again and adds nothing: record around the first call or
    around `.lower(...)`. Contexts nest; each list receives every choice.
    """
    choices: list[Choice] = []
    token = _recorders.set((*_recorders.get(), choices))
    try:
        yield choices
    finally:
        _recorders.reset(token)


def select(
    operation: str,
    backends: Sequence[Backend[RequestT]],
    implementation: str | None,
    request: RequestT,
    *,
    record: bool = True,
) -> Backend[RequestT]:
    """Choose the backend for a call: the one named by `implementation`, or the first of the table that supports it.

    Args:
        operation: name of the operation, for messages and records.
        backends: the operation's table, in order of preference.
        implementation: name of a backend, or None for the automatic choice.
        request: the checked arguments of the call.
        record: False if the choice repeats an earlier one and `record_choices` should not report it again.

    Raises:
        NotSupported: the named backend is unknown or does not support the request, or no backend does.
    """
    if implementation is not None:
        chosen = _find_named(operation, backends, implementation, request)
        refused = ()
    else:
        chosen, refused = _find_first_supporting(operation, backends, request)
    recorders = _recorders.get()
    if recorders and record:
        explicit = implementation is not None
        fallback = _is_fallback(backends, refused, request)
        choice = Choice(operation, _call_site(), str(request), chosen.name, refused, explicit, fallback)
        for recorder in recorders:
            if choice not in recorder:
                recorder.append(choice)
    return chosen


def _find_named(
    operation: str, backends: Sequence[Backend[RequestT]], name: str, request: RequestT
) -> Backend[RequestT]:
    by_name = {backend.name: backend for backend in backends}
    if name not in by_name:
        alike = difflib.get_close_matches(str(name), by_name, n=3, cutoff=0.5)
        known = ", ".join(repr(known) for known in by_name)
        hint = f"did you mean {' or '.join(map(repr, alike))}? " if alike else ""
        raise NotSupported(
            f"{operation} has no implementation {name!r}; {hint}known: {known}, or None for the automatic choice"
        )
    reason = by_name[name].unavailable_reason(request)
    if reason is not None:
        raise NotSupported(
            f"{operation}(implementation={name!r}) cannot compute {request}: {reason}; "
            f"implementation=None chooses a backend that can"
        )
    return by_name[name]


def _find_first_supporting(
    operation: str, backends: Sequence[Backend[RequestT]], request: RequestT
) -> tuple[Backend[RequestT], tuple[tuple[str, str], ...]]:
    refused: list[tuple[str, str]] = []
    for backend in backends:
        reason = backend.unavailable_reason(request) or backend.lower_priority_reason(request)
        if reason is None:
            return backend, tuple(refused)
        refused.append((backend.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
    raise NotSupported(f"no implementation of {operation} computes {request}: {reasons}")


def _is_fallback(backends: Sequence[Backend[RequestT]], refused: Sequence[tuple[str, str]], request: RequestT) -> bool:
    """Return True if a refused backend would be preferred to the chosen one but cannot compute the call."""
    names = {name for name, _ in refused}
    return any(backend.lower_priority_reason(request) is None for backend in backends if backend.name in names)


def _unsupported_partitioning() -> str | None:
    axes = automatic_axes()
    if not axes:
        return None
    shown = ", ".join(f"{name}={size}" for name, size in axes.items())
    return (
        f"is one custom call, which XLA cannot partition over the mesh in context ({shown}): call it inside "
        f"jax.shard_map over these axes, so that it gets each device's own shard"
    )


def _call_site() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_PACKAGE_DIRECTORY, _JAX_DIRECTORY)) and "contextlib" not in file:
            return f"{_relative_to_package(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


def _relative_to_package(file: str) -> str:
    """Shorten a source file's path, for messages, to the part from its outermost package directory on."""
    path = Path(file)
    top = path.parent
    while (top / "__init__.py").exists():
        top = top.parent
    return str(path.relative_to(top))
