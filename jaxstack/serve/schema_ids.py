"""Names of JSON schemas, which let several of them stand in one schema: each keeps its references to itself."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urldefrag, urljoin

_VALUES = ("const", "enum", "default", "examples")
"""Keywords whose values are data: what looks like a reference there is none."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are schemas by names, which may be those of keywords."""


def with_own_ids(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a schema whose `$id`s no other one has, those of its parts included, and its references to them.

    Args:
      schema: a JSON schema; it may lack an `$id`, or have the same ones as another.
      name: a URI that is the schema's alone.

    Raises:
      ValueError: an `$id` or a `$ref` is no URI.
    """
    base = schema["$id"] if isinstance(schema.get("$id"), str) else name
    names = {found: f"{name}:{quote(found, safe='')}" for found in _ids(schema, base)} | {base: name}
    return {"$id": name, **_rename(schema, base, names)}


def _base(part: dict[str, Any], base: str) -> str:
    """Return the URI that references in a part of a schema are relative to, given that around it."""
    own = part.get("$id")
    return _join(base, own)[0] if isinstance(own, str) else base


def _join(base: str, reference: str) -> tuple[str, str]:
    """Return the absolute URI of a reference without its fragment, and the fragment."""
    try:
        found = urldefrag(urljoin(base, reference))
    except ValueError as error:
        raise ValueError(f"$id and $ref of a schema must be URIs; {reference!r} is none: {error}") from None
    return found.url, found.fragment


def _ids(part: Any, base: str) -> Iterator[str]:
    """Yield the absolute `$id`s in a part of a schema."""
    if isinstance(part, list):
        for item in part:
            yield from _ids(item, base)
    if not isinstance(part, dict):
        return
    own = _base(part, base)
    if isinstance(part.get("$id"), str):
        yield own
    for key, value in part.items():
        if key in _NAMED and isinstance(value, dict):
            yield from _ids([*value.values()], own)
        elif key not in _VALUES:
            yield from _ids(value, own)


def _rename(part: Any, base: str, names: dict[str, str]) -> Any:
    """Return a part of a schema with new names in place of the absolute `$id`s of which they are values."""
    if isinstance(part, list):
        return [_rename(item, base, names) for item in part]
    if not isinstance(part, dict):
        return part
    own = _base(part, base)
    renamed = dict[str, Any]()
    for key, value in part.items():
        if key in _NAMED and isinstance(value, dict):
            renamed[key] = {name: _rename(schema, own, names) for name, schema in value.items()}
        elif key in ("$id", "$ref") and isinstance(value, str):
            renamed[key] = _rename_reference(own, value, names) if key == "$ref" else names.get(own, value)
        else:
            renamed[key] = value if key in _VALUES else _rename(value, own, names)
    return renamed


def _rename_reference(base: str, reference: str, names: dict[str, str]) -> str:
    """Return a reference with the new name of what it refers to, if it has one."""
    place, fragment = _join(base, reference)
    return f"{names[place]}#{fragment}" if place in names else reference
