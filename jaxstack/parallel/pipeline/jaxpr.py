"""Splits the operations of a traced function (jaxpr), so that its parts can be run as separate functions."""

from typing import Any

import jax
from jax.extend import core

SAME_SIZE_VIEWS = ("reshape", "transpose")
VIEWS = (*SAME_SIZE_VIEWS, "convert_element_type")
"""Operations that cost so little that they are repeated wherever a value is read."""


def needed(eqns: list[Any], outputs: list[Any], stop: str | None = None) -> list[bool]:
    """Return a flag for each operation of a jaxpr: True if `outputs` depend on it.

    Dependencies are not followed through operations of the primitive `stop`: their inputs do not count.
    """
    wanted = {v for v in outputs if not isinstance(v, core.Literal)}
    flags = []
    for eqn in reversed(eqns):
        flags.append(any(v in wanted for v in eqn.outvars))
        if flags[-1] and eqn.primitive.name != stop:
            wanted |= {v for v in eqn.invars if not isinstance(v, core.Literal)}
    return flags[::-1]


def function_of(eqns: list[Any], inputs: list[Any], outputs: list[Any], values: dict[Any, Any]) -> Any:
    """Return a function that evaluates the jaxpr operations `eqns` one by one, from `inputs` to `outputs`."""

    def run(*arguments: Any) -> list[Any]:
        known = {**values, **dict(zip(inputs, arguments, strict=True))}

        def read(v: Any) -> Any:
            return v.val if isinstance(v, core.Literal) else known[v]

        for eqn in eqns:
            known.update(zip(eqn.outvars, _apply(eqn, map(read, eqn.invars)), strict=True))
        return [read(v) for v in outputs]

    return run


def _apply(eqn: Any, inputs: Any) -> Any:
    with eqn.ctx.manager:
        found = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return found if eqn.primitive.multiple_results else [found]


_WRAPPERS = ("checkpoint", "remat", "remat2", "pjit", "jit", "closed_call", "core_call")


def inlined(closed: Any) -> Any:
    """Inline the nested calls of a closed jaxpr, so that each operation can be scheduled separately.

    Equal views of a value are merged.
    """
    views: dict[Any, Any] = {}

    def apply(eqn: Any, inputs: list[Any]) -> list[Any]:
        if eqn.primitive.name not in VIEWS:
            return _apply(eqn, inputs)
        # With the result stands the value, so that no other one gets its id.
        key = eqn.primitive.name, id(inputs[0]), str(eqn.outvars[0].aval), str(eqn.params)
        if len(inputs) > 1 or key not in views:
            views[key] = inputs, _apply(eqn, inputs)
        return views[key][1]

    def run(closed: Any, arguments: Any) -> list[Any]:
        known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        known.update(zip(closed.jaxpr.invars, arguments, strict=True))

        def read(v: Any) -> Any:
            return v.val if isinstance(v, core.Literal) else known[v]

        for eqn in closed.jaxpr.eqns:
            inputs = [read(v) for v in eqn.invars]
            inner = eqn.params.get("jaxpr") if eqn.primitive.name in _WRAPPERS else None
            if inner is None:
                found = apply(eqn, inputs)
            else:
                found = run(inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, []), inputs)
            known.update(zip(eqn.outvars, found, strict=True))
        return [read(v) for v in closed.jaxpr.outvars]

    return jax.make_jaxpr(lambda *arguments: run(closed, arguments))(*closed.in_avals)
