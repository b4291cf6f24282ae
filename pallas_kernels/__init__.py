"""Attention, loss and pointwise operations for JAX on NVIDIA GPUs, usable from any JAX or Flax code.

Every operation is a plain function with an ordered table of backends (see `pallas_kernels.dispatch`). The
package imports jax and nothing of jaxstack.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach(
    __name__,
    submod_attrs={
        "attention.api": ["flash_attention"],
        "attention.remat": ["save_attention"],
        "cross_entropy.api": ["linear_cross_entropy"],
        "pointwise.norm": ["rms_norm"],
        "pointwise.rotary": ["apply_rotary"],
        "pointwise.gated": ["swiglu"],
        "dispatch": ["Choice", "NotSupported", "record_choices"],
        "target": ["Target", "current_target", "lowering_platform"],
    },
)
