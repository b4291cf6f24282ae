"""Starts the processes of a node, watches them, and starts them again. No jax: it must outlive what jax does."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
