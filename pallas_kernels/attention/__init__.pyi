from .api import BACKENDS as BACKENDS
from .api import flash_attention as flash_attention
from .remat import save_attention as save_attention
from .sparse import block_sparse_attention as block_sparse_attention
from .sparse import longformer_attention as longformer_attention
