"""Exact softmax attention: `api.flash_attention` chooses among the backends of this folder."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
