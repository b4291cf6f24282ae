"""Base class of all configuration components: immutable, with strict types and without unknown keys.

Keys that were renamed: errors name the new key, and stored runs are read under either name.
"""

import copy
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, field_validator
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from jaxstack.errors import ConfigError, nearest


class InvalidComponentError(ConfigError, ValueError):
    """Raised by the constructor of a component for values that break its rules."""


class _RefusesPlainly(type(BaseModel)):
    """Metaclass of components: a call with wrong values raises one `InvalidComponentError` that names them all."""

    if not TYPE_CHECKING:  # type checkers shall see the constructors of the components

        def __call__(cls, *args: Any, **values: Any) -> Any:
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                problems = [_plainly(problem, vars(cls)["__pydantic_fields__"]) for problem in error.errors()]
                text = "; ".join(dict.fromkeys(problems))
                raise InvalidComponentError(f"{cls.__name__}: {text}" + ("" if text.endswith("?") else ".")) from None


def _plainly(problem: ErrorDetails, fields: Iterable[str]) -> str:
    """Return a problem of a component's values as a rule with the value that breaks it."""
    where = ".".join(map(str, problem["loc"]))
    if problem["type"] == "extra_forbidden":
        return f"unknown key {where!r}; {nearest(where, fields)}".rstrip(".")
    text = problem["msg"].removeprefix("Value error, ").removeprefix("Input ").rstrip(".")
    return f"{where} {text}; found {problem['input']!r:.200}" if where else text


class Component(BaseModel, metaclass=_RefusesPlainly):
    """A typed, immutable, hashable part of a configuration, declared in the module of the code that it configures.

    Values are strict: `steps: true` or `steps: "10"` is an error, not 1 or 10. The docstring under a field is its
    description in the JSON schema.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    if TYPE_CHECKING:  # pydantic makes it, as components are frozen

        def __hash__(self) -> int: ...


class PathRule(Component):
    """Base of rules for the parameters whose path contains a match of a regular expression; the first match wins."""

    path: str

    @field_validator("path")
    @classmethod
    def _compiles(cls, path: str) -> str:
        try:
            re.compile(path)
        except re.error as error:
            raise ValueError(f"{path!r} is not a regular expression: {error}.") from None
        return path


@dataclasses.dataclass(frozen=True, eq=False)
class NameIn:
    """Annotation of a string field that accepts only a table's names: `norm: Annotated[str, NameIn(NORMS)]`."""

    table: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        """The accepted names, in the order of the table."""
        return list(self.table)

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(self.names)


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
