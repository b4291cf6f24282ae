"""Checks that Triton is installed and can compile kernels for a device."""

import importlib.util

from pallas_kernels.target import Target


def unsupported_target(target: Target, least: tuple[int, int]) -> str | None:
    """Return why Triton kernels cannot be compiled for a target device, or None if they can.

    Args:
        target: the device.
        least: smallest compute capability that the kernel supports.
    """
    missing = [name for name in ("triton", "jax_triton") if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs {' and '.join(missing)}: pip install 'jaxstack[cuda]'"
    capability = target.compute_capability
    if capability is None or capability < least:
        return f"needs an NVIDIA GPU of compute capability {least[0]}.{least[1]} or more; the target is {target}"
    return None
