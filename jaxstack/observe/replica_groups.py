"""Finds the devices that a collective of a compiled XLA module connects.

Device ids are positions in the program's device assignment, which for a jitted program is the mesh in row-major order.
"""

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]
_SPELLINGS = re.compile(r"replica_groups=(mesh\[.*?\].*?\{.*?\}|\[.*?\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{\{.*?\}\})")


def replica_groups(attributes: str, num_devices: int) -> Groups:
    """Return the groups of device ids that a collective connects, parsed from its attributes; default: all in one.

    There are four spellings: `{{0,1},{2,3}}`, `[2,2]<=[4]T(1,0)` (an iota, reshaped and transposed), `mesh['a'=2,'b'=2]
    {'a'}` (mesh axes, or pieces of them as `'a':(offset)size`) and `{}`. For the `source_target_pairs` of a permute, a
    group is a set of devices that the pairs connect.
    """
    if "source_target_pairs=" in attributes:
        return _connected(permute_pairs(attributes))
    found = _SPELLINGS.search(attributes)
    if not found:
        return (tuple(range(num_devices)),)
    text = found[1]
    if text.startswith("mesh"):
        return _mesh_groups(text)
    if text.startswith("["):
        return _rows(_iota(text))
    return tuple(tuple(int(i) for i in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", text))


def permute_pairs(attributes: str) -> list[tuple[int, int]]:
    """Return the (source, target) device ids of a collective-permute or send, without pairs of equal ids."""
    found = re.search(r'source_target_pairs="?\{(.*?)\}\}', attributes)
    pairs = re.findall(r"(\d+),(\d+)", found[1]) if found else []
    return [(int(a), int(b)) for a, b in pairs if a != b]


def mesh_axes_of(groups: Sequence[Sequence[int]], mesh_axes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of a collective's groups differ; `mesh_axes` is name -> size."""
    sizes = tuple(mesh_axes.values())
    if any(max(group, default=0) >= math.prod(sizes) for group in groups):
        raise ValueError(f"device ids of {groups} do not fit a mesh of {dict(mesh_axes)}")
    varying: set[str] = set()
    for group in groups:
        coordinates = np.array(np.unravel_index(np.array(group, int), sizes))
        spread = coordinates.max(axis=1) != coordinates.min(axis=1)
        varying |= {name for name, varies in zip(mesh_axes, spread, strict=True) if varies}
    return tuple(name for name in mesh_axes if name in varying)


def _rows(array: np.ndarray) -> Groups:
    return tuple(tuple(int(i) for i in row) for row in array)


def _iota(text: str) -> np.ndarray:
    """Expand XLA's short form of device ids: `[2,4]<=[4,2]T(1,0)` counts to 8, reshapes, transposes, reshapes."""
    found = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert found, text
    shape, source, order = ([int(i) for i in part.split(",")] if part else None for part in found.groups())
    assert shape and source
    return np.arange(math.prod(source)).reshape(source).transpose(order or range(len(source))).reshape(shape)


def _mesh_groups(text: str) -> Groups:
    """Parse device groups given as mesh axes in braces: each group spans these axes, at one index of the other axes."""
    mesh_text = text[: text.rindex("{")]
    axes_text = text[text.rindex("{") :]
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh_text)}
    ids = _mesh_ids(mesh_text, math.prod(sizes.values()))
    pieces: list[tuple[str, int, int]] = []  # for every axis, in order: name, start, size
    chosen: dict[tuple[str, int], int] = {}  # (name, start) -> position in the group's order
    cuts: dict[str, set[int]] = {name: {1, size} for name, size in sizes.items()}
    for place, (name, start, size) in enumerate(re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes_text)):
        first = int(start or 1)
        length = int(size or sizes[name])
        cuts[name] |= {first, first * length}
        chosen[name, first] = place
    for name, edges in cuts.items():
        ordered = sorted(edges)
        pieces += [(name, a, b // a) for a, b in zip(ordered, ordered[1:], strict=False)]
    grid = ids.reshape([size for _, _, size in pieces])
    inside = sorted((i for i, p in enumerate(pieces) if p[:2] in chosen), key=lambda i: chosen[pieces[i][:2]])
    outside = [i for i in range(len(pieces)) if i not in inside]
    members = math.prod(pieces[i][2] for i in inside)
    return _rows(grid.transpose(outside + inside).reshape(-1, members))


def _mesh_ids(text: str, count: int) -> np.ndarray:
    """Return the device ids of a mesh in row-major order: 0, 1, ... unless `text` lists them in `device_ids=(...)`."""
    found = re.search(r"device_ids=\((.*)\)", text)
    if not found:
        return np.arange(count)
    # `[2,4]T(1,0)`: count up to 8, reshape to [2,4], transpose
    if compact := re.fullmatch(r"\[([\d,]+)\](T\([\d,]+\))?", found[1]):
        return _iota(f"[{count}]<=[{compact[1]}]{compact[2] or ''}").reshape(-1)
    if "<=" in found[1]:
        return _iota(found[1] if found[1].startswith("[") else f"[{count}]{found[1]}").reshape(-1)
    return np.array([int(i) for i in re.findall(r"\d+", found[1])])


def _connected(pairs: Sequence[tuple[int, int]]) -> Groups:
    groups: list[set[int]] = []
    for pair in pairs:
        touched = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in touched] + [set(pair).union(*touched)]
    return tuple(sorted(tuple(sorted(group)) for group in groups))
