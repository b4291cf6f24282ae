from .api import linear_attention as linear_attention
from .api import performer_attention as performer_attention
from .favor import random_projection as random_projection
from .state import LinearState as LinearState
from .state import empty_linear_state as empty_linear_state
