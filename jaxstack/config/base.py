"""The base of every configuration component: frozen, strict, and closed to unknown keys."""

import re

from pydantic import BaseModel, ConfigDict, field_validator


class Component(BaseModel):
    """A typed, immutable, hashable part of a configuration.

    Declared beside the code that it configures. Strict: `steps: true` or `steps: "10"` is an error, not 1 or 10.
    A docstring under a field becomes its description in the JSON schema.
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
    """What holds for the parameters in whose path the regular expression is found; the first rule that matches wins."""

    path: str

    @field_validator("path")
    @classmethod
    def _compiles(cls, path: str) -> str:
        try:
            re.compile(path)
        except re.error as error:
            raise ValueError(f"{path!r} is not a regular expression: {error}.") from None
        return path
