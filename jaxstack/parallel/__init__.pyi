from .config import AXES as AXES
from .config import ParallelConfig as ParallelConfig
from .mesh import make_mesh as make_mesh
from .overlap import gather_project as gather_project
from .overlap import gather_project_scatter as gather_project_scatter
from .overlap import project_scatter as project_scatter
from .overlap import project_sum as project_sum
from .overlap import sum_over_tensor as sum_over_tensor
from .packed_weights import packed_product as packed_product
from .rules import AxisRules as AxisRules
from .rules import make_rules as make_rules
from .sbp import broadcast as broadcast
from .sbp import explicit_mesh as explicit_mesh
from .sbp import partial as partial
from .sbp import redistribute as redistribute
from .sbp import sbp_einsum as sbp_einsum
from .sbp import sbp_of as sbp_of
from .sbp import sbp_sharding as sbp_sharding
from .sbp import split as split
from .shard_map_layers import TokenSplit as TokenSplit
from .shard_map_layers import context_axis as context_axis
from .shard_map_layers import context_bandwidth as context_bandwidth
from .shard_map_layers import splits_heads_alone as splits_heads_alone
from .shard_map_layers import with_local_batch as with_local_batch
from .shard_map_layers import with_local_cache as with_local_cache
from .shard_map_layers import with_local_heads as with_local_heads
from .shard_map_layers import with_local_tokens as with_local_tokens
from .sharding_context import ShardingContext as ShardingContext
from .sharding_context import StepLayout as StepLayout
from .sharding_context import batch_shards as batch_shards
from .sharding_context import current_context as current_context
from .sharding_context import current_rules as current_rules
from .sharding_context import logical_axis_rules as logical_axis_rules
from .sharding_context import shard as shard
from .sharding_context import splits_length as splits_length
from .weight_gather import (
    gather_parameter as gather_parameter,
)
from .weight_gather import (
    gather_weight as gather_weight,
)
from .weight_gather import (
    gathers_ahead as gathers_ahead,
)
from .weight_gather import (
    gathers_shards as gathers_shards,
)
from .weight_gather import (
    save_all_but_gathered as save_all_but_gathered,
)
from .weight_gather import (
    save_for_backward as save_for_backward,
)
