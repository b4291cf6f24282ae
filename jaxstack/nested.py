"""Nested dicts of arrays and their flat form {path: leaf}, where a path is a tuple of keys."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Path = tuple[str, ...]


def nest(items: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    """Build nested dicts from pairs (path, leaf); the inverse of `flatten`.

    Args:
      items: each path is a tuple of keys, or a text of keys joined by `/`.
    """
    tree: dict[str, Any] = {}
    for path, value in items:
        keys = path.split("/") if isinstance(path, str) else [str(key) for key in path]
        branch = tree
        for key in keys[:-1]:
            branch = branch.setdefault(key, {})
        branch[keys[-1]] = value
    return tree


def flatten(
    tree: Mapping[str, Any], path: Path = (), stop: Callable[[Path], bool] = lambda path: False
) -> dict[Path, Any]:
    """Flatten nested dicts to {path: leaf}; a dict for whose path `stop` returns True counts as a leaf."""
    flat: dict[Path, Any] = {}
    for key, value in tree.items():
        below = isinstance(value, dict) and not stop((*path, key))
        flat.update(flatten(value, (*path, key), stop) if below else {(*path, key): value})
    return flat


def get(tree: Mapping[str, Any], path: str) -> Any:
    """Return the leaf or branch of nested dicts at a path of keys joined by `/`."""
    branch: Any = tree
    for key in path.split("/"):
        branch = branch[key]
    return branch
