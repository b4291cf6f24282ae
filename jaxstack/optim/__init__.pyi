from .base import GroupRule as GroupRule
from .base import Optimizer as Optimizer
from .build import build_optimizer as build_optimizer
from .build import frozen_rule as frozen_rule
from .optimizers import (
    OPTIMIZERS as OPTIMIZERS,
)
from .optimizers import (
    SGD as SGD,
)
from .optimizers import (
    Adafactor as Adafactor,
)
from .optimizers import (
    AdamW as AdamW,
)
from .optimizers import (
    AnyOptimizer as AnyOptimizer,
)
from .optimizers import (
    Lion as Lion,
)
from .optimizers import (
    Muon as Muon,
)
from .schedules import (
    SCHEDULES as SCHEDULES,
)
from .schedules import (
    AnySchedule as AnySchedule,
)
from .schedules import (
    Cosine as Cosine,
)
from .schedules import (
    Schedule as Schedule,
)
