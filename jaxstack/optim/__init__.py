"""Optimizers and learning-rate schedules as data, built on Optax."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "base": ["GroupRule", "Optimizer"],
        "build": ["build_optimizer"],
        "optimizers": ["OPTIMIZERS", "AdamW", "AnyOptimizer", "Adafactor", "Lion", "SGD"],
        "schedules": ["SCHEDULES", "AnySchedule", "Cosine", "Schedule"],
    },
)
