"""Typed configuration: a frozen component base, and a YAML loader with overrides and did-you-mean."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
