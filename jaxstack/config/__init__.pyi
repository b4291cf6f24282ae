from .base import Component as Component
from .base import PathRule as PathRule
from .loader import (
    build_component as build_component,
)
from .loader import (
    dump_yaml as dump_yaml,
)
from .loader import (
    load_yaml as load_yaml,
)
from .loader import (
    merge_overrides as merge_overrides,
)
from .loader import (
    merge_trees as merge_trees,
)
