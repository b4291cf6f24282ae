"""Finds the usable degrees of parallelism nearest to unusable ones, to suggest them in an error message."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

_PREFERENCE = ("data", "fsdp", "tensor", "context", "expert", "pipeline")
"""Axes in the order in which they are changed, among changes of the same size."""
_MAX_TRIES = 1000


def nearest_degrees(
    wanted: Mapping[str, int], devices: int, fits: Callable[[dict[str, int]], bool] = lambda _: True
) -> str | None:
    """Return as text the parallel degrees nearest to `wanted` whose product is `devices` and that satisfy `fits`.

    Args:
      wanted: axis -> degree; -1 accepts any degree.
      devices: number of devices that the degrees must multiply to.
      fits: returns True if degrees, axis -> degree, can be used.

    Returns:
      The degrees above 1 as text, such as `data=2, tensor=4`; None if none of the nearest thousand fits.
    """
    axes = [axis for axis in _PREFERENCE if axis in wanted]
    candidates = [dict(zip(axes, degrees, strict=True)) for degrees in factorizations(devices, len(axes))]
    candidates.sort(key=lambda degrees: _distance(wanted, degrees, axes))
    chosen = next(filter(fits, itertools.islice(candidates, _MAX_TRIES)), None)
    if chosen is None:
        return None
    return ", ".join(f"{axis}={chosen[axis]}" for axis in wanted if chosen[axis] > 1) or "all degrees 1"


def _distance(wanted: Mapping[str, int], degrees: Mapping[str, int], axes: Sequence[str]) -> tuple[float, ...]:
    """Return a sort key for degrees: the distance from `wanted`, then the number of changed axes, then their indices.

    The distance sums, over changed axes, the logarithm of the ratio, plus one for an axis that is added or removed.
    `data` and `fsdp` count a quarter, because other numbers of devices usually mean other numbers of replicas.
    """
    total = 0.0
    changed = []
    for index, axis in enumerate(axes):
        if wanted[axis] in (-1, degrees[axis]):
            continue
        weight = 0.25 if axis in ("data", "fsdp") else 1.0
        added_or_removed = (wanted[axis] > 1) != (degrees[axis] > 1)
        total += weight * (added_or_removed + abs(math.log(degrees[axis] / wanted[axis])))
        changed.append(index)
    return round(total, 6), len(changed), *changed


def factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield every tuple of `parts` positive integers whose product is `number`."""
    if parts == 1:
        yield (number,)
        return
    for first in _divisors(number):
        yield from ((first, *others) for others in factorizations(number // first, parts - 1))


@functools.cache
def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
