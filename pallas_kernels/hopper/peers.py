"""Checks that kernels on the devices of an axis can reach each other's memory."""

import jax

from pallas_kernels.target import Target, device_kind

MOST_DEVICES = 8
"""GPUs of a host that NVLink joins."""
_PROCESSES_JAX = (0, 11, 2)
"""First version of jax with which the kernels were compiled for several processes."""


def unsupported_peers(target: Target, devices: int, kind: str | None = None) -> str | None:
    """Return why kernels on that many devices cannot reach each other's memory, or None if they can.

    Args:
        target: Device that is lowered for.
        devices: Number of devices of the axis.
        kind: jax's name of the device; None: that of the target.
    """
    kind = device_kind() if kind is None else kind
    if not target.declared and jax.process_count() > 1 and (reason := _unsupported_processes()):
        return reason
    if devices > MOST_DEVICES:
        return f"sends to at most {MOST_DEVICES} devices, the axis has {devices}"
    if devices > 1 and "PCIe" in kind:
        return f"sends over NVLink, which joins no {kind}"
    return None


def unmeasured_peers(target: Target) -> str | None:
    """Return why kernels that reach the memory of other processes' devices are not chosen by default, or None."""
    if target.declared or jax.process_count() == 1:
        return None
    return (
        f"it was not timed yet between processes, these are {jax.process_count()}; it runs if it is asked for by name"
    )


def _unsupported_processes() -> str | None:
    """Return why the processes' devices cannot reach each other's memory, or None.

    In one process XLA tells a kernel the addresses of its arrays on all devices. For several, jax has XLA allocate
    these arrays in memory that NCCL maps into all processes; XLA does that for all devices of the mesh together, and
    between hosts NCCL maps none. NVSHMEM, jax's other way, is no longer in XLA.
    """
    hosts = len({getattr(device, "slice_index", device.process_index) for device in jax.devices()})
    if hosts > 1:
        return (
            f"reaches memory within one host, and the {jax.process_count()} processes are on {hosts}: jax "
            f"{jax.__version__} addresses all devices of the mesh, also those outside of the axis"
        )
    if jax.__version_info__ < _PROCESSES_JAX:
        least = ".".join(map(str, _PROCESSES_JAX))
        return f"needs jax {least} or newer with several processes on a host, installed is {jax.__version__}"
    return None
