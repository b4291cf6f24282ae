"""Optimizers and learning-rate schedules that are chosen by configuration, built on Optax."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
