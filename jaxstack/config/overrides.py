"""Applies `section.key=value` overrides to configuration data."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxstack.config.loader import Tree, parse_yaml
from jaxstack.errors import ConfigError


def merge_overrides(tree: Mapping[str, Any], overrides: Sequence[str]) -> Tree:
    """Apply `section.key=value` overrides to configuration data: return a changed copy, values parsed as YAML.

    A number in a key selects an item of a list, counted from 0, as in `layers.0.bits=4`.

    Raises:
      ConfigError: an override is not of the form `section.key=value`, or selects an item that the list does not have.
    """
    merged = json.loads(json.dumps(tree, default=str))
    for override in overrides:
        name, equals, value = override.partition("=")
        keys = name.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(f"override {override!r} must have the form section.key=value, e.g. train.steps=100.")
        parsed = parse_yaml(value, f"the value of {name}")
        parent: Any = merged
        for depth in range(len(keys) - 1):
            key, inner = _find_child(parent, keys, depth, override)
            if not isinstance(inner, dict | list):
                parent[key] = inner = {}
            parent = inner
        key, old = _find_child(parent, keys, len(keys) - 1, override)
        parent[key] = {**old, **parsed} if isinstance(parsed, dict) and isinstance(old, dict) else parsed
    return merged


def _find_child(parent: Any, keys: Sequence[str], depth: int, override: str) -> tuple[str | int, Any]:
    """Return the key or list index in `parent` that `keys[depth]` names, and the value there or None."""
    key = keys[depth]
    where = ".".join(keys[:depth])
    if not isinstance(parent, list):
        if key.isdecimal() and where:
            raise ConfigError(
                f"override {override!r}: there is no list {where} whose item {key} it could change; give all items of "
                f"the list, as {where}=[...]."
            )
        return key, parent.get(key)
    if not key.isdecimal() or int(key) >= len(parent):
        last = len(parent) - 1
        known = f"with the items {where}.0 to {where}.{last}" if last else f"whose only item is {where}.0"
        known = known if parent else f"without items, which can be given as {where}=[...]"
        raise ConfigError(f"override {override!r}: {where} is a list {known}.")
    return int(key), parent[int(key)]
