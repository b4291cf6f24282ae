"""Checks that the Hopper kernels can be compiled for a device with the installed release of jax."""

import importlib.util

import jax

from pallas_kernels.target import Target

_LEAST_JAX = (0, 11)


def unsupported_target(target: Target, interpret: bool) -> str | None:
    """Return why the Hopper kernels cannot be compiled for `target`, or None if they can.

    With `interpret` they run on every device; tests interpret them on a CPU.
    """
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < _LEAST_JAX:
        return f"needs jax 0.11 or newer (Python 3.12 or newer), installed is {jax.__version__}"
    if importlib.util.find_spec("jax.experimental.pallas.mosaic_gpu") is None:
        return "this jax has no Mosaic GPU"
    if not interpret and (target.platform != "cuda" or target.compute_capability != (9, 0)):
        return f"is written for Hopper (compute capability 9.0), lowered for {target}"
    return None
