from .api import BACKENDS as BACKENDS
from .api import SUM_BACKENDS as SUM_BACKENDS
from .api import linear_cross_entropy as linear_cross_entropy
from .api import linear_cross_entropy_sum as linear_cross_entropy_sum
