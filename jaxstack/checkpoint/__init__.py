"""Checkpoints: asynchronous saves, content hashes checked on load, restore on another mesh."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "config": ["CheckpointConfig"],
        "layout": ["abstract_state"],
        "manager": ["CheckpointManager", "SaveRecord"],
        "policy": ["should_save", "steps_to_delete"],
    },
)
