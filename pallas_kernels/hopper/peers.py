"""Checks that kernels on the devices of an axis can reach each other's memory."""

import jax

from pallas_kernels.target import Target, device_kind

MOST_DEVICES = 8
"""GPUs of a host that NVLink joins."""


def unsupported_peers(target: Target, devices: int, kind: str | None = None) -> str | None:
    """Return why kernels on that many devices cannot reach each other's memory, or None if they can.

    Args:
        target: Device that is lowered for.
        devices: Number of devices of the axis.
        kind: jax's name of the device; None: that of the target.
    """
    kind = device_kind() if kind is None else kind
    if not target.declared and jax.process_count() > 1:
        return (
            f"devices reach each other's memory within one process, these are {jax.process_count()}: "
            f"start one process on each machine and keep the axis within it"
        )
    if devices > MOST_DEVICES:
        return f"sends to at most {MOST_DEVICES} devices, the axis has {devices}"
    if devices > 1 and "PCIe" in kind:
        return f"sends over NVLink, which joins no {kind}"
    return None
