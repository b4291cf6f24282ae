"""Typed configuration: immutable components, and a YAML loader with overrides and suggestions for misspelt keys."""
