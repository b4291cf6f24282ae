"""Attention, loss, FP8, grouped matmul and pointwise operations for JAX on NVIDIA GPUs, for any JAX or Flax code.

Every operation is a plain function with an ordered table of backends (see `pallas_kernels.dispatch`). The package
imports jax and nothing from jaxstack. `__init__.pyi` lists the exported names; each is imported on first use.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
