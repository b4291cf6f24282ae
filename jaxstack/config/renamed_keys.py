"""Configuration keys that were renamed: errors name the new key, and stored runs are read under either name."""

import copy
from collections.abc import Mapping
from typing import Any

RENAMED = {
    "islands": "local_sgd",
    "islands.island": "local_sgd.worker",
    "local_sgd.island": "local_sgd.worker",
    "parallel.islands": "parallel.workers",
}
"""Former key -> key, of sections and of keys in them."""


def new_name(key: str) -> str | None:
    """Return the present name of a key such as `parallel.islands`; None if it was not renamed."""
    return RENAMED.get(key)


def with_new_names(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a stored configuration with renamed keys under their present names.

    Args:
      tree: plain data by section.
    """
    tree = copy.deepcopy(dict(tree))
    for old in sorted(RENAMED, key=_depth, reverse=True):  # keys before the sections that hold them
        section, _, key = old.rpartition(".")
        place = tree.get(section) if section else tree
        if isinstance(place, dict) and key in place:
            place[RENAMED[old].rpartition(".")[2]] = place.pop(key)
    return tree


def _depth(key: str) -> int:
    return key.count(".")
