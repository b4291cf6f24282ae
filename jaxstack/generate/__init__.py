"""Sampling text from trained models."""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__, submod_attrs={"decode": ["Decoder"], "sampling": ["Sampling", "sample"]}
)
