from .base import GroupRule as GroupRule, Optimizer as Optimizer
from .build import build_optimizer as build_optimizer
from .optimizers import (
    Adafactor as Adafactor,
    AdamW as AdamW,
    AnyOptimizer as AnyOptimizer,
    Lion as Lion,
    OPTIMIZERS as OPTIMIZERS,
    SGD as SGD,
)
from .schedules import (
    AnySchedule as AnySchedule,
    Cosine as Cosine,
    SCHEDULES as SCHEDULES,
    Schedule as Schedule,
)
