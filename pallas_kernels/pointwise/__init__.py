"""Normalisation, rotary embedding and gated activation in plain XLA, which fuses them with what is near."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
