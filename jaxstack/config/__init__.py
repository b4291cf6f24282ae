"""Typed configuration: a frozen component base, and a YAML loader with overrides and did-you-mean."""
