"""An ordered table of backends for one operation: the first that accepts is called, and what refused is kept.

A row of the table is a `Backend`. `unsupported_reason` tells why it cannot compute a call; `lower_priority_reason`
tells why another row computes the call faster. Only the automatic choice asks for the latter: an `implementation` that
the caller named is called or raises `NotSupported`, and never falls back.

`record_choices` shows what was chosen, per call site:

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
from typing import Any

import jax

from pallas_kernels.target import automatic_axes

_PACKAGE_DIRECTORY = str(Path(__file__).parent)
_JAX_DIRECTORY = str(Path(str(jax.__file__)).parent)
_recorders: contextvars.ContextVar[tuple[list["Choice"], ...]] = contextvars.ContextVar("recorders", default=())


class NotSupported(ValueError):
    """The backend that was asked for by name cannot compute this call, or no backend can."""


@dataclass(frozen=True)
class Backend:
    """One row of an operation's table. All callables take the operation's request object.

    Attributes:
        name: what `implementation=` calls it.
        why: why the row stands at its place.
        refuses: the rule that the request breaks, with the values and the way out; None where it is
            supported.
        call: computes the request.
        yields: why another row is the better choice; None where this one is.
        opaque: whether it is a custom call that XLA cannot partition: it is refused where XLA would have to.
        gradients: of attention, where these keys may be a part of those that the softmax is over: dQ, dK and dV from
            the request, d_out [B, T, N, H], and of all keys the log-sum-exp and `scores.row_delta`, [B, N, T] float32.
    """

    name: str
    why: str
    unsupported_reason: Callable[[Any], str | None]
    call: Callable[..., Any]
    lower_priority_reason: Callable[[Any], str | None] = lambda request: None
    opaque: bool = False
    gradients: Callable[..., Any] | None = None

    def reason_against(self, request: Any) -> str | None:
        """Why this row cannot compute the request here: its own rules, or the partitioning around the call."""
        return self.unsupported_reason(request) or (_partitioned() if self.opaque else None)


@dataclass(frozen=True)
class Choice:
    """Which backend a call site got, and why the rows before it were passed over.

    Attributes:
        operation: e.g. "flash_attention".
        site: file:line of the caller, the nearest frame outside of this package and of jax.
        call: the call's shapes and options in words.
        backend: the name of the backend that was called.
        refused: (name, reason) of each backend passed over, in the order of the table.
        explicit: whether the caller named the backend.
    """

    operation: str
    site: str
    call: str
    backend: str
    refused: tuple[tuple[str, str], ...] = ()
    explicit: bool = False

    def __str__(self) -> str:
        passed_over = "; ".join(f"not {name}: {reason}" for name, reason in self.refused)
        return f"{self.operation} at {self.site}: {self.backend} for {self.call}" + (
            f" ({passed_over})" if passed_over else ""
        )


@contextlib.contextmanager
def record_choices() -> Iterator[list[Choice]]:
    """Yields a list that receives a `Choice` for every distinct choice made while tracing in the context.

    A call of an already traced `jax.jit` function is not traced again and adds nothing: record around the
    first call or around `.lower(...)`. Contexts nest; each list receives every choice.
    """
    choices: list[Choice] = []
    token = _recorders.set((*_recorders.get(), choices))
    try:
        yield choices
    finally:
        _recorders.reset(token)


def select(
    operation: str, backends: Sequence[Backend], implementation: str | None, request: Any, *, record: bool = True
) -> Backend:
    """The backend for `request`: the one named by `implementation`, or the first of the table that accepts.

    Without `record` the choice is not noted for `record_choices`: it is one that was made before.

    Raises:
        NotSupported: the named backend is unknown or refuses, or every backend refuses.
    """
    if implementation is not None:
        chosen, refused = _named(operation, backends, implementation, request), ()
    else:
        chosen, refused = _first_that_accepts(operation, backends, request)
    recorders = _recorders.get()
    if recorders and record:
        choice = Choice(operation, _call_site(), str(request), chosen.name, refused, implementation is not None)
        for recorder in recorders:
            if choice not in recorder:
                recorder.append(choice)
    return chosen


def _named(operation: str, backends: Sequence[Backend], name: str, request: Any) -> Backend:
    by_name = {backend.name: backend for backend in backends}
    if name not in by_name:
        alike = difflib.get_close_matches(str(name), by_name, n=3, cutoff=0.5)
        known = ", ".join(repr(known) for known in by_name)
        hint = f"did you mean {' or '.join(map(repr, alike))}? " if alike else ""
        raise NotSupported(
            f"{operation} has no implementation {name!r}; {hint}known: {known}, or None to choose by itself"
        )
    reason = by_name[name].reason_against(request)
    if reason is not None:
        raise NotSupported(
            f"{operation}(implementation={name!r}) cannot compute {request}: {reason}; "
            f"implementation=None chooses a backend that can"
        )
    return by_name[name]


def _first_that_accepts(
    operation: str, backends: Sequence[Backend], request: Any
) -> tuple[Backend, tuple[tuple[str, str], ...]]:
    refused: list[tuple[str, str]] = []
    for backend in backends:
        reason = backend.reason_against(request) or backend.lower_priority_reason(request)
        if reason is None:
            return backend, tuple(refused)
        refused.append((backend.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
    raise NotSupported(f"no implementation of {operation} computes {request}: {reasons}")


def _partitioned() -> str | None:
    axes = automatic_axes()
    if not axes:
        return None
    shown = ", ".join(f"{name}={size}" for name, size in axes.items())
    return (
        f"is one custom call, which XLA cannot partition over the mesh in context ({shown}): call it inside "
        f"jax.shard_map over these axes, so that it gets each device's own part"
    )


def _call_site() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_PACKAGE_DIRECTORY, _JAX_DIRECTORY)) and "contextlib" not in file:
            return f"{_short(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown"


def _short(file: str) -> str:
    """The path from the outermost package folder on, which is what a reader knows the file by."""
    path = Path(file)
    top = path.parent
    while (top / "__init__.py").exists():
        top = top.parent
    return str(path.relative_to(top))
