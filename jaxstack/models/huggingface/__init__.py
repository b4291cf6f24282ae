"""Hugging Face checkpoints: what their config.json says and where their tensors lie, one file a group of families."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
