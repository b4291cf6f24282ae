"""Mesh, logical-axis rules and sharding constraints."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "config": ["AXES", "ParallelConfig"],
        "mesh": ["make_mesh"],
        "rules": ["AxisRules", "current_rules", "gather_weight", "logical_axis_rules", "make_rules", "shard"],
    },
)
