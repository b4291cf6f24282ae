from .config import AXES as AXES, ParallelConfig as ParallelConfig
from .island import with_local_batch as with_local_batch
from .mesh import make_mesh as make_mesh
from .rules import (
    AxisRules as AxisRules,
    current_rules as current_rules,
    gather_weight as gather_weight,
    logical_axis_rules as logical_axis_rules,
    make_rules as make_rules,
    shard as shard,
)
