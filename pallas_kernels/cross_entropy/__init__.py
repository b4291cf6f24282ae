"""The loss of a language model's head: `api.linear_cross_entropy` chooses among this folder's backends."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
