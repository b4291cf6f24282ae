from .api import BACKENDS as BACKENDS
from .api import flash_attention as flash_attention
from .remat import save_attention as save_attention
