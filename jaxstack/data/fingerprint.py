"""Compares the data of a run with the data that a resumed run finds."""

from collections.abc import Mapping
from typing import Any


def fingerprint_difference(saved: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """Return one line that names the first difference (`seed was 0, is 1`), or None if there is none."""
    lines = list(_differences(saved, found, ""))
    if not lines:
        return None
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return lines[0] + more


def shared_keys(saved: object, found: object) -> Any:
    """Return `found` with only the keys of `saved`, at every depth, so that keys of later versions do not count."""
    if isinstance(saved, Mapping) and isinstance(found, Mapping):
        return {key: shared_keys(saved[key], value) for key, value in found.items() if key in saved}
    return found


def _differences(saved: object, found: object, name: str) -> list[str]:
    if isinstance(saved, Mapping) and isinstance(found, Mapping):
        lines = []
        for key in dict.fromkeys([*saved, *found]):
            inner = f"{name}.{key}" if name else str(key)
            lines += _differences(saved.get(key), found.get(key), inner)
        return lines
    if isinstance(saved, list | tuple) and isinstance(found, list | tuple) and len(saved) == len(found):
        return [
            line
            for i, pair in enumerate(zip(saved, found, strict=True))
            for line in _differences(*pair, f"{name}[{i}]")
        ]
    return [] if saved == found else [f"{name} was {_short(saved)}, is {_short(found)}"]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"
