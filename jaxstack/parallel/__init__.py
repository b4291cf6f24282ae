"""Parallelism: device mesh, sharding rules for logical axes, sharded weights, and pipelines."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
