from .api import BACKENDS as BACKENDS
from .api import linear_cross_entropy as linear_cross_entropy
