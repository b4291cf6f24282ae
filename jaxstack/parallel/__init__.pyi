from .attention_island import with_local_heads as with_local_heads
from .config import AXES as AXES
from .config import ParallelConfig as ParallelConfig
from .island import with_local_batch as with_local_batch
from .mesh import make_mesh as make_mesh
from .overlap import gather_project as gather_project
from .overlap import gather_project_scatter as gather_project_scatter
from .overlap import project_scatter as project_scatter
from .rules import (
    AxisRules as AxisRules,
)
from .rules import (
    current_rules as current_rules,
)
from .rules import (
    gather_parameter as gather_parameter,
)
from .rules import (
    gather_weight as gather_weight,
)
from .rules import (
    logical_axis_rules as logical_axis_rules,
)
from .rules import (
    make_rules as make_rules,
)
from .rules import (
    shard as shard,
)
