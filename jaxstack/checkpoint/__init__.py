"""Checkpoints: asynchronous saves, content hashes checked on load, restore on another mesh."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
