"""Builds configuration from YAML files and `section.key=value` overrides, with errors that suggest corrections."""

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from jaxstack.config.base import Component, new_name
from jaxstack.errors import CHOICES, ConfigError, nearest

C = TypeVar("C", bound=Component)
Tree: TypeAlias = dict[str, Any]
"""Sections, or the keys of a section, as plain data."""


class _Loader(yaml.SafeLoader):
    """YAML loader whose numbers are those of YAML 1.2's core schema; rejects duplicate keys.

    `3e-4` is a float and `0100` is 100. PyYAML follows YAML 1.1, in which `0100` is octal, `1:30` is 90 and `1_000` is
    1000. `1e3` is an integer, because it is one as a number of steps; `yes`, `on` and their like are texts.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if (
                key_node.tag == "tag:yaml.org,2002:merge"
            ):  # `<<: *defaults`; the other keys of the mapping override its keys
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"a key must be text; found {key!r}", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _construct_integer(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    bases = {"0o": 8, "0x": 16}
    return int(text, bases.get(text[:2], 10))


def _construct_whole_number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    value = float(str(loader.construct_scalar(node)).replace("_", ""))
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


_WHOLE = "tag:jaxstack,2026:whole"
_Loader.add_constructor(_WHOLE, _construct_whole_number)
_Loader.add_implicit_resolver(_WHOLE, re.compile(r"^[-+]?\d[\d_]*[eE]\+?\d{1,2}$"), list("-+0123456789"))
_CORE_SCHEMA = {
    "bool": (r"^(true|True|TRUE|false|False|FALSE)$", "tTfF"),
    "int": (r"^([-+]?\d+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    "float": (
        r"^([-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
        "-+0123456789.",
    ),
}
"""Type -> pattern of its plain values in YAML 1.2 (section 10.3.2), and their first characters."""
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] not in _CORE_SCHEMA]
    for first, known in _Loader.yaml_implicit_resolvers.items()
}
for _name, (_pattern, _first) in _CORE_SCHEMA.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_integer)


class _Dumper(yaml.SafeDumper):
    """YAML writer that quotes each text which a reader of YAML 1.1 or of 1.2 would take for a number or a boolean."""


for _name, (_pattern, _first) in _CORE_SCHEMA.items():
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), list(_first))


_MAX_VALUES = 100_000


def _count_values(value: object, known: dict[int, int | None]) -> int:
    """Count the values in a YAML tree with its aliases expanded, to refuse one that is too large.

    Args:
      value: the tree.
      known: id of each visited part -> its count, or None while it is being visited.

    Raises:
      ValueError: an alias refers to itself, or a value cannot be used.
    """
    if not isinstance(value, dict | list):
        _check_scalar(value)
        return 1
    if id(value) not in known:
        known[id(value)] = None
        inner = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count_values(item, known) for item in inner)
    count = known[id(value)]
    if count is None:
        raise ValueError("an alias stands inside the value that it names")
    return count


def _check_scalar(value: object) -> None:
    if isinstance(value, int) and value.bit_length() > 63:
        raise ValueError(f"it holds a whole number of {value.bit_length()} bits; at most 63 bits are supported")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("it holds a text with a null character")


def parse_yaml(text: str, origin: str) -> Any:
    """Parse YAML text to plain data; numbers such as 3e-4 are floats, and 1e3 is an integer, as in YAML 1.2.

    Args:
      text: the YAML.
      origin: what error messages call the text.

    Raises:
      ConfigError: it is not valid YAML, or its aliases expand to too many values.
    """
    try:
        parsed = yaml.load(text, Loader=_Loader)
        if _count_values(parsed, {}) > _MAX_VALUES:
            raise ValueError(f"its aliases expand to more than {_MAX_VALUES:,} values")
        return parsed
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{origin} is not valid YAML{place}: {problem}.") from None


def load_yaml(path: str | Path, holds: str = "sections such as `model:` and `train:`") -> Tree:
    """Read a YAML file of configuration sections as a dict.

    Args:
      path: the file.
      holds: what the file should hold, for the message if it is not a mapping.

    Raises:
      ConfigError: the file is missing, unreadable, not UTF-8, not YAML, or not a mapping.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        folder = path.is_dir()
        parent = path if folder else path.parent if path.parent.is_dir() else Path(".")
        names = [str(p) for p in sorted(parent.glob("*.yaml"))]
        hint = (
            nearest(str(path), names)
            if names
            else f"there is no YAML file in {'the current directory' if parent == Path('.') else parent}."
        )
        if folder:
            raise ConfigError(f"cannot read configuration file {path}: it is a directory; {hint}") from None
        raise ConfigError(f"configuration file {path} does not exist; {hint}") from None
    except UnicodeDecodeError as error:
        marks = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
        found = marks.get(error.object[:2])
        reason = f"it is {found}" if found else f"it is not UTF-8 text ({error.reason} at byte {error.start})"
        raise ConfigError(f"cannot read configuration file {path}: {reason}; save it as UTF-8.") from None
    except (OSError, ValueError) as error:  # ValueError: a path that holds a null character
        raise ConfigError(f"cannot read configuration file {path}: {error}.") from None
    tree = parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold {holds}; it holds a {_kind(tree)}.")
    return tree


def drop_keys_of_replaced(kind: type[Component], tree: Tree, overrides: Sequence[str]) -> tuple[Tree, list[str]]:
    """Drop a file's keys that do not apply to the kind of component (such as an optimizer) chosen by an override.

    `optimizer.name=sgd` on a file with `optimizer: {name: adamw, b2: 0.95}` removes `b2`, which SGD does not have. Keys
    that the new component also has stay.

    Args:
      kind: the component that the tree describes.
      tree: plain data of the file, without the overrides.
      overrides: `section.key=value` strings.

    Returns:
      The tree, and a sentence for each component that was replaced.
    """
    notes = []
    for override in overrides:
        keys, name = _chosen_name(override)
        section = tree
        annotation = kind
        for key in keys:
            components = _components_in(annotation)
            annotation = _annotation(components[0], key) if components else None
            section = section.get(key, {}) if isinstance(section, dict) else {}
        named = [c for c in _components_in(annotation) if "name" in c.model_fields]
        members = {str(c.model_fields["name"].default): c for c in named}
        if not isinstance(section, dict) or len(members) < 2 or name not in members:
            continue
        known = {"name", *_keys(members[name])}
        dropped = [key for key in section if key not in known]
        if dropped:
            tree = copy.deepcopy(tree)
            for key in dropped:
                del _at(tree, keys)[key]
            shown = ", ".join(".".join([*keys, key]) for key in dropped)
            notes.append(f"{'.'.join(keys)}.name={name} has no {shown}: the file's value is left out")
    return tree, notes


def _chosen_name(override: str) -> tuple[list[str], str | None]:
    """Return the section and the component name that an override such as `optimizer.name=sgd` sets (None: no name)."""
    path, _, value = override.partition("=")
    *keys, last = path.strip().split(".")
    if last == "name":
        return keys, value.strip()
    parsed = parse_yaml(value, f"the value of {path}") if value.strip().startswith("{") else None
    return [*keys, last], parsed.get("name") if isinstance(parsed, dict) else None


def _at(tree: Tree, keys: Sequence[str]) -> Tree:
    for key in keys:
        tree = tree[key]
    return tree


def merge_trees(base: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """Merge two nested dicts recursively; values of `over` replace those of `base`."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            value = merge_trees(below, value)
        merged[key] = value
    return merged


def build_component(kind: type[C], tree: object, origin: str = "the configuration", overrides: Sequence[str] = ()) -> C:
    """Validate plain data, and build a configuration component of the class `kind` from it.

    Args:
      kind: class of the component.
      tree: plain data.
      origin: what error messages call the data, such as its file name.
      overrides: the overrides that `merge_overrides` put into the tree; a problem with such a value names the override.

    Raises:
      ConfigError: one message that lists every unknown key (with the nearest known ones), wrong type and broken rule.
    """
    try:
        return kind.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        problems = error.errors(include_url=False)
        # Pydantic also reports a list with wrong items as too short; the problems of its items say more.
        problems = [p for p in problems if p["type"] != "too_short" or not _has_inner(p, problems)]
        lines = [_explain(kind, problem, overrides) for problem in problems[:_MOST_PROBLEMS]]
    except (TypeError, ValueError) as error:
        lines = [f"it holds a value that is not plain data ({error})."]
    except RecursionError:
        lines = ["it is nested too deeply."]
    unique = _with_lists_once(dict.fromkeys(lines))
    if len(unique) == 1 and unique[0].startswith(_OVERRIDE):
        raise ConfigError(unique[0])
    if len(unique) == 1:
        raise ConfigError(f"{origin}: {unique[0]}")
    raise ConfigError(f"{origin} has {len(unique)} problems:\n" + "\n".join(f"  - {line}" for line in unique))


def dump_yaml(component: Component) -> str:
    """Write a configuration component as YAML text, from which an equal component can be loaded."""
    tree = component.model_dump(mode="json", by_alias=True)
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)


def _shortened(value: object) -> str:
    """Return a value as Python writes it, without the middle of a long one."""
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:150]} ... {shown[-40:]}"


def _kind(value: object) -> str:
    names = {bool: "true/false value", int: "number", float: "number", str: "text", list: "list", dict: "mapping"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


_WANTED = {
    "int_type": "a whole number", "int_from_float": "a whole number", "int_parsing": "a whole number",
    "float_type": "a number", "float_parsing": "a number", "bool_type": "true or false",
    "bool_parsing": "true or false", "string_type": "text", "tuple_type": "a list", "list_type": "a list",
    "model_type": "a section with keys", "model_attributes_type": "a section with keys", "dict_type": "a mapping",
    "finite_number": "a finite number",
}  # fmt: skip


def _has_inner(problem: ErrorDetails, problems: Sequence[ErrorDetails]) -> bool:
    """Return True if another validation problem concerns a value nested inside the value of this problem."""
    outer = problem["loc"]
    return any(len(p["loc"]) > len(outer) and p["loc"][: len(outer)] == outer for p in problems)


_OVERRIDE = "override "
_MOST_PROBLEMS = 10
"""Largest number of problems that a message lists."""


def _with_lists_once(lines: Iterable[str]) -> list[str]:
    """Return the lines of a message, without the lists of valid names that an earlier line of it has."""
    told = set[str]()
    found = list[str]()
    for line in lines:
        problem, mark, names = line.partition(f"; {CHOICES}")
        known = bool(mark) and names in told
        found.append(f"{problem}; the choices are those listed above." if known else line)
        if mark:
            told.add(names)
    return found


def _explain(kind: type[BaseModel], problem: ErrorDetails, overrides: Sequence[str]) -> str:
    """Return one line about a problem that pydantic found: the key, what is wrong, and a remedy."""
    path, owner = _walk(kind, problem["loc"])
    name = ".".join(path)
    text = _explain_problem(path, owner, problem)

    def concerns(override: str) -> bool:
        """Return True if the override set the wrong value, a part of it, or another value that the message names."""
        key = override.partition("=")[0].strip()
        return f"{name}.".startswith(f"{key}.") or bool(path) and key.startswith(f"{name}.") or f"{key} (" in text

    given = [override for override in overrides if concerns(override)]
    return f"{_OVERRIDE}{', '.join(given)}: {text}" if given else text


def _explain_problem(path: list[str], owner: type[BaseModel], problem: ErrorDetails) -> str:
    where = ".".join(path)
    found = problem.get("input")
    code = problem["type"]
    context = problem.get("ctx", {})
    if code == "extra_forbidden":
        section, _, inner = path[-1].partition(".")
        if inner and section in _keys(owner):
            return f"unknown key {where!r}; in a file, write {section}: {{{inner}: {found}}}."
        if (renamed := new_name(where)) is not None:
            return f"{where} was renamed to {renamed}."
        return f"unknown key {where!r}; {nearest(path[-1], _keys(owner))}"
    if code == "missing":
        return f"{where} is required."
    if code in _WANTED:
        shown = "null" if found is None else f"{_kind(found)} {_shortened(found)}"
        shown = f"a {_kind(found)}" if isinstance(found, dict | list) else shown
        return f"{where} must be {_WANTED[code]}; found {shown}{_hint(path, owner, code, found)}."
    if code == "literal_error":
        choices = re.findall(r"[^', ]+", context["expected"].replace(" or ", ", "))
        return f"{where} cannot be {found!r}; {nearest(str(found), choices)}"
    if code in ("union_tag_invalid", "union_tag_not_found"):
        members = _components_in(_annotation(owner, next(part for part in reversed(path) if not part.isdigit())))
        tag = _tag(members[0])
        choices = [str(member.model_fields[tag].default) for member in members]
        name = found.get(tag) if isinstance(found, dict) else found
        if code == "union_tag_not_found" and isinstance(found, dict):
            return f"{where}.{tag} is required; {nearest('', choices)}"
        return f"{where}.{tag} cannot be {name!r}; {nearest(str(name), choices)}"
    if code == "value_error":
        message = str(context["error"])
        return f"{where}: {message}" if where else message
    if code == "too_short" and isinstance(found, list):
        return f"{where} must have at least {context['min_length']} item(s); found {len(found)}."
    limit = problem["msg"].removeprefix("Input ")
    if code == "too_long" and isinstance(found, list):
        return f"{where} must have at most {context['max_length']} item(s); found {len(found)}."
    return f"{where}: {limit}; found {_shortened(found)}." if where else f"{limit}."


def _hint(path: Sequence[str], owner: type[BaseModel], code: str, found: object) -> str:
    """Return a hint, for an error message, on how to write a component where only text was given; else ""."""
    key = next(part for part in reversed(path) if not part.isdigit())
    members = _components_in(_annotation(owner, key))
    if not isinstance(found, str) or not members or not code.startswith(("model", "dict", "list", "tuple")):
        return ""
    if get_origin(_annotation(members[0], "name")) is Literal:
        return f"; set {'.'.join(path)}.name to choose one"
    return f"; write {key}=[{{path: {found}}}]" if "path" in members[0].model_fields else ""


def _walk(kind: type[BaseModel], location: Sequence[int | str]) -> tuple[list[str], type[BaseModel]]:
    """Translate pydantic's location of an error to the keys in the file and the configuration class of the last key.

    Returns:
      The keys as in the file, and the component that has the last of them.
    """
    path: list[str] = []
    owner: type[BaseModel] = kind
    annotation: object = kind
    for part in location:
        components = _components_in(annotation)
        tagged = [c for c in components if part in get_args(_annotation(c, _tag(c)))]
        if tagged and len(components) > 1:  # the name of a member of a union, which is not a key of the file
            annotation = tagged[0]
            continue
        if isinstance(part, int):
            path.append(str(part))
            continue
        if components:
            owner = components[0]
            annotation = _annotation(owner, part)
        path.append(str(part))
    return path, owner


def _tag(component: type[BaseModel]) -> str:
    """Return the key that chooses the kind of a component: `name`, or `method` for rules that choose by it."""
    return "name" if "name" in component.model_fields else "method"


def _keys(component: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in component.model_fields.items()]


def _annotation(component: type[BaseModel], key: str) -> object:
    """Return the type of a component's field, by name or alias; None if there is no such field."""
    for name, field in component.model_fields.items():
        if key in (name, field.alias):
            return field.annotation
    return None


def _components_in(annotation: object) -> list[type[BaseModel]]:
    """Return the component classes in a type annotation such as `Part | None` or `tuple[Part, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [c for inner in get_args(annotation) for c in _components_in(inner)]


def overridden_keys(overrides: Sequence[str]) -> set[str]:
    """Return the keys that `section.key=value` strings set."""
    return {override.partition("=")[0].strip() for override in overrides}


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
