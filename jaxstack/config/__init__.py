"""Typed configuration: a frozen component base, and a YAML loader with overrides and did-you-mean."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "base": ["Component"],
        "loader": ["build_component", "dump_yaml", "load_yaml", "merge_overrides", "merge_trees"],
    },
)
