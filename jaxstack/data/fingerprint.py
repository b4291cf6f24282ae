"""Compares the training data at a run's checkpoint with the data that is found when the run is resumed."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxstack.data.source_files import SourceFile
from jaxstack.observe.number_format import byte_size, plural

_MOST_FILES = 1000
"""Largest number of files that are listed by name, in all sources together."""
_MOST_NAMES = 4
_SHARDS = ("shards", "held_out_shards")
_FOLLOWS_SHARDS = (*_SHARDS, "order")
"""Keys of a fingerprint that change with the files."""


def list_sources(sources: Sequence[tuple[str, Sequence[SourceFile]]]) -> list[dict[str, Any]]:
    """List the files of each data source as plain JSON, for messages that name the files changed since a checkpoint.

    Args:
      sources: path of each source as configured, with its files.

    Returns:
      Per source its `path`, the `count` of its files, their `bytes`, and, unless there are more than 1,000 files in
      all, `files`: name -> [size in bytes, version].
    """
    names_fit = sum(len(files) for _, files in sources) <= _MOST_FILES
    listed = []
    for path, files in sources:
        names = {file.name: [file.size, file.version] for file in files} if names_fit else None
        listed.append({"path": path, "count": len(files), "bytes": sum(f.size for f in files), "files": names})
    return listed


def data_difference(
    saved: Mapping[str, Any], found: Mapping[str, Any], saved_sources: object, found_sources: object
) -> str | None:
    """Return one line that says how the data of a resumed run has changed since its checkpoint; None if it has not.

    Where the tokens differ, the line names the files that were added, removed or changed, if they are known.

    Args:
      saved, found: fingerprints at the time of the checkpoint, and now.
      saved_sources, found_sources: results of `list_sources`; None: not known.
    """
    difference = fingerprint_difference(saved, found)
    if difference is None or all(saved.get(key) == found.get(key) for key in _SHARDS):
        return difference
    files = _source_differences(saved_sources, found_sources)
    if not files:
        return difference
    without = [{key: value for key, value in print_.items() if key not in _FOLLOWS_SHARDS} for print_ in (saved, found)]
    others = fingerprint_difference(*without)
    return "; ".join([*files, *([others] if others else [])])


def _source_differences(saved: object, found: object) -> list[str]:
    if not isinstance(saved, list) or not isinstance(found, list) or saved == found:
        return []
    if len(saved) != len(found):
        return [f"there were {plural(len(saved), 'source')}, there are {len(found)}"]
    lines = []
    for before, now in zip(saved, found, strict=True):
        if before["path"] != now["path"]:
            lines.append(f"the source was {before['path']}, is {now['path']}")
        if before["files"] is not None and now["files"] is not None:
            lines += _file_differences(now["path"], before["files"], now["files"])
        elif (before["count"], before["bytes"]) != (now["count"], now["bytes"]):
            had, has = (f"{plural(x['count'], 'file')} ({byte_size(x['bytes'])})" for x in (before, now))
            lines.append(f"{now['path']} had {had}, has {has}")
    return lines


def _file_differences(path: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    resized = [name for name in now if name in before and before[name][0] != now[name][0]]
    touched = [name for name in now if name in before and before[name][0] == now[name][0] and before[name] != now[name]]
    kinds = {
        "added": [name for name in now if name not in before],
        "removed": [name for name in before if name not in now],
        "changed": [f"{name} (was {before[name][0]:,} bytes, is {now[name][0]:,})" for name in resized],
        "rewritten with the same size": touched,
    }
    parts = []
    for kind, names in kinds.items():
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        if names:
            parts.append(f"{kind} {', '.join(names[:_MOST_NAMES])}{more}")
    return [f"in {path}: {'; '.join(parts)}"] if parts else []


def fingerprint_difference(
    saved: Mapping[str, Any], found: Mapping[str, Any], *, form: str = "{name} was {saved}, is {found}"
) -> str | None:
    """Return a line that describes the first difference of two fingerprints or configurations, or None.

    Args:
      saved, found: plain data.
      form: the text for a difference, with the key's full name and both values.
    """
    lines = [
        form.format(name=name, saved=_short(one), found=_short(other))
        for name, one, other in _differences(saved, found, "")
    ]
    if not lines:
        return None
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    return lines[0] + more


def shared_keys(saved: object, found: object) -> Any:
    """Return `found` without keys missing from `saved`, at every depth, as later releases may have added keys."""
    if isinstance(saved, Mapping) and isinstance(found, Mapping):
        return {key: shared_keys(saved[key], value) for key, value in found.items() if key in saved}
    if isinstance(saved, list | tuple) and isinstance(found, list | tuple) and len(saved) == len(found):
        return [shared_keys(*pair) for pair in zip(saved, found, strict=True)]
    return found


def _differences(saved: object, found: object, name: str) -> list[tuple[str, object, object]]:
    """Return the full name of each key whose values differ, and both values."""
    if isinstance(saved, Mapping) and isinstance(found, Mapping):
        differing = []
        for key in dict.fromkeys([*saved, *found]):
            inner = f"{name}.{key}" if name else str(key)
            differing += _differences(saved.get(key), found.get(key), inner)
        return differing
    if isinstance(saved, list | tuple) and isinstance(found, list | tuple) and len(saved) == len(found):
        return [
            one for i, pair in enumerate(zip(saved, found, strict=True)) for one in _differences(*pair, f"{name}[{i}]")
        ]
    return [] if saved == found else [(name, saved, found)]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"
