"""Attention, loss and pointwise operations for JAX on NVIDIA GPUs, usable from any JAX or Flax code.

Every operation is a plain function with an ordered table of backends (see `pallas_kernels.dispatch`). The package
imports jax and nothing of jaxstack; a name is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallas_kernels.attention.api import flash_attention as flash_attention
    from pallas_kernels.attention.remat import save_attention as save_attention
    from pallas_kernels.cross_entropy.api import linear_cross_entropy as linear_cross_entropy
    from pallas_kernels.dispatch import Choice as Choice
    from pallas_kernels.dispatch import NotSupported as NotSupported
    from pallas_kernels.dispatch import record_choices as record_choices
    from pallas_kernels.pointwise.gated import swiglu as swiglu
    from pallas_kernels.pointwise.norm import rms_norm as rms_norm
    from pallas_kernels.pointwise.rotary import apply_rotary as apply_rotary
    from pallas_kernels.target import Target as Target
    from pallas_kernels.target import current_target as current_target
    from pallas_kernels.target import lowering_platform as lowering_platform

_MODULES = {
    "Choice": "dispatch",
    "NotSupported": "dispatch",
    "Target": "target",
    "apply_rotary": "pointwise.rotary",
    "current_target": "target",
    "flash_attention": "attention.api",
    "linear_cross_entropy": "cross_entropy.api",
    "lowering_platform": "target",
    "record_choices": "dispatch",
    "rms_norm": "pointwise.norm",
    "save_attention": "attention.remat",
    "swiglu": "pointwise.gated",
}
__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
