"""The base of every configuration component: frozen, strict, and closed to unknown keys."""

from pydantic import BaseModel, ConfigDict


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
