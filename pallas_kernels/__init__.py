"""Attention, loss and pointwise operations for JAX on NVIDIA GPUs, usable from any JAX or Flax code.

Every operation is a plain function with an ordered table of backends (see `pallas_kernels.dispatch`). The
package imports jax and nothing of jaxstack.
"""

import lazy_loader as lazy

__getattr__, __dir__, __all__ = lazy.attach_stub(__name__, __file__)
