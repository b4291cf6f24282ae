from .base import Component as Component
from .loader import (
    build_component as build_component,
    dump_yaml as dump_yaml,
    load_yaml as load_yaml,
    merge_overrides as merge_overrides,
    merge_trees as merge_trees,
)
