"""The layout of a number of devices that comes nearest to one that cannot be."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

_FIRST = ("data", "fsdp", "tensor", "context", "expert", "pipeline")
"""Axes in the order in which a change is preferred where several would be equally large."""
_TRIES = 1000


def nearest_degrees(
    wanted: Mapping[str, int], devices: int, fits: Callable[[dict[str, int]], bool] = lambda _: True
) -> str | None:
    """The degrees above 1, as text, that multiply to `devices`, fit, and differ least from the wanted ones.

    Args:
      wanted: axis -> degree, or -1 for any.
      fits: whether degrees, axis -> degree, are possible.

    Returns:
      None where none of the nearest thousand fits.
    """
    axes = [axis for axis in _FIRST if axis in wanted]
    found = [dict(zip(axes, degrees, strict=True)) for degrees in _factorisations(devices, len(axes))]
    found.sort(key=lambda degrees: _distance(wanted, degrees, axes))
    chosen = next(filter(fits, itertools.islice(found, _TRIES)), None)
    if chosen is None:
        return None
    return ", ".join(f"{axis}={chosen[axis]}" for axis in wanted if chosen[axis] > 1) or "all degrees 1"


def _distance(wanted: Mapping[str, int], degrees: Mapping[str, int], axes: Sequence[str]) -> tuple[float, ...]:
    """How far the degrees of the axes are from the wanted ones, an axis more or less counting one on top, then which
    they are. More or fewer devices usually means more or fewer replicas: `data` and `fsdp` count for less."""
    total, changed = 0.0, []
    for index, axis in enumerate(axes):
        if wanted[axis] in (-1, degrees[axis]):
            continue
        weight = 0.25 if axis in ("data", "fsdp") else 1.0
        came_or_went = (wanted[axis] > 1) != (degrees[axis] > 1)
        total += weight * (came_or_went + abs(math.log(degrees[axis] / wanted[axis])))
        changed.append(index)
    return round(total, 6), len(changed), *changed


def _factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (number,)
        return
    for first in _divisors(number):
        yield from ((first, *rest) for rest in _factorisations(number // first, parts - 1))


@functools.cache
def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
