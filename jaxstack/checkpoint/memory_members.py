"""Messages between the processes of a run about their copies in memory: which a node has, and its room for them."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxstack.checkpoint.memory_folder import Part, read_part
from jaxstack.checkpoint.neighbour import find_holders
from jaxstack.errors import ConfigError
from jaxstack.observe.number_format import byte_size

_GENERATIONS = 2
"""Copies of a state that are in memory at the same time: the complete one and the one that is being written."""


@dataclasses.dataclass(frozen=True)
class Member:
    """A process as the others know it after the start: its node and server, the size of its shards, its copies."""

    node: str
    num_bytes: int
    free_bytes: int
    """Room in its node's host memory for copies, those that are there now included."""
    copies: Mapping[str, Sequence[int]]
    """Place of copies in its node's folder, such as `own/0of2` -> their steps; those of earlier starts too."""
    address: Sequence[Any] = ()
    """(host, port) of its server; empty without one."""
    token: str = ""


def needed_bytes(members: Sequence[Member]) -> dict[str, int]:
    """Return for each node the most bytes that copies take in its host memory: own and second ones, two of each."""
    needed = collections.Counter[str]()
    for member in members:
        needed[member.node] += _GENERATIONS * member.num_bytes
    if len(members) > 1:
        for rank, holder in enumerate(find_holders([member.node for member in members])):
            needed[members[holder].node] += _GENERATIONS * members[rank].num_bytes
    return dict(needed)


def check_room(members: Sequence[Member]) -> None:
    """Check that every node has room for the copies that its processes make and hold.

    Raises:
      ConfigError: a node has not; the message has the numbers.
    """
    for node, needed in needed_bytes(members).items():
        free = min(member.free_bytes for member in members if member.node == node)
        if needed > free:
            host, _, folder = node.partition(":")
            raise ConfigError(
                f"copies in memory (checkpoint.memory_every_steps) take up to {byte_size(needed)} in {folder} on "
                f"{host}, {_GENERATIONS} of each state that the node has or holds; it has {byte_size(free)}. Make that "
                "file system larger (mount -o remount,size=..., docker run --shm-size), shard the state over more "
                "nodes, or set checkpoint.memory_every_steps to 0."
            )


class Location(NamedTuple):
    """Place of copies of one part: the process that can read them from its node's folder, and their name there."""

    member: int
    place: str


def locate(members: Sequence[Member], step: int, count: int) -> dict[Part, list[Location]]:
    """Return where the copies of `step` are that a start with `count` processes made, own copies first."""
    found: dict[Part, dict[tuple[str, str], Location]] = {}
    for number, member in enumerate(members):
        for place, steps in member.copies.items():
            part = _part_of(place)
            if step in steps and part.count == count:
                found.setdefault(part, {}).setdefault((place, member.node), Location(number, place))
    return {
        part: sorted(places.values(), key=lambda location: not location.place.startswith("own/"))
        for part, places in sorted(found.items())
    }


def known_copies(members: Sequence[Member], count: int) -> list[tuple[int, int]]:
    """Return (step, number of processes that made them) of all copies in memory: the newest first.

    Of the same step those of `count` processes come first.
    """
    found = {
        (step, _part_of(place).count) for member in members for place, steps in member.copies.items() for step in steps
    }
    return sorted(found, key=lambda made: (-made[0], made[1] != count, made[1]))


def _part_of(place: str) -> Part:
    part = read_part(place.partition("/")[2])
    assert part is not None, place
    return part
