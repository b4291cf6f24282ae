"""Base class of all configuration components: immutable, with strict types and without unknown keys."""

import re

from pydantic import BaseModel, ConfigDict, field_validator


class Component(BaseModel):
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
